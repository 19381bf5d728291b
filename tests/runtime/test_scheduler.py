"""The scheduler: who goes first, who waits how long, who gives way, and that no operation ever breaks it."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edgec.runtime.abi import StepOutcome
from edgec.runtime.failures import EngineError
from edgec.runtime.scheduling import Admission
from tests.scheduling_core import FakeEngine, make_scheduler

SMALL = {"blocks": 16, "block_size": 4, "first_block": 1, "context": 40, "max_batch": 4, "step_tokens": 8}


def started(engine: FakeEngine) -> list[int]:
    """Sequences in the order of their first start."""
    return list(dict.fromkeys(id for plan in engine.trace for id in plan.starts))


# ---- Order -----------------------------------------------------------------------------------------------


def test_decodes_come_first_and_prompts_get_the_rest_of_the_budget() -> None:
    engine = FakeEngine(**SMALL)
    engine.add(1, [1, 2, 3], answer=9)
    engine.step()
    engine.add(2, range(20))
    chunks = [[(c.sequence, c.start, c.count, c.samples) for c in engine.step().chunks] for _ in range(4)]  # type: ignore[union-attr]
    assert chunks == [
        [(1, 3, 1, 1), (2, 0, 7, 0)],
        [(1, 4, 1, 1), (2, 7, 7, 0)],
        [(1, 5, 1, 1), (2, 14, 6, 1)],
        [(1, 6, 1, 1), (2, 20, 1, 1)],
    ]


def test_greater_priorities_go_first_and_equals_in_their_order() -> None:
    engine = FakeEngine(**SMALL | {"max_batch": 1})
    for id, priority in ((1, 0), (2, -3), (3, 5), (4, 0), (5, 5)):
        engine.add(id, [id], answer=1, priority=priority)
    engine.run()
    assert started(engine) == [3, 5, 1, 4, 2]


@pytest.mark.parametrize(("late", "first"), [(29, 2), (30, 1), (31, 1)])
def test_three_levels_of_priority_are_worth_exactly_three_aging_periods(late: int, first: int) -> None:
    engine = FakeEngine(**SMALL | {"max_batch": 1, "aging_steps": 10})
    engine.add(9, [9], answer=38)
    engine.step()
    engine.add(1, [1], priority=0, answer=1)
    for _ in range(late):
        engine.step()
    engine.add(2, [2], priority=3, answer=1)
    engine.run()
    assert started(engine) == [9, first, 3 - first]


def test_a_request_that_does_not_fit_is_not_passed_by_a_smaller_one() -> None:
    engine = FakeEngine(**SMALL | {"blocks": 10, "prefix_cache": False})
    engine.add(1, range(20), answer=8)
    for _ in range(3):
        engine.step()
    engine.add(2, range(100, 130), answer=2)
    engine.add(3, [3], answer=2)
    engine.run()
    assert started(engine) == [1, 2, 3]


# ---- Fairness and waiting --------------------------------------------------------------------------------


def test_tenants_are_served_by_weight_whatever_they_submit() -> None:
    engine = FakeEngine(**SMALL | {"max_batch": 2})
    for id in range(300):
        engine.add(id, [id, 1, 2], answer=5, tenant=1 if id % 10 else 2, weight=1.0 if id % 10 else 3.0)
    for _ in range(90):
        engine.step()
    one, two = engine.scheduler.served(1), engine.scheduler.served(2)
    # 30 requests of tenant 2 are not used up by now; the rest is what running ones may still take: N · L ⁄ w each.
    assert one > 0
    assert abs(two / 3 - one) <= 2 * 8 / 3 + 2 * 8
    assert two > 2 * one
    assert engine.scheduler.stats.fairness > 0.97


def test_a_tenant_that_was_away_gets_no_credit_for_it() -> None:
    engine = FakeEngine(**SMALL | {"max_batch": 1})
    for id in range(40):
        engine.add(id, [id], answer=3, tenant=1)
    for _ in range(30):
        engine.step()
    before = len(started(engine))
    for id in range(100, 110):
        engine.add(id, [id], answer=3, tenant=2)
    for _ in range(24):
        engine.step()
    latest = ["a" if id < 100 else "b" for id in started(engine)[before:]]
    assert abs(latest.count("a") - latest.count("b")) <= 1, latest


def wait_of_the_low_one(aging_steps: int, steps: int) -> int | None:
    """Steps that a request of priority −8 waits while one of priority 7 arrives in every step; None: it still does."""
    engine = FakeEngine(**SMALL | {"max_batch": 2, "aging_steps": aging_steps, "max_waiting": 10_000})
    for id in range(1, 6):
        engine.add(id, [id], answer=2, priority=7)
    engine.add(0, [0], answer=2, priority=-8)
    for step in range(steps):
        if engine.scheduler.sequence(0).running:
            return step
        engine.add(100 + step, [100 + step], answer=2, priority=7)
        engine.step()
    return None


def test_waiting_is_bounded_also_against_a_stream_of_greater_priorities() -> None:
    aging = 8
    batch, context, ahead = 2, SMALL["context"], 5
    least = min(4, SMALL["step_tokens"] - batch + 1)
    longest = context + math.ceil(context / least)  # R of scheduler.h
    others = ahead + 15 * aging  # K: those before it, and those that come within 15 aging periods
    waited = wait_of_the_low_one(aging, steps=(batch + others) * longest)
    assert waited is not None
    # The bound is for the longest answers; these have two tokens, so the same count holds with R = 2.
    assert waited <= (batch + others) * 2
    assert wait_of_the_low_one(10**6, steps=2 * waited) is None, "without aging it starves: the test can fail"


# ---- Preemption ------------------------------------------------------------------------------------------


def test_the_victim_loses_least_and_the_senior_is_never_one() -> None:
    engine = FakeEngine(**SMALL | {"blocks": 10, "step_tokens": 32, "context": 32, "prefix_cache": False})
    for id, prompt in ((1, 4), (2, 10), (3, 6)):
        engine.add(id, [id, *range(prompt - 1)], answer=20)
    engine.step()
    while not (plan := engine.scheduler.plan()).victims:
        engine.step()
    assert plan.victims == (3,)  # 1 has done less, but it is the senior
    assert plan.chunks == ()
    engine.run()
    engine.check_answers()
    assert sorted(engine.answers) == [1, 2, 3]


def test_of_unequal_priorities_the_lower_one_gives_way() -> None:
    engine = FakeEngine(**SMALL | {"blocks": 10, "step_tokens": 32, "context": 32, "prefix_cache": False})
    for id, prompt, priority in ((1, 4, 0), (2, 10, -1), (3, 6, 0)):
        engine.add(id, [id, *range(prompt - 1)], answer=20, priority=priority)
    engine.step()
    while not (plan := engine.scheduler.plan()).victims:
        engine.step()
    assert plan.victims == (2,)


def test_a_preempted_sequence_finds_what_was_not_needed_in_the_cache() -> None:
    engine = FakeEngine(**SMALL)
    engine.add(1, range(12), answer=6)
    engine.step()
    engine.step()
    engine.scheduler.preempt(1)
    plan = engine.step()
    assert plan is not None and plan.chunks[0].start == 12
    engine.run()
    engine.check_answers()
    assert engine.scheduler.stats.recomputed_tokens == 0


def test_all_but_the_one_with_most_work_are_preempted() -> None:
    engine = FakeEngine(**SMALL)
    for id, prompt in ((1, 2), (2, 5), (3, 1)):
        engine.add(id, [id] * prompt, answer=6)
    engine.step()
    assert engine.scheduler.preempt_all_but_one() == 2
    assert [engine.scheduler.sequence(id).running for id in (1, 2, 3)] == [0, 1, 0]
    engine.run()
    engine.check_answers()


# ---- Transactions ----------------------------------------------------------------------------------------


def test_release_puts_everything_back() -> None:
    engine = FakeEngine(**SMALL)
    engine.add(1, range(6), answer=6)
    engine.step()
    engine.fork(1, 2)
    engine.add(3, [3, 4])
    before = [engine.scheduler.contents(id) for id in (1, 2, 3)], vars_of(engine.scheduler.pool)
    plan = engine.scheduler.plan()
    outcome, copies = engine.scheduler.reserve()
    assert (outcome, len(copies)) == (StepOutcome.COMMITTED, 1)
    engine.scheduler.release()
    assert ([engine.scheduler.contents(id) for id in (1, 2, 3)], vars_of(engine.scheduler.pool)) == before
    assert [c.sequence for c in engine.scheduler.plan().chunks] == [c.sequence for c in plan.chunks]
    engine.run()
    engine.check_answers()
    assert engine.scheduler.stats.releases == 1


def vars_of(counts: object) -> list[int]:
    return [getattr(counts, name) for name in ("total", "free", "cached", "owned", "owned_tokens")]


def test_a_plan_that_is_out_of_date_is_retried() -> None:
    engine = FakeEngine(**SMALL)
    engine.add(1, [1])
    engine.scheduler.plan()
    engine.scheduler.cancel(1)
    assert engine.scheduler.reserve()[0] == StepOutcome.RETRY


def test_a_result_that_does_not_fit_is_refused_before_anything_changes() -> None:
    engine = FakeEngine(**SMALL)
    engine.add(1, [1, 2])
    assert engine.reserve() is not None
    for results in ({}, {1: ([5, 6], False)}, {1: ([], False)}):
        with pytest.raises(EngineError):
            engine.scheduler.commit(results)  # type: ignore[arg-type]
    engine.scheduler.commit({1: ([5], False)})
    assert engine.scheduler.contents(1)[0] == [1, 2, 5]


@pytest.mark.parametrize("accepted", range(4))
def test_rejected_drafts_leave_nothing_behind(accepted: int) -> None:
    engine = FakeEngine(**SMALL)
    engine.add(1, range(6), answer=20)
    engine.step()
    blocks = engine.scheduler.pool.owned
    engine.scheduler.set_draft(1, [50, 51, 52])
    plan = engine.scheduler.plan()
    assert [(c.start, c.count, c.drafts) for c in plan.chunks] == [(6, 4, 3)]
    engine.scheduler.reserve()
    engine.scheduler.commit({1: ([*[50, 51, 52][:accepted], 60], False)})
    info = engine.scheduler.sequence(1)
    assert (info.length, info.tokens) == (7 + accepted, 8 + accepted)
    assert engine.scheduler.pool.owned == blocks + (info.length > 8)
    assert engine.scheduler.stats.rejected_tokens == 3 - accepted


# ---- Sharing ---------------------------------------------------------------------------------------------


def test_n_answers_share_their_prompt_and_copy_only_the_last_block() -> None:
    engine = FakeEngine(**SMALL)
    engine.add(1, range(6), answer=4)
    engine.step()
    for child, token in ((2, 50), (3, 51)):
        engine.scheduler.fork(1, child, token)
    assert engine.scheduler.pool.owned == 2
    assert engine.scheduler.contents(3)[0] == [*range(6), 51]
    engine.scheduler.plan()
    outcome, copies = engine.scheduler.reserve()
    assert outcome == StepOutcome.COMMITTED
    assert len(copies) == 2  # the last to write keeps the shared block
    assert engine.scheduler.pool.owned == 4
    engine.scheduler.release()
    assert engine.scheduler.pool.owned == 2


def test_equal_prompts_share_blocks_as_soon_as_both_are_computed() -> None:
    engine = FakeEngine(**SMALL | {"step_tokens": 32})
    engine.add(1, range(9), answer=9)
    engine.add(2, range(9), answer=9)
    engine.step()
    assert engine.scheduler.pool.owned == 4  # two shared, and two last ones
    engine.run()
    engine.check_answers()


def test_a_prefix_that_the_plan_counts_on_is_not_evicted_by_the_same_step() -> None:
    engine = FakeEngine(**SMALL | {"blocks": 10, "step_tokens": 32})
    engine.add(1, range(9), answer=1)  # leaves two cached blocks, the oldest
    engine.run()
    engine.add(2, range(100, 117), answer=1)  # four newer ones
    engine.run()
    engine.add(4, range(200, 215), answer=4, max_new_tokens=4)
    engine.step()
    engine.step()
    assert (engine.scheduler.pool.free, engine.scheduler.pool.cached) == (0, 6)
    engine.add(3, range(9), answer=1, max_new_tokens=1)
    plan = engine.step()  # 4 takes a block, and 3 starts on the oldest
    assert plan is not None and [(c.sequence, c.start) for c in plan.chunks] == [(4, 16), (3, 8)]
    engine.run()
    engine.check_answers()


def test_prompts_whose_logits_are_wanted_are_computed_whole() -> None:
    engine = FakeEngine(**SMALL | {"step_tokens": 32})
    engine.add(1, range(9))
    engine.run()
    engine.add(2, range(9), compute_all=True)
    engine.add(3, range(9))
    plan = engine.step()
    assert plan is not None
    assert [(c.sequence, c.start, c.count) for c in plan.chunks] == [(2, 0, 9), (3, 8, 1)]
    assert engine.scheduler.sequence(3).cached_tokens == 8


# ---- Static batching, refusals ---------------------------------------------------------------------------


def test_a_static_batch_runs_until_its_longest_member_ends_and_counts_what_it_wastes() -> None:
    engine = FakeEngine(**SMALL | {"static_batching": True, "max_batch": 2, "blocks": 64})
    for id, prompt, answer in ((1, 2, 2), (2, 4, 6), (3, 1, 1)):
        engine.add(id, [id] * prompt, answer=answer)
    engine.run()
    engine.check_answers()
    assert [p.starts for p in engine.trace if p.starts] == [(1, 2), (3,)]
    assert [(len(p.chunks), p.padding) for p in engine.trace] == [(2, 2), (2, 0), *[(1, 1)] * 4, (1, 0)]
    stats = engine.scheduler.stats
    assert (stats.batch_used, stats.batch_slots, stats.padding_rows) == (9, 13, 6)


def test_refusals_are_typed() -> None:
    scheduler = make_scheduler(**SMALL | {"max_waiting": 2})
    assert scheduler.add(1, []) == Admission.INVALID
    assert scheduler.add(1, [1, -1]) == Admission.INVALID
    assert scheduler.add(1, [1], priority=8) == Admission.INVALID
    assert scheduler.add(1, [1], priority=-9) == Admission.INVALID
    assert scheduler.add(1, [1], weight=0.0) == Admission.INVALID
    assert scheduler.add(1, [1], weight=math.nan) == Admission.INVALID
    assert scheduler.add(1, [1], max_new_tokens=-1) == Admission.INVALID
    assert scheduler.add(1, [1]) == Admission.ACCEPTED
    assert scheduler.add(1, [1]) == Admission.INVALID  # the id is taken
    assert scheduler.add(2, [1]) == Admission.ACCEPTED
    assert scheduler.add(3, [1]) == Admission.QUEUE_FULL
    with pytest.raises(EngineError, match="no such sequence"):
        scheduler.cancel(3)
    with pytest.raises(EngineError, match="step_tokens"):
        make_scheduler(**SMALL | {"step_tokens": 3})


# ---- Everything at random --------------------------------------------------------------------------------


class SchedulerMachine(RuleBasedStateMachine):
    """The core verifies itself after each call; here: no wrong slot is read, no answer disturbed, no block lost."""

    @initialize(
        blocks=st.integers(6, 20),
        block_size=st.integers(1, 5),
        static=st.sampled_from([False, False, False, True]),
        cache=st.sampled_from([True, True, True, False]),
        colliding=st.booleans(),
    )
    def begin(self, blocks: int, block_size: int, static: bool, cache: bool, colliding: bool) -> None:
        self.engine = FakeEngine(
            **SMALL | {"blocks": blocks, "block_size": block_size, "static_batching": static},
            prefix_cache=cache,
            colliding=colliding,
        )
        self.next = 1

    def some(self, at: int) -> int:
        return self.engine.alive[at % len(self.engine.alive)]

    @rule(
        first=st.integers(0, 2),
        length=st.integers(1, 24),
        answer=st.integers(1, 12),
        priority=st.integers(-8, 7),
        tenant=st.integers(0, 2),
        key=st.sampled_from([b"", b"", b"salt"]),
        all_=st.booleans(),
    )
    def add(self, first: int, length: int, answer: int, priority: int, tenant: int, key: bytes, all_: bool) -> None:
        if len(self.engine.alive) >= 12:
            return
        prompt = [first, *range(1, length)]
        options = {"priority": priority, "tenant": tenant, "key": key, "compute_all": all_}
        admission = self.engine.add(self.next, prompt, answer, **options)
        capacity = min(40, self.engine.config.blocks * self.engine.config.block_size)
        assert admission == (Admission.TOO_LONG if length + 1 > capacity else Admission.ACCEPTED)
        self.next += admission == Admission.ACCEPTED

    alive = precondition(lambda self: self.engine.alive)

    @alive
    @rule(at=st.integers(0, 99))
    def fork(self, at: int) -> None:
        if len(self.engine.alive) < 12:
            self.engine.fork(self.some(at), self.next)
            self.next += 1

    @alive
    @rule(at=st.integers(0, 99))
    def cancel(self, at: int) -> None:
        self.engine.cancel(self.some(at))

    @alive
    @rule(at=st.integers(0, 99))
    def preempt(self, at: int) -> None:
        id = self.some(at)
        if self.engine.scheduler.sequence(id).running:
            self.engine.scheduler.preempt(id)

    @rule()
    def trim(self) -> None:
        self.engine.scheduler.trim()

    @rule(steps=st.integers(1, 6))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()

    @alive
    @rule()
    def fail(self) -> None:
        before = [self.engine.scheduler.contents(id) for id in self.engine.alive]
        if self.engine.reserve() is not None:
            owned = self.engine.scheduler.pool.owned
            self.engine.scheduler.release()
            assert self.engine.scheduler.pool.owned <= owned
            after = [self.engine.scheduler.contents(id) for id in self.engine.alive]
            preempted = [i for i, (_, table) in enumerate(after) if not table]
            assert all(a == b for i, (a, b) in enumerate(zip(after, before, strict=True)) if i not in preempted)

    @alive
    @rule(at=st.integers(0, 99), cancel=st.booleans())
    def meanwhile(self, at: int, cancel: bool) -> None:
        plan = self.engine.reserve()
        if plan is None:
            return
        id = self.some(at)
        if cancel:
            self.engine.cancel(id)
        elif self.engine.scheduler.sequence(id).running:
            self.engine.scheduler.preempt(id)
        self.engine.commit(plan)

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.verify()
            self.engine.check_answers()
            self.engine.answers.clear()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.run()
            self.engine.check_answers()
            assert self.engine.alive == []
            assert self.engine.whole()


TestRandomOperations = SchedulerMachine.TestCase
TestRandomOperations.settings = settings(
    max_examples=80, stateful_step_count=60, deadline=None, derandomize=True, print_blob=False
)
