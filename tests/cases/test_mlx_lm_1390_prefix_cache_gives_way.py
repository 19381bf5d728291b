"""mlx-lm#1390: the prefix cache grew to 23 GB.

Right behaviour: cached prefixes live in the pool's own blocks, and give way to whoever needs one.
"""

from __future__ import annotations

from tests.scheduling_core import FakeEngine


def test_the_cache_never_takes_more_than_the_pool_and_gives_way() -> None:
    engine = FakeEngine(blocks=24, block_size=4, context=64, max_batch=4, step_tokens=32)
    for id in range(400):
        engine.add(id, [id, *range(20)], answer=4)
        engine.step()
        counts = engine.scheduler.pool
        assert counts.free + counts.cached + counts.owned == counts.total == 24
    engine.run()
    engine.check_answers()
    assert len(engine.answers) + engine.scheduler.stats.waiting == len(engine.prompts)
    assert engine.scheduler.pool.cached == 24 - engine.scheduler.pool.free > 0
    engine.add(1000, range(63), answer=1)  # as long as the context: takes sixteen blocks from the cache
    engine.run()
    assert 1000 in engine.answers


def test_a_full_cache_preempts_nobody() -> None:
    engine = FakeEngine(blocks=24, block_size=4, context=64, max_batch=2, step_tokens=32)
    for id in range(50):
        engine.add(id, [id, *range(20)], answer=8)
    engine.run()
    assert engine.scheduler.stats.preemptions == 0


def test_trim_gives_all_of_it_back() -> None:
    engine = FakeEngine(blocks=24, block_size=4, context=64, max_batch=2, step_tokens=32)
    engine.add(1, range(30))
    engine.run()
    assert engine.scheduler.pool.cached > 0
    engine.scheduler.trim()
    assert engine.scheduler.pool.free == 24
