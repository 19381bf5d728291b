"""llama.cpp#23652: when the KV cache was full, every generation was aborted.

Right behaviour: only the victim pays, with time; nobody's answer is lost or changed.
"""

from __future__ import annotations

import pytest

from tests.scheduling_core import FakeEngine


@pytest.mark.slow
def test_only_the_victim_waits_and_all_answers_are_as_if_alone() -> None:
    engine = FakeEngine(blocks=10, block_size=4, context=32, max_batch=4, step_tokens=32, prefix_cache=False)
    for id in (1, 2, 3):
        engine.add(id, [id, *range(5)], answer=20)
    engine.step()
    victims: set[int] = set()
    while engine.alive:
        before = {id: engine.scheduler.sequence(id).tokens for id in engine.alive}
        victims |= set(engine.scheduler.plan().victims)
        plan = engine.step()
        assert plan is not None
        for id in set(engine.alive) - victims:
            if not engine.scheduler.stats.preemptions:
                assert engine.scheduler.sequence(id).tokens == before[id] + 1, "it didn't get its token in this step"
    engine.check_answers()
    assert sorted(engine.answers) == [1, 2, 3]
    assert victims and victims < {1, 2, 3}
    assert engine.whole()


def test_those_that_run_on_get_a_token_in_every_step() -> None:
    engine = FakeEngine(blocks=10, block_size=4, context=32, max_batch=4, step_tokens=32, prefix_cache=False)
    for id in (1, 2, 3):
        engine.add(id, [id, *range(5)], answer=20)
    engine.step()
    for _ in range(60):
        running = [id for id in engine.alive if engine.scheduler.sequence(id).running]
        before = {id: engine.scheduler.sequence(id).tokens for id in running}
        plan = engine.step()
        if plan is None:
            break
        for id in running:
            if id in engine.alive and engine.scheduler.sequence(id).running and before[id] > 6:
                assert engine.scheduler.sequence(id).tokens == before[id] + 1
    assert engine.scheduler.stats.preemptions > 0
