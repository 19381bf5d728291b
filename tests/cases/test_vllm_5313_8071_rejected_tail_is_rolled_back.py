"""vllm#5313, #8071: nonsense after a rejection, because the keys and values of rejected tokens stayed.

Right behaviour: after a rejection at any place of a run everything that follows is what plain decoding gives, to the
last bit of its log-probabilities, and the blocks of the rejected tail are back. The reference is tested with proposals
that are wrong at exactly one place (tests/reference/test_speculation.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from edgec.runtime.sampling import Sampling
from tests.drafting import BOTH, NGRAM, ask, open_engine, prompts
from tests.tiny_bundle import write_tiny_bundle

pytestmark = pytest.mark.slow  # the core has to be compiled


@pytest.mark.parametrize("block_size", [4, 16])
def test_a_rejection_at_every_place_leaves_nothing_behind(tmp_path: Path, block_size: int) -> None:
    bundle = write_tiny_bundle(tmp_path, draft=True)
    sampling = Sampling(max_tokens=80, logprobs=1, ignore_eos=True)
    asked = prompts(40)
    with open_engine(bundle, block_size=block_size) as engine:
        plain = ask(engine, asked, sampling, batch=8)
    for who in (NGRAM, BOTH):
        with open_engine(bundle, who, 8, block_size=block_size) as engine:
            assert ask(engine, asked, sampling, batch=8) == plain
            stats = engine.stats()
            rejected = [r - k for r, k in zip(stats.draft_reached, stats.draft_kept, strict=True)]
            assert min(rejected) > 0, f"no rejection at place {rejected.index(0)}"
            assert stats.draft_kept[7] > 0
            # What later requests find in the cache is right, too.
            again = [[*prompt, *(t[0] for t in said[:50])] for prompt, said in zip(asked, plain, strict=True)]
            rest = Sampling(max_tokens=30, logprobs=1, ignore_eos=True)
            found = ask(engine, again, rest, batch=8)
            assert engine.stats().cached_tokens > 1000
            assert [[t[:2] for t in said[:30]] for said in found] == [[t[:2] for t in said[50:80]] for said in plain]
