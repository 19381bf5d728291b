"""Who runs when, with how many tokens, on which blocks: without a model."""

from __future__ import annotations

import numpy as np
import pytest

from edgec.reference.block_manager import BlockManager
from edgec.reference.scheduler import Scheduler, Step
from edgec.reference.sequence import Sequence, State


def make(blocks: int = 64, block_size: int = 4, max_batch: int = 4, step_tokens: int = 16) -> Scheduler:
    return Scheduler(BlockManager(blocks, block_size), max_batch=max_batch, step_tokens=step_tokens)


def add(scheduler: Scheduler, tokens: int | list[int], more: int = 8, **fields: int) -> Sequence:
    prompt = list(range(tokens)) if isinstance(tokens, int) else tokens
    sequence = Sequence((len(scheduler.waiting), 0), list(prompt), len(prompt), len(prompt) + more, **fields)
    scheduler.add(sequence)
    return sequence


def run(scheduler: Scheduler, random: np.random.Generator | None = None) -> Step | None:
    """A step of a model that always says 99; who is full finishes. `random`: with proposals, some of them kept."""
    proposed = {s: int(random.integers(9)) for s in scheduler.running if s.pending == 1} if random else {}
    step = scheduler.schedule(proposed)
    scheduler.check()
    if step is None:
        return None
    assert all(c.sequence.state is State.RUNNING for c in step.chunks)
    new = {
        c.sequence: [99] * (1 + (int(random.integers(c.drafts + 1)) if random else 0)) for c in step.chunks if c.samples
    }
    scheduler.commit(step, new)
    for chunk in step.chunks:
        if chunk.sequence.room == 0:
            scheduler.finish(chunk.sequence)
    scheduler.check()
    return step


def plan(step: Step | None) -> list[tuple[int, int]]:
    assert step is not None
    return [(c.start, c.count) for c in step.chunks]


def test_a_long_prompt_goes_in_chunks_beside_decodes() -> None:
    scheduler = make(step_tokens=8)
    add(scheduler, [1, 2, 3])
    assert plan(run(scheduler)) == [(0, 3)]
    add(scheduler, list(range(100, 120)))
    assert plan(run(scheduler)) == [(3, 1), (0, 7)]
    assert plan(run(scheduler)) == [(4, 1), (7, 7)]
    assert plan(run(scheduler)) == [(5, 1), (14, 6)]
    assert plan(run(scheduler)) == [(6, 1), (20, 1)]


def test_greater_priority_goes_first_and_equals_in_order() -> None:
    scheduler = make(max_batch=1)
    first, second = add(scheduler, 2, more=1), add(scheduler, 2, more=1)
    urgent = add(scheduler, 2, more=1, priority=3)
    order = []
    while step := run(scheduler):
        order.append(step.chunks[0].sequence)
    assert order == [urgent, first, second]


def test_nobody_passes_the_first_who_waits() -> None:
    scheduler = make(blocks=4, block_size=4)
    add(scheduler, list(range(8)))
    run(scheduler)
    big, small = add(scheduler, list(range(50, 62))), add(scheduler, [70])
    run(scheduler)
    assert (big.state, small.state) == (State.WAITING, State.WAITING)


def test_a_prompt_that_was_seen_is_not_computed_again() -> None:
    scheduler = make()
    one = add(scheduler, list(range(10)))
    run(scheduler)
    two = add(scheduler, list(range(10)))
    step = run(scheduler)
    assert plan(step) == [(10, 1), (8, 2)]
    assert two.cached == 8
    assert two.table[:2] == one.table[:2]


def test_a_whole_prompt_in_the_cache_still_computes_its_last_token() -> None:
    scheduler = make()
    add(scheduler, list(range(8)))
    run(scheduler)
    add(scheduler, list(range(8)))
    assert plan(run(scheduler))[1] == (4, 4)


def test_scoring_takes_nothing_from_the_cache_that_was_not_scored() -> None:
    scheduler = make()
    add(scheduler, list(range(10)))
    run(scheduler)
    add(scheduler, list(range(10)), compute_all=True)
    assert plan(run(scheduler))[1] == (0, 10)


def test_out_of_blocks_the_last_is_preempted_and_later_ends() -> None:
    scheduler = make(blocks=6, block_size=4)
    first, last = add(scheduler, list(range(7)), more=12), add(scheduler, list(range(50, 57)), more=12)
    steps = 0
    while run(scheduler):
        steps += 1
        assert steps < 100
        assert first.state is not State.WAITING  # who is first is never a victim
    assert scheduler.counters.preemptions > 0
    assert [len(s.tokens) for s in (first, last)] == [19, 19]
    assert scheduler.manager.owned == 0
    # What lay in published blocks was found again, so less was recomputed than had been computed.
    assert 0 < scheduler.counters.recomputed_tokens < 19


@pytest.mark.parametrize("blocks", [8, 9])
def test_a_victim_that_was_planned_already_is_not_in_the_step(blocks: int) -> None:
    """Decodes are planned first, and an urgent prompt then takes the blocks of one of them."""
    scheduler = make(blocks, block_size=1, step_tokens=2, max_batch=2)
    add(scheduler, [1], more=7)
    run(scheduler)
    urgent = add(scheduler, [2, 3, 4, 5, 6], more=2, priority=1)
    while run(scheduler):
        assert urgent.state is not State.WAITING
    assert scheduler.counters.preemptions == 1


