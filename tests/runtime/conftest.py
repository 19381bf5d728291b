"""The fake core and a bundle for it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgec.runtime.engine import Engine
from edgec.runtime.library import load
from tests.fake_engine import compile_fake, write_bundle


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_fake(tmp_path_factory.mktemp("fake"))


@pytest.fixture
def fake_core(fake_library: Path) -> ctypes.CDLL:
    return load(fake_library)


@pytest.fixture
def fake_bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "parrot-out")


@pytest.fixture
def parrot(fake_core: ctypes.CDLL, fake_bundle: Path) -> Iterator[Engine]:
    """An engine that repeats its prompt."""
    with Engine(fake_bundle, library=fake_core) as engine:
        yield engine
