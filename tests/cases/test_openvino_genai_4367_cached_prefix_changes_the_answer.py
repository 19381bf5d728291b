"""openvino.genai#4367: with a cached prefix the output differs from the output without.

Right behaviour: equal bit for bit, log-probabilities included. The core's own tests show the same for preemption and
chunking (native/tests/test_one_answer.cpp).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from edgec.runtime.engine import Engine, EngineOptions
from edgec.runtime.events import EventKind, Finish
from edgec.runtime.sampling import Sampling
from tests.tiny_bundle import write_tiny_bundle

pytestmark = pytest.mark.slow  # the core has to be compiled


def answer(engine: Engine, prompt: list[int]) -> tuple[list[tuple[int, float | None]], int]:
    """Tokens with their log-probabilities, and how many prompt tokens were cached."""
    events = list(
        engine.generate(prompt, Sampling(max_tokens=20, temperature=0.8, seed=3, logprobs=0, ignore_eos=True))
    )
    tokens = [(e.token, e.logprob) for e in events if e.kind is EventKind.TOKEN]
    return tokens, next(e.cached_tokens for e in events if e.finish is not Finish.NONE)


def test_cached_equals_uncached(tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path)
    shared = [(7 * i) % 200 for i in range(70)]
    prompts = [[*shared, 1, 2, 3], [*shared[:40], 9, 9, 9], shared]
    with Engine(bundle, EngineOptions(prefix_cache=False)) as cold, Engine(bundle) as warm:
        answer(warm, [*shared, 5])
        for prompt in prompts:
            expected, nothing = answer(cold, prompt)
            got, cached = answer(warm, prompt)
            assert nothing == 0
            assert cached >= 32
            assert got == expected
