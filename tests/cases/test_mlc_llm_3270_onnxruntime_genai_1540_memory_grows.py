"""mlc-llm#3270, onnxruntime-genai#1540: memory grows with each request until the phone gives up.

Right behaviour: resident memory is flat over 200 requests, after a first few that touch every page they ever will.
"""

from __future__ import annotations

import gc
from pathlib import Path

import psutil
import pytest

from edgec.runtime.engine import Engine
from edgec.runtime.sampling import Sampling
from tests.tiny_bundle import write_tiny_bundle

pytestmark = pytest.mark.slow  # the core has to be compiled


def resident() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def test_memory_is_flat_over_two_hundred_requests(tmp_path: Path) -> None:
    with Engine(write_tiny_bundle(tmp_path, memory=48 << 20)) as engine:

        def ask(i: int) -> None:
            prompt = [(i * 31 + k * k) % 250 for k in range(50 + 7 * (i % 30))]
            sampling = Sampling(max_tokens=20, temperature=1.0, seed=i, logprobs=3, presence_penalty=0.5, stop=("zzz",))
            list(engine.generate(prompt, sampling))

        while engine.stats().blocks_free > engine.stats().blocks_total // 50:  # until the cache has filled the pool
            for i in range(100):
                ask(i + engine.stats().steps % 100000)
        before = resident()
        for i in range(200):
            ask(100_000 + i)
        assert resident() - before < 2 << 20
        assert engine.stats().blocks_owned == 0
