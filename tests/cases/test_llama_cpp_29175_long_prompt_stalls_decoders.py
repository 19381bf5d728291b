"""llama.cpp#29175: one long prompt stalled everyone who was in the middle of an answer.

Right behaviour: prompts come in chunks under a step's token budget, so while one of 8,000 tokens enters, the time
between the others' tokens is bounded by a step of that many rows.
"""

from __future__ import annotations

from dataclasses import replace

from edgec.runtime.scheduling import SchedulerConfig
from edgec.runtime.simulate import Simulated, simulate
from edgec.runtime.workload import Cost, Request
from tests.scheduling_core import core

COST = Cost(fixed=0.005, per_row=0.001, per_sequence=0.0)
ANSWERING = [Request(0.0, 16, 400, tenant="others") for _ in range(8)]
LONG = Request(1.0, 8000, 10, tenant="long")


def run(step_tokens: int, slo: float = 0.0, answer: int = 400) -> Simulated:
    config = SchedulerConfig(context=8192, step_tokens=step_tokens, max_waiting=10, step_slo=slo)
    return simulate(config, [*(replace(r, answer=answer) for r in ANSWERING), LONG], COST, library=core())


def longest_gap(made: Simulated) -> float:
    return next(t.longest_gap for t in made.tenants if t.name == "others")


def test_the_others_wait_for_one_step_at_most() -> None:
    made = run(step_tokens=64)
    assert longest_gap(made) <= COST.fixed + 64 * COST.per_row + 1e-9
    assert made.between_tokens.p99 <= 1.005 * (COST.fixed + 64 * COST.per_row)
    assert next(t.answer_tokens for t in made.tenants if t.name == "long") == 10


def test_without_chunks_they_stall() -> None:
    assert longest_gap(run(step_tokens=8192)) > 100 * COST.fixed


def test_with_an_objective_the_chunks_shrink_until_steps_meet_it() -> None:
    # Long enough that the steps in which it finds this out are fewer than one in a hundred.
    without, with_ = run(step_tokens=512, answer=6000), run(step_tokens=512, slo=0.03, answer=6000)
    assert without.longest_gap > 0.5
    assert with_.step.p99 <= 0.03 * 1.005
