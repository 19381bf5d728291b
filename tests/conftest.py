"""What all tests share: the command line as a subprocess with a store of its own, and a recipe without converters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# Two processes of tests on two cores: one thread each, and none that spins while it waits.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

PLUGIN = Path(__file__).parent / "plugin"
REPOSITORY = Path(__file__).parent.parent

MODEL = """
import torch
from torch import nn

def tiny(bad: bool = False) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    if bad:
        module[0].weight.data[0] = float("nan")
    return module
"""

RECIPE = """\
version: 1
name: tiny
model:
  factory: model.py:tiny
task:
  tensors:
    inputs: {image: [1, 3, 12, 12]}
passes:
  - scale: {factor: 2.0}
targets:
  copy: {}
measure: {latency_runs: 2, target_samples: 2}
gates:
  max_drop: null
"""


@dataclass(frozen=True)
class Done:
    """A finished command."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


@dataclass(frozen=True)
class Edgec:
    """Runs `edgec` in `folder`, with its own store and the test plugin installed."""

    folder: Path
    environment: dict[str, str]

    def __call__(self, *arguments: str | Path, **environment: str) -> Done:
        command = [sys.executable, "-m", "edgec", *map(str, arguments)]
        run = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        return Done(run.returncode, run.stdout, run.stderr)

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """Start it and don't wait."""
        command = [sys.executable, "-m", "edgec", *map(str, arguments)]
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    @property
    def store(self) -> Path:
        return Path(self.environment["EDGEC_CACHE"])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts the command line as a process is slow: a third of a second each, and there are hundreds."""
    for item in items:
        if {"edgec", "command"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def edgec(tmp_path: Path) -> Edgec:
    folder = tmp_path / "project"
    folder.mkdir()
    environment = os.environ | {"EDGEC_CACHE": str(tmp_path / "store"), "PYTHONPATH": str(PLUGIN), "COLUMNS": "120"}
    return Edgec(folder, environment)


@pytest.fixture
def write_recipe(edgec: Edgec) -> Callable[..., Path]:
    """Writes the tiny recipe and its model, with pieces of its text replaced."""

    def write(*replacements: tuple[str, str], name: str = "recipe.yaml") -> Path:
        text = RECIPE
        for old, new in replacements:
            assert old in text, f"the tiny recipe has no {old!r}"
            text = text.replace(old, new)
        (edgec.folder / "model.py").write_text(MODEL)
        path = edgec.folder / name
        path.write_text(text)
        return path

    return write
