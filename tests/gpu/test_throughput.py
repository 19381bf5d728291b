"""benchmarks/reference.py on CUDA: throughput against Hugging Face's `generate`, and how full the KV blocks are.

The limits are what the design gives (continuous batching, CUDA graphs, blocks of 16), not what was measured somewhere.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import REPOSITORY


@pytest.fixture(scope="module")
def rows() -> Iterator[dict[str, Any]]:
    """By the number of requests, and "mixed"."""
    command = [sys.executable, str(REPOSITORY / "benchmarks/reference.py"), "--device", "cuda", "--json"]
    run = subprocess.run([*command, "--batches", "1,8,64"], cwd=REPOSITORY, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    print(run.stderr)
    found = {row["requests"]: row for row in json.loads(run.stdout)["rows"]}
    yield {"mixed" if "mixed" in name else name: row for name, row in found.items()}


@pytest.mark.network
@pytest.mark.parametrize("batch", ["1", "8", "64", "mixed"])
def test_it_is_at_least_as_fast_as_generate(rows: dict[str, Any], batch: str) -> None:
    assert rows[batch]["times_generate"] >= 1.0, rows[batch]


@pytest.mark.network
def test_blocks_are_filled(rows: dict[str, Any]) -> None:
    assert rows["64"]["kv_utilisation"] >= 0.9 and rows["mixed"]["kv_utilisation"] >= 0.85


@pytest.mark.network
def test_batching_pays(rows: dict[str, Any]) -> None:
    assert rows["8"]["tokens_per_second"] >= 3 * rows["1"]["tokens_per_second"]
