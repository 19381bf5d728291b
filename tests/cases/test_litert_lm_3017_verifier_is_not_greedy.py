"""LiteRT-LM#3017: the verifier is greedy at any temperature.

Right behaviour: what is drawn with speculation is distributed as without. The test is one that a greedy verifier fails:
here its answers are those at temperature 0. Planted verifiers stand in native/tests/test_speculation.cpp, and in
tests/reference/test_speculation.py with the exact distribution.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest

from edgec.runtime.abi import Speculation
from edgec.runtime.sampling import Sampling
from tests.drafting import WHO, ask, open_engine
from tests.tiny_bundle import write_tiny_bundle

pytestmark = pytest.mark.slow  # the core has to be compiled

# Answers mostly go on with one of the prompt's three tokens, so their endings have been there before.
PROMPT, LOOP = [40 + i * i % 7 % 3 for i in range(60)], {40: 5.0, 41: 5.0, 42: 5.0}
DRAWS, MOST = 2000, 4.5


def thirds(bundle: Path, who: Speculation, **options: object) -> Counter[object]:
    """Third tokens of as many answers: the second and third come out of verified runs."""
    counts: Counter[object] = Counter()
    with open_engine(bundle, who, 3 if who is not Speculation.OFF else 0) as engine:
        for first in range(0, DRAWS, 8):
            sampling = Sampling(max_tokens=3, temperature=1.5, top_k=6, n=8, seed=first, logit_bias=LOOP)
            sampling = Sampling(**{**vars(sampling), "speculate": who is not Speculation.OFF, **options})
            [answers] = engine.answer([PROMPT], sampling)
            counts.update(answer.tokens[2] for answer in answers)
        assert (engine.stats().drafted_tokens > DRAWS / 4) == (who is not Speculation.OFF)
    return counts


def apart(a: Counter[object], b: Counter[object]) -> float:
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
    plain = thirds(bundle, Speculation.OFF)
    assert len(plain) > 6
    assert apart(thirds(bundle, who), plain) < MOST


def test_a_greedy_verifier_would_be_noticed(tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path, draft=True)
    plain = thirds(bundle, Speculation.OFF)
    with open_engine(bundle) as engine:
        [said] = ask(engine, [PROMPT], Sampling(max_tokens=3, logit_bias=LOOP))
    greedy = Counter({said[2][0]: DRAWS})
    assert apart(greedy, plain) > 10 * MOST
    # Also when only one answer in five is greedy.
    mixed = Counter({t: int(0.8 * n) for t, n in plain.items()}) + Counter({said[2][0]: DRAWS // 5})
    assert apart(mixed, thirds(bundle, Speculation.OFF, seed=1)) > MOST
