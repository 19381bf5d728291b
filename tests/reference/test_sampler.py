"""The reference's sampler against the core's: written apart, the same tokens from the same logits."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgec.reference.philox import noise, philox4x32, seed_of, uniform
from edgec.reference.sampler import History, Sampled, check_sampling, distribution, is_plain, sample
from edgec.reference.text import StopStrings
from edgec.runtime.abi import Status
from edgec.runtime.failures import EngineError
from edgec.runtime.sampling import Sampling
from tests.runtime import text_core
from tests.runtime.test_sampler import REFUSED, SAMPLINGS, chi_square
from tests.runtime.text_core import Row


def mine(row: Row, sampling: Sampling) -> Sampled | None:
    history = History(frozenset(row.prompt), Counter(row.answer))
    logits = np.asarray(row.logits, np.float32)
    return sample(logits, sampling, history, seed=row.seed, answer=row.sequence, position=row.position)


def probabilities(row: Row, sampling: Sampling) -> dict[int, float]:
    history = History(frozenset(row.prompt), Counter(row.answer))
    tokens, weights = distribution(np.asarray(row.logits, np.float32), sampling, history)
    return dict(zip(tokens.tolist(), (weights / weights.sum()).tolist(), strict=True))


def test_philox_gives_the_published_numbers() -> None:
    """Random123's kat_vectors."""
    ones = 0xFFFFFFFF
    assert philox4x32((0,) * 4, (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox4x32((ones,) * 4, (ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(-(2**63), 2**64 - 1), answer=st.integers(0, 63), position=st.integers(0, 2**31 - 1))
def test_draws_are_the_cores(seed: int, answer: int, position: int) -> None:
    assert uniform(seed, answer, position) == text_core.uniform(seed, answer, position)
    times = noise(seed, answer, position, np.array([0, 7, 49_151]))
    assert times.tolist() == pytest.approx(
        [text_core.noise(seed, answer, position, t) for t in (0, 7, 49_151)], rel=1e-14
    )


def test_the_seed_of_a_request_without_one_is_the_cores() -> None:
    """SplitMix64 of 1 and 2, whose first outputs from the state 0 are published."""
    assert [seed_of(1), seed_of(2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@settings(max_examples=600, deadline=None)
@given(
    sampling=SAMPLINGS,
    vocab=st.integers(5, 600),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31 - 1),
    coarse=st.booleans(),
    prompt=st.lists(st.integers(0, 4), max_size=4),
    answer=st.lists(st.integers(0, 4), max_size=4),
)
def test_the_same_logits_give_the_cores_token(
    sampling: Sampling, vocab: int, seed: int, position: int, coarse: bool, prompt: list[int], answer: list[int]
) -> None:
    logits = np.random.default_rng(seed % 9973).normal(0, 4, vocab).astype(np.float32)
    if coarse:
        logits = np.round(logits)  # many ties
    row = Row(logits, prompt, answer, seed=seed, sequence=3, position=position)
    own, theirs = probabilities(row, sampling), row.probabilities(sampling)
    if own.keys() != theirs.keys():  # a rounding apart at the edge of top-p or min-p, and nothing else
        edge = own.keys() ^ theirs.keys()
        assert sampling.temperature > 0
        assert len(edge) <= 2
        return
    assert list(own.values()) == pytest.approx(list(theirs.values()), rel=3e-5, abs=1e-30)
    drawn = mine(row, sampling)
    assert drawn is not None
    times = sorted(noise(seed, 3, position, np.array(list(theirs))) / list(theirs.values()))
    if sampling.temperature == 0 or len(times) == 1 or times[1] > times[0] * (1 + 1e-4):
        assert drawn.token == row.sample(sampling).token


def test_edges_hardly_ever_differ() -> None:
    """The exception of the test above is not where everything ends up."""
    random = np.random.default_rng(1)
    apart = 0
    for i in range(400):
        row = Row(random.normal(0, 3, 2000).astype(np.float32), seed=i, position=i)
        sampling = Sampling(temperature=0.8, top_p=0.9, min_p=0.01 * (i % 2), top_k=50 * (i % 3))
        apart += probabilities(row, sampling).keys() != row.probabilities(sampling).keys()
        drawn = mine(row, sampling)
        assert drawn is not None
        apart += drawn.token != row.sample(sampling).token
    assert apart <= 1


def test_logprobs_are_the_cores() -> None:
    logits = np.random.default_rng(3).normal(0, 5, 1000).astype(np.float32)
    logits[100:110] = logits[50]
    sampling = Sampling(temperature=0.5, top_k=3, logit_bias={7: 60.0}, logprobs=20, presence_penalty=2.0)
    row = Row(logits, prompt=[1, 2], answer=[3])
    own, theirs = mine(row, sampling), row.sample(sampling)
    assert own is not None and own.logprob is not None
    assert own.token == theirs.token == 7
    assert own.logprob == pytest.approx(theirs.logprob, abs=1e-5)
    assert [t for t, _ in own.top] == [t for t, _ in theirs.top]
    assert [p for _, p in own.top] == pytest.approx([p for _, p in theirs.top], abs=1e-5)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=8), Sampling(temperature=1.3, top_p=0.8)],
)
def test_frequencies_are_the_distribution(sampling: Sampling) -> None:
    logits = np.linspace(0, 2, 16).astype(np.float32)
    p = np.zeros(16)
    for token, probability in probabilities(Row(logits), sampling).items():
        p[token] = probability
    drawn = [mine(Row(logits, seed=7, position=i), sampling) for i in range(6000)]
    tokens = [d.token for d in drawn if d is not None]
    assert chi_square(tokens, p) < 5
    biased = p * np.where(np.arange(16) % 2 == 0, 1.15, 0.85)
    assert chi_square(tokens, biased / biased.sum()) > 5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0), Sampling(logprobs=2)])
