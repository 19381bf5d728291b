"""LiteRT-LM#3017: the verifier is greedy at any temperature.

Right behaviour: what is drawn with speculation is distributed as without. The test is one that a greedy verifier fails:
here its answers are those at temperature 0. Planted verifiers stand in native/tests/test_speculation.cpp, and in
tests/reference/test_speculation.py with the exact distribution.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from edgec.runtime.abi import Speculation
from edgec.runtime.sampling import Sampling
from tests.drafting import WHO, ask, open_engine
from tests.tiny_bundle import write_tiny_bundle

pytestmark = pytest.mark.slow  # the core has to be compiled

# Answers mostly go on with one of the prompt's three tokens, so their endings have been there before.
PROMPT, LOOP = [40 + i * i % 7 % 3 for i in range(60)], {40: 5.0, 41: 5.0, 42: 5.0}
WARM = Sampling(max_tokens=3, temperature=1.5, top_k=6, logit_bias=LOOP, ignore_eos=True)
DRAWS, MOST = 2000, 4.5


def drawn(bundle: Path, who: Speculation, seed: int) -> list[list[int]]:
    """Answers of three tokens: the second is verified, the third comes after a run."""
    found: list[list[int]] = []
    with open_engine(bundle, who, 3 if who is not Speculation.OFF else 0) as engine:
        for group in range(DRAWS // 8):
            sampling = replace(WARM, n=8, seed=10_000 * seed + group, speculate=who is not Speculation.OFF)
            [answers] = engine.answer([PROMPT], sampling)
            found += [answer.tokens for answer in answers]
        assert (engine.stats().drafted_tokens > DRAWS / 4) == (who is not Speculation.OFF)
    return found


def at(answers: list[list[int]], place: int) -> Counter[int]:
    return Counter(tokens[place] for tokens in answers)


def apart(a: Counter[int], b: Counter[int]) -> float:
    """χ² of two samples, in standard deviations above its mean; tokens that are rare in both count as one."""
    rare = [t for t in a | b if a[t] + b[t] < 20]
    cells = [(a[t], b[t]) for t in a | b if t not in rare]
    if rare:
        cells.append((sum(a[t] for t in rare), sum(b[t] for t in rare)))
    scale = math.sqrt(b.total() / a.total())
    statistic = sum((x * scale - y / scale) ** 2 / (x + y) for x, y in cells)
    return (statistic - (len(cells) - 1)) / math.sqrt(2 * (len(cells) - 1))


@pytest.mark.parametrize("who", WHO)
def test_what_is_drawn_is_distributed_as_without(tmp_path: Path, who: Speculation) -> None:
    bundle = write_tiny_bundle(tmp_path, draft=True)
    plain, speculative = drawn(bundle, Speculation.OFF, 0), drawn(bundle, who, 1)
    for place in (1, 2):
        assert len(at(plain, place)) > 5
        assert apart(at(speculative, place), at(plain, place)) < MOST


def test_a_greedy_verifier_would_be_noticed(tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path, draft=True)
    plain, again = drawn(bundle, Speculation.OFF, 0), drawn(bundle, Speculation.OFF, 1)
    with open_engine(bundle) as engine:
        [said] = ask(engine, [PROMPT], replace(WARM, temperature=0.0))
    for place in (1, 2):
        counts, greedy = at(plain, place), Counter({int(str(said[place][0])): DRAWS})
        assert apart(counts, at(again, place)) < MOST
        assert apart(greedy, counts) > 10 * MOST
        # Also when only one answer in five is greedy.
        mixed = Counter({t: int(0.8 * n) for t, n in counts.items()}) + Counter({t: n // 5 for t, n in greedy.items()})
        assert apart(mixed, at(again, place)) > MOST