def test_children_share_blocks_until_they_write() -> None:
    scheduler = make(block_size=4)
    parent = add(scheduler, list(range(6)), places=3)
    run(scheduler)
    children = [Sequence((0, i), [*range(6), 60 + i], 6, 14) for i in (1, 2)]
    for child in children:
        scheduler.fork(parent, child)
    parent.places = 1
    scheduler.check()
    assert all(child.table == parent.table for child in children)
    step = scheduler.schedule()
    assert step is not None
    assert len(step.copies) == 2  # the last owner needs no copy
    tables = [tuple(s.table) for s in (parent, *children)]
    assert len({t[0] for t in tables}) == 1
    assert len({t[1] for t in tables}) == 3
    scheduler.check()


def test_room_is_kept_for_answers_to_come() -> None:
    scheduler = make(max_batch=4)
    add(scheduler, [1], places=3)
    add(scheduler, [2], places=2)
    step = run(scheduler)
    assert step is not None
    assert len(step.chunks) == 1


def test_what_ends_between_plan_and_commit_is_passed_over() -> None:
    scheduler = make()
    gone, stays = add(scheduler, 3), add(scheduler, [7, 8])
    step = scheduler.schedule()
    assert step is not None
    scheduler.finish(gone)
    scheduler.commit(step, {gone: [5], stays: [6]})
    scheduler.check()
    assert gone.tokens == [0, 1, 2]
    assert stays.tokens == [7, 8, 6]


@pytest.mark.parametrize("kept", range(6))
def test_a_rejected_tail_gives_its_blocks_back(kept: int) -> None:
    scheduler = make(block_size=2)
    sequence = add(scheduler, [1, 2, 3])
    run(scheduler)
    step = scheduler.schedule({sequence: 5})
    assert step is not None
    assert [(c.start, c.count, c.drafts) for c in step.chunks] == [(3, 6, 5)]
    assert len(sequence.table) == 5
    scheduler.commit(step, {sequence: [7] * (kept + 1)})
    scheduler.check()
    assert sequence.computed == 4 + kept
    assert sequence.tokens == [1, 2, 3, 99, *[7] * (kept + 1)]
    assert len(sequence.table) == -(-sequence.computed // 2)
    assert scheduler.manager.owned_tokens == sequence.computed
    assert sequence.published == sequence.computed // 2  # and only what is right can be found


def test_proposals_take_only_what_nobody_else_wants() -> None:
    scheduler = make(step_tokens=8)
    first, second = add(scheduler, [1, 2]), add(scheduler, [3, 4])
    run(scheduler)
    step = scheduler.schedule({first: 8, second: 8})
    assert step is not None
    assert [(c.count, c.drafts) for c in step.chunks] == [(7, 6), (1, 0)]  # 8 rows; 7 tokens of room, the last for it
    scheduler.commit(step, {first: [9], second: [9]})
    add(scheduler, list(range(50, 62)), more=2)
    step = scheduler.schedule({first: 8})
    assert step is not None
    assert [(c.count, c.drafts) for c in step.chunks] == [(1, 0), (1, 0), (6, 0)]  # a prompt goes first
    tight = make(blocks=1)
    alone = add(tight, [1, 2], more=20)
    run(tight)
    step = tight.schedule({alone: 8})
    assert step is not None
    assert [c.drafts for c in step.chunks] == [1]  # what fits the block that it has
    assert tight.counters.preemptions == 0


@pytest.mark.parametrize("seed", range(30))
def test_everyone_ends_whatever_happens(seed: int) -> None:
    """Random arrivals, priorities, forks and cancellations on a small pool: the books balance in every step."""
    random = np.random.default_rng(seed)
    blocks = int(random.integers(6, 14))
    scheduler = make(blocks, int(random.choice([1, 2, 4])), max_batch=int(random.integers(2, 6)), step_tokens=8)
    capacity = blocks * scheduler.manager.block_size
    everyone: list[Sequence] = []
    steps = 0
    while len(everyone) < 20 or scheduler.waiting or scheduler.running:
        if len(everyone) < 20 and random.random() < 0.5:
            count = int(random.integers(1, capacity))
            more = int(random.integers(1, capacity - count + 1))
            prompt = random.integers(0, 2, count).tolist()  # few different tokens: prefixes meet
            everyone.append(add(scheduler, prompt, more, priority=int(random.integers(-1, 2))))
        if everyone and random.random() < 0.1:
            scheduler.finish(everyone[random.integers(len(everyone))])
        run(scheduler, random if seed % 2 else None)
        places = sum(s.places for s in scheduler.running)
        candidates = [s for s in scheduler.running if s.pending == 1 and len(s.tokens) > s.prompt]
        if candidates and places < scheduler.max_batch and random.random() < 0.2:
            parent = candidates[random.integers(len(candidates))]
            child = Sequence((0, 1), list(parent.tokens), parent.prompt, parent.max_total, priority=parent.priority)
            scheduler.fork(parent, child)
            everyone.append(child)
            scheduler.check()
        steps += 1
        assert steps < 5000
    assert all(s.state is State.FINISHED for s in everyone)
    assert scheduler.manager.owned == 0
