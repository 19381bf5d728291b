"""The reference behind the HTTP layer when its model fails, and when its books don't add up at the end."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from edgec.reference.backend import ReferenceBackend
from edgec.reference.load import load
from edgec.reference.options import ReferenceOptions
from edgec.serving.app import create_app
from edgec.store import Store
from tests.raw_http import started

BODY = {"prompt": "hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def backend(tiny_llama: Path, tmp_path: Path) -> ReferenceBackend:
    return ReferenceBackend(load(tiny_llama, store=Store(tmp_path)), ReferenceOptions(max_batch=4, blocks=64))


def test_a_step_that_runs_out_of_memory_fails_its_requests_only(
    backend: ReferenceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TestClient(create_app(backend)) as client:
        before = client.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
        forward = backend.engine._runner.forward
        with monkeypatch.context() as patch:

            def fail(*_: Any) -> torch.Tensor:
                raise torch.OutOfMemoryError("no room on the device")

            patch.setattr(backend.engine._runner, "forward", fail)
            failed = client.post("/v1/completions", json=BODY)
        assert failed.status_code == 500 and failed.json()["error"]["code"] == "engine_failed"
        assert backend.engine._runner.forward == forward
        assert client.get("/health").status_code == 200
        assert client.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == before
    backend.assert_whole()


def test_a_lost_block_is_seen_at_the_end(backend: ReferenceBackend) -> None:
    with TestClient(create_app(backend)) as client:
        assert client.post("/v1/completions", json=BODY).status_code == 200
        backend.engine._manager.allocate()  # and nobody gives it back
    with pytest.raises(AssertionError, match="after every request had ended"):
        backend.assert_whole()


@pytest.mark.slow
def test_a_server_that_lost_a_block_does_not_exit_with_0(tiny_llama: Path) -> None:
    code = (
        "from edgec.reference.engine import ReferenceEngine\n"
        "def check(self): raise AssertionError('a block is missing')\n"
        "ReferenceEngine.check = check\n"
        "from edgec.cli.main import main; main()"
    )
    command = [sys.executable, "-c", code, "reference", str(tiny_llama), "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        served = started(process)
        served.process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1 and "a block is missing" in errors
