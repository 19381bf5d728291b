"""vllm#51226: a request's seed is ignored when a batch-mate has none.

Here: random numbers come from a counter keyed by the request's own seed and the token's position, so who else is in the
same step changes nothing.
"""

from __future__ import annotations

import random

import numpy as np

from edgec.runtime.sampling import Sampling
from tests.runtime.text_core import Row

SAMPLING = Sampling(temperature=1.0, top_p=0.95)


def answer(seed: int, batch_mates: int) -> list[int]:
    """Twenty tokens of a request with a seed; before and after each one, rows of others, of many shapes and seeds."""
    draw = random.Random(batch_mates)
    logits = np.random.default_rng(0).normal(0, 2, (20, 300))
    tokens = []
    for position in range(20):
        others = [
            Row(np.array([draw.gauss(0, 1) for _ in range(draw.randrange(1, 400))]), seed=draw.getrandbits(64))
            for _ in range(batch_mates)
        ]
        for other in others[::2]:
            other.sample(Sampling(temperature=0.5, top_k=draw.choice([0, 3]), logprobs=draw.choice([None, 2])))
        tokens.append(Row(logits[position], answer=tokens, seed=seed, position=position).sample(SAMPLING).token)
        for other in others[1::2]:
            other.sample(Sampling(temperature=2.0))
    return tokens


def test_a_seeded_answer_does_not_depend_on_its_batch_mates() -> None:
    alone = answer(7, batch_mates=0)
    assert answer(7, batch_mates=1) == answer(7, batch_mates=5) == alone


def test_another_seed_is_another_answer() -> None:
    assert answer(8, batch_mates=0) != answer(7, batch_mates=0)
