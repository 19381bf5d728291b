"""vllm#20608, #31909: requests of low priority never ran while others kept coming.

Right behaviour: a bound on waiting, stated in native/src/scheduler.h and tested here; a fairness index in the report.
"""

from __future__ import annotations

from edgec.runtime.scheduling import SchedulerConfig
from edgec.runtime.simulate import simulate
from edgec.runtime.workload import Cost, Lengths, TenantMix, random_requests
from tests.scheduling_core import FakeEngine, core


def starts_before_the_low_one(aging_steps: int, *, tenants: bool, limit: int = 2000) -> int | None:
    """How many others are started ahead of a request of priority −8 while two of priority 7 arrive in each step."""
    engine = FakeEngine(
        blocks=64, block_size=4, context=40, max_batch=2, step_tokens=8, aging_steps=aging_steps, max_waiting=9999
    )
    engine.add(0, [0], answer=2, priority=-8, tenant=0)
    ahead = 0
    for step in range(limit):
        for k in range(2):
            engine.add(1 + 2 * step + k, [1 + step], answer=2, priority=7, tenant=int(tenants))
        plan = engine.step()
        assert plan is not None
        if 0 in plan.starts:
            return ahead + plan.starts.index(0)
        ahead += len(plan.starts)
    return None


def test_of_one_tenant_only_those_that_come_within_fifteen_aging_periods_pass() -> None:
    for aging in (1, 4, 16):
        ahead = starts_before_the_low_one(aging, tenants=False)
        # Two arrive in each of the 15 · aging steps, and two in the step at which they come level.
        assert ahead is not None and ahead <= 2 * (15 * aging + 1)
        assert ahead > 15 * aging / 2, "priorities do count"


def test_without_aging_it_starves() -> None:
    assert starts_before_the_low_one(10**6, tenants=False) is None


def test_another_tenant_never_makes_it_wait_for_more_than_its_share() -> None:
    # Priorities count inside a tenant only: tenants of equal weight take turns.
    ahead = starts_before_the_low_one(10**6, tenants=True)
    assert ahead is not None and ahead <= 2


def test_the_report_has_a_fairness_index() -> None:
    lengths = Lengths.parse("exponential:64"), Lengths.parse("exponential:64")
    mixes = [TenantMix("much", weight=3, share=3), TenantMix("little", weight=1, share=1)]
    requests = random_requests(400, 0, *lengths, tenants=mixes, seed=3)
    run = simulate(SchedulerConfig(max_waiting=400), requests, Cost(), library=core())
    assert 0.98 < run.fairness <= 1.0
