"""vllm#46289, #29987, #18485: KV blocks leaked when a request was cancelled at an unlucky moment.

Right behaviour: cancelled at any step, before its first, in its last, or while the model runs, every block comes back.
"""

from __future__ import annotations

import pytest

from tests.scheduling_core import FakeEngine

STEPS = 7  # a prompt of 10 in two chunks, and an answer of 6


def engine() -> FakeEngine:
    made = FakeEngine(blocks=16, block_size=4, context=40, max_batch=2, step_tokens=8)
    made.add(1, range(10), answer=6)
    made.add(2, range(5, 25), answer=6)
    return made


def test_undisturbed_it_takes_so_many_steps() -> None:
    alone = FakeEngine(blocks=16, block_size=4, context=40, max_batch=2, step_tokens=8)
    alone.add(1, range(10), answer=6)
    assert alone.run() == STEPS


@pytest.mark.parametrize("at", range(STEPS))
@pytest.mark.parametrize("inside", [False, True], ids=["between steps", "while the model runs"])
def test_cancel_at_every_step_returns_every_block(at: int, inside: bool) -> None:
    run = engine()
    for _ in range(at):
        run.step()
    plan = run.reserve() if inside else None
    owned = run.scheduler.pool.owned
    held = run.scheduler.sequence(1).blocks
    run.cancel(1)
    assert run.scheduler.pool.owned == owned - held  # at once, not at the step's end
    if plan is not None:
        run.commit(plan)
    run.run()
    run.check_answers()
    assert sorted(run.answers) == [2]
    assert run.whole()
    run.scheduler.trim()
    assert run.scheduler.pool.free == 16


@pytest.mark.parametrize("at", range(STEPS))
def test_cancel_while_a_failing_step_runs_returns_every_block(at: int) -> None:
    run = engine()
    for _ in range(at):
        run.step()
    assert run.reserve() is not None
    run.cancel(1)
    run.scheduler.release()
    run.run()
    run.check_answers()
    assert run.whole()


def test_cancel_of_a_fork_leaves_the_others_their_blocks() -> None:
    run = engine()
    run.step()
    run.step()
    run.fork(1, 3)
    run.cancel(1)
    run.run()
    run.check_answers()
    assert sorted(run.answers) == [2, 3]
    assert run.whole()
