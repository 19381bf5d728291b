"""openvino.genai#3722: two prompts whose hashes collided were served each other's cache.

Right behaviour: a hash only finds candidates, tokens and parents are compared. Shown with a hash that always collides.
"""

from __future__ import annotations

from tests.scheduling_core import FakeEngine, make_pool


def test_with_a_hash_that_always_collides_only_equal_prefixes_are_found() -> None:
    pool = make_pool(16, 2, colliding=True)
    one = pool.publish([pool.allocate() or 0, pool.allocate() or 0], [1, 2, 3, 4])
    two = pool.publish([pool.allocate() or 0, pool.allocate() or 0], [9, 9, 3, 4])
    assert pool.find([1, 2, 3, 4]) == one
    assert pool.find([9, 9, 3, 4]) == two  # the same last block after another first one
    assert pool.find([3, 4]) == []
    assert pool.find([1, 2, 3, 5]) == one[:1]


def test_answers_are_undisturbed_by_collisions() -> None:
    engine = FakeEngine(blocks=32, block_size=2, context=40, max_batch=4, step_tokens=16, colliding=True)
    for id in range(30):
        engine.add(id, [id % 3, id % 2, 7, 7, id % 5, 7, 7, 7], answer=5)
    engine.run()
    engine.check_answers()
    assert len(engine.answers) == 30
    assert engine.scheduler.stats.cached_tokens > 0  # and equal prefixes are still shared
