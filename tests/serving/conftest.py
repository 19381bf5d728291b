"""The server over the fake core: in this process, and as `edgec serve` in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from edgec.runtime.backend import NativeBackend
from edgec.runtime.engine import Engine, EngineOptions
from edgec.runtime.library import load
from edgec.serving.app import create_app
from edgec.serving.limits import Limits
from tests.fake_engine import compile_fake, write_bundle
from tests.raw_http import Served, started

Connect = Callable[..., TestClient]


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_fake(tmp_path_factory.mktemp("fake"))


@pytest.fixture
def fake_bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "parrot-out")


@pytest.fixture
def connect(fake_library: Path, fake_bundle: Path) -> Iterator[Connect]:
    """Start a server in this process; keywords are those of `Limits`, `options` those of the engine."""
    with ExitStack() as stack:

        def start(*, options: EngineOptions | None = None, bundle: Path = fake_bundle, **limits: Any) -> TestClient:
            engine = Engine(bundle, options, library=load(fake_library))
            app = create_app(NativeBackend(engine), Limits(**limits))
            return stack.enter_context(TestClient(app, raise_server_exceptions=False))

        yield start


@pytest.fixture
def client(connect: Connect) -> TestClient:
    return connect()


@pytest.fixture
def edgec_serve(fake_library: Path, fake_bundle: Path) -> Iterator[Callable[..., Served]]:
    """Start `edgec serve` with arguments, and with steps of so many microseconds."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str, step_us: int = 0) -> Served:
        environment = os.environ | {"EDGEC_LIBRARY": str(fake_library), "FAKE_STEP_US": str(step_us)}
        command = [sys.executable, "-m", "edgec", "serve", str(fake_bundle), "--port", "0", *arguments]
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        return started(process)

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()
