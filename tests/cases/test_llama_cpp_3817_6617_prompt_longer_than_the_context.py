"""llama.cpp#3817, #6617: a prompt longer than the context crashed the server, or made it loop.

Right behaviour: a typed refusal at admission, for a prompt that leaves no room for one token in the context or pool.
"""

from __future__ import annotations

import pytest

from edgec.runtime.scheduling import Admission
from tests.scheduling_core import FakeEngine


@pytest.mark.parametrize(
    ("blocks", "context", "fits"), [(64, 40, 39), (5, 40, 19), (1, 40, 3)], ids=["context", "pool", "one block"]
)
def test_one_token_too_many_is_refused_and_one_fewer_runs(blocks: int, context: int, fits: int) -> None:
    engine = FakeEngine(blocks=blocks, block_size=4, context=context, max_batch=2, step_tokens=8)
    assert engine.add(1, range(fits + 1)) == Admission.TOO_LONG
    assert engine.add(2, range(100 * context)) == Admission.TOO_LONG
    assert engine.scheduler.stats.waiting == 0
    assert engine.add(3, range(fits), answer=100) == Admission.ACCEPTED
    engine.run()
    engine.check_answers()
    assert len(engine.answers[3]) == fits + 1  # filled to the last position, and ended there
    assert engine.whole()


def test_an_answer_ends_where_the_context_does() -> None:
    engine = FakeEngine(blocks=64, block_size=4, context=40, max_batch=2, step_tokens=8)
    engine.add(1, range(10), answer=1000)
    engine.add(2, range(10), answer=1000)
    engine.run()
    assert [len(engine.answers[id]) for id in (1, 2)] == [40, 40]