def test_logits_that_are_no_numbers_give_no_token(bad: float, sampling: Sampling) -> None:
    logits = np.zeros(333, np.float32)
    logits[-1] = bad
    assert mine(Row(logits), sampling) is None


def test_extreme_logits_are_fine() -> None:
    logits = np.array([3e38, -3e38, 0.0, 3e38], np.float32)
    assert probabilities(Row(logits), Sampling(temperature=1.0)) == {0: 0.5, 3: 0.5}
    assert probabilities(Row(np.array([1.0, 0.0])), Sampling(temperature=1e-30)) == {0: 1.0}
    assert mine(Row(np.array([1.0, 5.0, 5.0])), Sampling()) == Sampled(1)


def test_a_bias_that_overflows_gives_no_token() -> None:
    row = Row(np.array([3.4e38, 0.0], np.float32), prompt=[0])
    wild = Sampling(repetition_penalty=0.01)
    assert mine(row, wild) is None
    assert row.sample(wild).bad_logits


def test_only_plain_greedy_takes_the_short_way() -> None:
    assert is_plain(Sampling(max_tokens=4, top_k=3))  # truncation never removes the greatest
    for other in (
        Sampling(temperature=0.1),
        Sampling(logprobs=0),
        Sampling(logit_bias={1: 1.0}),
        Sampling(repetition_penalty=1.1),
        Sampling(presence_penalty=0.1),
    ):
        assert not is_plain(other)


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in REFUSED.items() for v in values])
def test_what_the_core_refuses_is_refused_with_its_status(field: str, value: Any) -> None:
    with pytest.raises(EngineError, match=field) as caught:
        check_sampling(Sampling(**{field: value}), 100)
    assert caught.value.status is Status.INVALID_ARGUMENT


def test_every_end_of_every_range_is_taken() -> None:
    check_sampling(Sampling(), 100)
    check_sampling(
        Sampling(
            temperature=100.0,
            top_k=2**31 - 1,
            top_p=1e-6,
            min_p=0.999,
            repetition_penalty=100.0,
            frequency_penalty=-2.0,
            presence_penalty=2.0,
            logprobs=20,
            n=64,
            logit_bias={0: -100.0, 99: 100.0},
            stop=("x" * 256,) * 16,
            stop_tokens=(0, 99),
        ),
        100,
    )


@settings(max_examples=300, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
    pieces=st.lists(st.text("abc", max_size=5), max_size=8),
)
def test_stop_strings_are_the_cores(stops: list[str], pieces: list[str]) -> None:
    theirs, own = text_core.StopMatcher(*stops), StopStrings(stops)
    for piece in pieces:
        assert own.push(piece) == theirs.push(piece).decode()
        assert own.stopped == theirs.stopped
        if own.stopped:
            return
    assert own.flush() == theirs.flush().decode()
