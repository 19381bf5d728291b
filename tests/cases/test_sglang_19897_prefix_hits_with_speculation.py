"""sglang#19897: on a prefix hit the draft's own cache is uninitialised.

Right behaviour: prefix reuse and speculation in every combination give the same bits, and what is proposed after a hit
is as good as without: the head's state is the hidden state of the prompt's last row, which is computed in any case.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from edgec.runtime.abi import Speculation
from edgec.runtime.engine import Engine
from edgec.runtime.sampling import Sampling
from tests.drafting import WHO, Said, ask, open_engine
from tests.tiny_bundle import write_tiny_bundle

pytestmark = pytest.mark.slow  # the core has to be compiled

GREEDY = Sampling(max_tokens=24, logprobs=1, ignore_eos=True)
WARM = Sampling(max_tokens=60, temperature=0.4, seed=4, logprobs=1, ignore_eos=True, speculate=True)
SHARED = [40 + i * 7 % 20 for i in range(70)]
ASKED = [[*SHARED, 1, 2, 3], [*SHARED[:48], 9, 9, 9], SHARED, SHARED[:49], SHARED[:33]]


def drafted(engine: Engine, sampling: Sampling) -> tuple[list[Said], tuple[int, ...], int, int]:
    """Answers, one after the other, what was kept of the proposals made for them, and how much was cached."""
    before = engine.stats()
    said = ask(engine, ASKED, sampling)
    stats = engine.stats().since(before)
    return said, stats.draft_kept, stats.drafted_tokens, stats.cached_tokens


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "drawn"])
def test_hits_change_neither_answers_nor_proposals(tmp_path: Path, who: Speculation, sampling: Sampling) -> None:
    bundle = write_tiny_bundle(tmp_path, draft=True)
    with open_engine(bundle, who, 3, prefix_cache=False) as cold, open_engine(bundle, who, 3) as warm:
        said, kept, proposed, nothing = drafted(cold, sampling)
        drafted(warm, sampling)
        again = drafted(warm, sampling)
    assert nothing == 0 and again[3] >= 4 * 32
    assert proposed > 0
    assert again[:3] == (said, kept, proposed)


@pytest.mark.parametrize("first", [Speculation.OFF, *WHO])
@pytest.mark.parametrize("second", [Speculation.OFF, *WHO])
def test_what_one_leaves_in_the_cache_serves_the_other(tmp_path: Path, first: Speculation, second: Speculation) -> None:
    """Whether speculation was on when a prefix was computed, and is when it is found: one engine, by request."""
    bundle = write_tiny_bundle(tmp_path, draft=True)
    with open_engine(bundle, prefix_cache=False) as engine:
        plain = ask(engine, ASKED, GREEDY)
    who = first if first is not Speculation.OFF else second
    with open_engine(bundle, who, 4 if who is not Speculation.OFF else 0) as engine:
        for turn in (first, second):
            asks = Sampling(**{**vars(GREEDY), "speculate": turn is not Speculation.OFF})
            assert ask(engine, ASKED, asks) == plain
        assert engine.stats().cached_tokens > 100
