"""`edgec reference` as a process: the command line, limits, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Edgec
from tests.raw_http import Served, metrics, read_all, read_until, send
from tests.reference.checkpoints import write_huggingface
from tests.reference.conftest import Serve
from tests.tiny_bundle import write_tiny_bundle

pytestmark = pytest.mark.slow  # each test starts a server

LONG = {"prompt": "hello", "max_tokens": 4000, "temperature": 0, "ignore_eos": True}


def get(served: Served, path: str, key: str | None = None, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """(status, JSON) of a GET, or of a POST with a body."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{served.url}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["HF", "--device", "tpu"], 2, "there is no such device"),
        (["HF", "--device", "meta"], 2, "there is no such device"),
        (["HF", "--activations", "int8"], 2, "--activations int8 is about layers with INT8 weights"),
        (["HF", "--memory", "lots"], 2, "--memory lots"),
        (["HF", "--memory", "10"], 2, "too few"),
        (["HF", "--weights", "int8"], 2, "is a float checkpoint"),
        (["HF", "--weights", "int4"], 2, "'int8'"),
        (["HF", "--context", "9999"], 2, "was made for 4096 positions"),
        (["HF", "--max-batch", "64", "--step-tokens", "8"], 2, "step_tokens is 8"),
        (["HF", "--speculation", "head"], 2, "without a draft head"),
        (["HF", "--speculation", "eagle"], 2, "'ngram'"),
        (["HF", "--draft-length", "9"], 2, "draft-length"),
        (["BARE"], 2, "without a tokenizer.json"),
        (["absent"], 2, "does not exist"),
        (["pypi:nothing"], 2, "is not a pypi reference"),
    ],
)
def test_what_can_t_be_served_is_one_line(
    edgec: Edgec, tiny_llama: Path, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    if "BARE" in arguments:
        write_huggingface(tmp_path / "bare", tokenizer=False)
    named = {"HF": str(tiny_llama), "BARE": str(tmp_path / "bare")}
    done = edgec("reference", *(named.get(a, a) for a in arguments), "--port", "0")
    assert done.code == code and message in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr and done.stdout == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_one_line_and_exit_code_4(edgec: Edgec, tiny_llama: Path) -> None:
    done = edgec("reference", tiny_llama, "--device", "cuda", "--port", "0")
    assert done.code == 4 and "there is no CUDA here" in done.stderr and "Traceback" not in done.stderr


def test_a_port_in_use_is_told_before_a_model_is_loaded(edgec_reference: Serve) -> None:
    served = edgec_reference()
    command = [sys.executable, "-m", "edgec", "reference", "absent", "--port", str(served.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "can't listen" in done.stderr


def test_health_models_and_metrics(edgec_reference: Serve) -> None:
    served = edgec_reference("--max-batch", "4", "--block-size", "8", "--context", "100")
    assert get(served, "/health") == (200, {"status": "ok", "reason": None})
    status, models = get(served, "/v1/models")
    assert status == 200 and [(m["id"], m["max_model_len"]) for m in models["data"]] == [("tiny-llama", 100)]
    found = metrics(served)
    assert found['edgec_kv_blocks{state="free"}'] == 4 * 13  # four contexts of 100, in blocks of 8
    assert found["edgec_batch_limit"] == 4


def test_a_key_and_limits_hold(edgec_reference: Serve) -> None:
    limits = ("--max-tokens", "5", "--max-body", "1000", "--max-answers", "2")
    served = edgec_reference("--api-key", "sesame", *limits)
    completions = "/v1/completions"
    assert get(served, "/v1/models")[0] == get(served, "/v1/models", "guess")[0] == 401
    assert get(served, "/health")[0] == 200
    assert get(served, completions, "sesame", {"prompt": "x", "max_tokens": 5})[0] == 200
    assert get(served, completions, "sesame", {"prompt": "x", "max_tokens": 6})[0] == 400
    assert get(served, completions, "sesame", {"prompt": "x" * 1000})[0] == 413
    assert get(served, completions, "sesame", {"prompt": ["x", "y", "z"], "max_tokens": 1})[0] == 400


def test_a_bundle_s_own_weights_are_served_when_it_has_no_recipe(edgec_reference: Serve, tmp_path: Path) -> None:
    folder = write_tiny_bundle(tmp_path / "out")
    rounded = ("--weights", "int8", "--activations", "int8", "--kv", "int8")
    served = edgec_reference(*rounded, model=folder)
    status, answer = get(served, "/v1/completions", body={"prompt": "hi", "max_tokens": 3, "ignore_eos": True})
    assert status == 200 and answer["model"] == "tiny" and answer["usage"]["completion_tokens"] == 3


def test_sigterm_lets_an_answer_end_and_exits_with_0(edgec_reference: Serve) -> None:
    served = edgec_reference("--grace", "60")
    connection = send(served, LONG | {"stream": True, "max_tokens": 300})
    read_until(connection, b"data: ")
    served.process.send_signal(signal.SIGTERM)
    rest = read_all(connection).decode()
    assert "[DONE]" in rest and '"finish_reason":"length"' in rest
    assert served.process.wait(60) == 0


def test_after_the_grace_an_answer_is_ended_and_told_why(edgec_reference: Serve) -> None:
    served = edgec_reference("--grace", "0")
    connection = send(served, LONG | {"stream": True})
    read_until(connection, b"data: ")
    served.process.send_signal(signal.SIGTERM)
    rest = read_all(connection).decode()
    assert "shutting_down" in rest and "[DONE]" not in rest
    assert served.process.wait(60) == 0


def test_ctrl_c_is_a_clean_end_that_checks_the_pool(edgec_reference: Serve) -> None:
    served = edgec_reference()
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(60) == 0
    assert served.process.stderr is not None and "Traceback" not in served.process.stderr.read()
