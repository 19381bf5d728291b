"""`edgec reference` as a process, over a tiny Llama."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.raw_http import Served, started
from tests.reference.checkpoints import write_huggingface

Serve = Callable[..., Served]


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder."""
    folder = tmp_path_factory.mktemp("reference") / "tiny-llama"
    write_huggingface(folder)
    return folder


@pytest.fixture
def edgec_reference(tiny_llama: Path) -> Iterator[Serve]:
    """Start `edgec reference` with arguments; the model may be another."""
    with servers(tiny_llama) as start:
        yield start


class servers:
    """Starts servers, and ends them."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Serve:
        return self._start

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def _start(self, *arguments: str | Path, model: Path | None = None) -> Served:
        command = [sys.executable, "-m", "edgec", "reference", str(model or self._model), "--port", "0"]
        device = () if "--device" in arguments else ("--device", "cpu")
        whole = [*command, *device, *map(str, arguments)]
        process = subprocess.Popen(whole, stderr=subprocess.PIPE, text=True)
        self._processes.append(process)
        return started(process)
