"""mlc-llm#1359: prefill is slower than decode.

Right behaviour: a prompt's tokens are computed together, so they cost a fraction of decoded ones: at least three times
as many tokens a second. Measured in turns on one engine, so that a busy machine slows both.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest

from edgec.runtime.engine import Engine, EngineOptions
from edgec.runtime.events import EventKind
from edgec.runtime.sampling import Sampling
from tests.tiny_bundle import write_tiny_bundle

pytestmark = pytest.mark.slow  # the core has to be compiled


def test_prefill_is_at_least_three_times_as_fast(tmp_path: Path) -> None:
    ratios = []
    with Engine(write_tiny_bundle(tmp_path), EngineOptions(prefix_cache=False, step_tokens=128)) as engine:
        for round in range(9):
            prompt = [(round + 3 * k) % 250 for k in range(256)]
            times = [time.perf_counter()]
            for event in engine.generate(prompt, Sampling(max_tokens=64, temperature=0.0, ignore_eos=True)):
                if event.kind is EventKind.TOKEN:
                    times.append(time.perf_counter())
            prefill, decode = times[1] - times[0], times[-1] - times[1]
            ratios.append((256 / prefill) / (63 / decode))
    assert statistics.median(ratios) >= 3
