"""executorch#5582, #14474: the system kills the app for the memory that its model takes.

Right behaviour: one hard budget for weights, cache and scratch; what doesn't fit is refused before anything is read,
with what it would take; what is loaded stays inside, whatever is asked of it.
"""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from edgec.runtime.engine import Engine, EngineOptions
from edgec.runtime.failures import EngineError
from edgec.runtime.sampling import Sampling
from tests.tiny_bundle import write_tiny_bundle

pytestmark = pytest.mark.slow  # the core has to be compiled

MB = 1_000_000


def test_too_small_a_budget_is_refused_with_the_least_that_works(tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path)
    with pytest.raises(EngineError, match="budget") as refused:
        Engine(bundle, EngineOptions(memory_budget=5 * MB))
    found = re.search(r"([\d.]+) MB is the least", refused.value.message)
    assert found is not None
    least = float(found[1])
    with pytest.raises(EngineError):
        Engine(bundle, EngineOptions(memory_budget=int((least - 0.2) * MB)))
    Engine(bundle, EngineOptions(memory_budget=int((least + 0.2) * MB))).close()


@pytest.mark.parametrize("budget", [40 * MB, 80 * MB])
def test_a_full_engine_stays_inside_its_budget(tmp_path: Path, budget: int) -> None:
    bundle = write_tiny_bundle(tmp_path)
    Engine(bundle).close()  # the library itself is not the model's
    before = psutil.Process().memory_info().rss
    with Engine(bundle, EngineOptions(memory_budget=budget, max_batch=16)) as engine:
        memory = engine.description["memory"]
        assert memory["weights"] + memory["pools"] + memory["scratch"] <= budget
        prompts = [[(i * 13 + k) % 250 for k in range(300)] for i in range(40)]
        engine.answer(prompts, Sampling(max_tokens=100, temperature=0.0, ignore_eos=True))
        assert psutil.Process().memory_info().rss - before < budget
