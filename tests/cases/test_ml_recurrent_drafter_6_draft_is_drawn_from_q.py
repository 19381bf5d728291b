"""ml-recurrent-drafter#6: drafts were not sampled from the q that the acceptance test used.

Right behaviour: a proposal carries the very distribution it was drawn from. Drawn in another way (the likeliest token,
or without the truncation that q has), what comes out is not the target's distribution, and the test says so. The
native engine makes the same proposals from the same numbers (tests/reference/test_speculation.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from edgec.reference.sampler import History, Proposal, distribution, propose, verify
from edgec.runtime.sampling import Sampling

pytestmark = pytest.mark.slow

TARGET = np.array([1.2, -0.3, 0.8, 2.0, -1.0, 0.1, 1.9, 0.4, -0.6, 1.1, 0.0, 0.7], np.float32)
DRAFT = np.array([2.0, 0.5, 1.0, -0.5, 1.5, 0.2, 0.9], np.float32)
WORDS = np.array([0, 2, 3, 4, 6, 9, 11])
SAMPLINGS = [Sampling(temperature=0.8), Sampling(temperature=1.0, top_k=4), Sampling(temperature=1.0, top_p=0.8)]
RUNS, MOST = 6000, 4.5

Drawer = Callable[[Sampling, int], Proposal | None]


def ours(sampling: Sampling, seed: int) -> Proposal | None:
    return propose(DRAFT, WORDS, sampling, seed=seed, answer=0, position=0)


def likeliest(sampling: Sampling, seed: int) -> Proposal | None:
    """Drawn greedily, and tested as if drawn from the softmax."""
    made = ours(sampling, seed)
    return made and replace(made, token=int(WORDS[DRAFT.argmax()]))


def without_options(sampling: Sampling, seed: int) -> Proposal | None:
    """Drawn from the whole softmax, and tested against a q of half the temperature."""
    made, q = ours(Sampling(temperature=sampling.temperature), seed), ours(Sampling(temperature=0.4), seed)
    return made and q and replace(q, token=made.token)


def chi_square(counts: np.ndarray, p: np.ndarray) -> float:
    """In standard deviations above its mean."""
    assert counts[p == 0].sum() == 0
    expected = p[p > 0] * counts.sum()
    statistic, freedom = ((counts[p > 0] - expected) ** 2 / expected).sum(), (p > 0).sum() - 1
    return float((statistic - freedom) / math.sqrt(2 * freedom))


def deviation(drawer: Drawer, sampling: Sampling) -> float:
    """Of the verified tokens from the target's distribution."""
    p, counts = np.zeros(len(TARGET)), np.zeros(len(TARGET))
    tokens, weights = distribution(TARGET, sampling, History())
    p[tokens] = weights / weights.sum()
    for seed in range(RUNS):
        proposal = drawer(sampling, 977 * seed + 3)
        assert proposal is not None
        found = verify(TARGET, sampling, History(), proposal, seed=977 * seed + 3, answer=0, position=0)
        assert found is not None
        counts[found.token] += 1
    return chi_square(counts, p)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_proposals_are_drawn_from_the_q_that_they_carry(sampling: Sampling) -> None:
    draw = partial(ours, sampling)
    made = [m for m in map(draw, range(0, 977 * RUNS, 977)) if m is not None]
    assert len(made) == RUNS
    q = np.zeros(len(TARGET))
    q[made[0].tokens] = made[0].weights / made[0].weights.sum()
    assert chi_square(np.bincount([m.token for m in made], minlength=len(TARGET)).astype(float), q) < MOST


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_verified_token_is_distributed_as_the_targets(sampling: Sampling) -> None:
    assert deviation(ours, sampling) < MOST


@pytest.mark.parametrize("drawer", [likeliest, without_options])
def test_another_q_is_noticed(drawer: Drawer) -> None:
    assert deviation(drawer, SAMPLINGS[0]) > 2 * MOST
