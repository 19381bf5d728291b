"""A good bundle of a tiny model, a text, and the command over both."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, Done
from tests.tiny_bundle import write_tiny_bundle

# What a tiny model needs; its random weights leave likeliest tokens close together, so that a few turn over.
SHORT = ("--tokens", "700", "--prompts", "4", "--answer", "24", "--min-top1", "0.97")


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bundle(tmp_path_factory.mktemp("validation") / "good")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words of random letters: as good as any text to a model of random weights."""
    draw = random.Random(1)
    words = ("".join(draw.choice("abcdefghijklmnop") for _ in range(draw.randint(2, 8))) for _ in range(400))
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(words))
    return path


@pytest.fixture
def broken(good: Path, tmp_path: Path) -> Path:
    """A copy of the good bundle, to break."""
    return Path(shutil.copytree(good, tmp_path / "broken"))


@pytest.fixture(scope="session")
def validate(text: Path) -> Callable[..., Done]:
    """`edgec validate BUNDLE …` in a process of its own, over the text."""

    def run(bundle: Path, *arguments: str | Path) -> Done:
        words = [sys.executable, "-m", "edgec", "validate", str(bundle), "--text", str(text), *SHORT]
        environment = {k: v for k, v in os.environ.items() if k != "EDGEC_LIBRARY"} | {"PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(
            [*words, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=500
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run
