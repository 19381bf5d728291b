"""vllm#54644: with a full cache a third to three quarters of all computed tokens were recomputed.

Right behaviour: victims are chosen by least lost work, what they leave stays cached as long as it can, sequences are
only started while there is room to grow; and the recomputed share is reported.
"""

from __future__ import annotations

import pytest

from edgec.runtime.scheduling import SchedulerConfig
from edgec.runtime.simulate import Simulated, simulate
from edgec.runtime.workload import Cost, Lengths, random_requests
from tests.scheduling_core import core


def tight(kv_tokens: int, *, prefix_cache: bool = True) -> Simulated:
    """Three hundred requests of some 256 tokens each, sixteen at a time, in a pool that holds few of them."""
    lengths = Lengths.parse("exponential:128"), Lengths.parse("exponential:128")
    config = SchedulerConfig(blocks=kv_tokens // 16, max_waiting=300, prefix_cache=prefix_cache)
    return simulate(config, random_requests(300, 0, *lengths, seed=1), Cost(), library=core())


@pytest.mark.parametrize(("kv_tokens", "most"), [(1536, 0.10), (2048, 0.08), (4096, 0.04)])
def test_little_is_recomputed_however_tight_the_pool(kv_tokens: int, most: float) -> None:
    run = tight(kv_tokens)
    assert run.preemptions > 0
    assert 0 < run.recomputed < most


def test_what_is_preempted_is_mostly_found_again() -> None:
    assert tight(1536).recomputed < 0.9 * tight(1536, prefix_cache=False).recomputed
