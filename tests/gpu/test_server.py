"""`edgec reference --device cuda` against `--device cpu`: the same model over HTTP, on both."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.raw_http import Served
from tests.reference.checkpoints import write_huggingface
from tests.reference.conftest import servers

PROMPTS = ["Call me Ishmael.", "one two three", "x" * 300, "It was the best of times, it was the worst of times"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    """(CPU, CUDA)"""
    folder: Path = tmp_path_factory.mktemp("gpu") / "tiny-llama"
    write_huggingface(folder)
    with servers(folder) as start:
        yield start("--device", "cpu"), start("--device", "cuda")


def ask(served: Served, **body: Any) -> Any:
    data = json.dumps({"temperature": 0, "ignore_eos": True, **body}).encode()
    request = urllib.request.Request(f"{served.url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.loads(response.read())["choices"]


def test_scores_of_prompts_are_equal(pair: tuple[Served, Served]) -> None:
    cpu, cuda = (ask(s, prompt=PROMPTS, max_tokens=0, echo=True, logprobs=0) for s in pair)
    for ours, theirs in zip(cuda, cpu, strict=True):
        found, wanted = (c["logprobs"]["token_logprobs"][1:] for c in (ours, theirs))
        assert found == pytest.approx(wanted, abs=1e-3)


def test_greedy_answers_are_equal(pair: tuple[Served, Served]) -> None:
    cpu, cuda = (ask(s, prompt=PROMPTS, max_tokens=60) for s in pair)
    assert [c["text"] for c in cuda] == [c["text"] for c in cpu]


def test_the_same_seed_draws_the_same_text(pair: tuple[Served, Served]) -> None:
    options = {"prompt": PROMPTS[1], "n": 4, "seed": 5, "temperature": 1.0, "max_tokens": 30}
    cpu, cuda = (ask(s, **options) for s in pair)
    assert [c["text"] for c in cuda] == [c["text"] for c in cpu]


def test_half_precision_is_served(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-llama"
    write_huggingface(folder)
    with servers(folder) as start:
        for dtype in ("bfloat16", "float16"):
            served = start("--device", "cuda", "--dtype", dtype)
            assert len(ask(served, prompt=PROMPTS, max_tokens=8)) == len(PROMPTS)
