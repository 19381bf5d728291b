"""The sampler against its own description, written out again in NumPy; random numbers; what it refuses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgec.runtime.abi import Status
from edgec.runtime.failures import EngineError
from edgec.runtime.sampling import Sampling
from tests.runtime.text_core import ACCEPT, DRAFT, RESIDUAL, TOKEN, Row, check_sampling, noise, philox, uniform

PLAIN = Sampling(temperature=1.0)
UNDERFLOW = -87.33654  # exponents below it are weights of exactly 0


def processed(row: Row, sampling: Sampling) -> tuple[np.ndarray, float]:
    """Steps 2 to 8 of native/src/sampler.h in double precision, by full sorts; and how close the nearest of its
    decisions was, in probability."""
    z = row.logits.astype(np.float32).astype(np.float64)
    for token, bias in sampling.logit_bias.items():
        z[token] += bias
    for token in set(row.prompt) | set(row.answer):
        r = np.float64(np.float32(sampling.repetition_penalty))
        z[token] = z[token] / r if z[token] > 0 else z[token] * r
    for token in set(row.answer):
        z[token] -= np.float32(sampling.frequency_penalty) * list(row.answer).count(token)
        z[token] -= np.float32(sampling.presence_penalty)
    z = z.astype(np.float32).astype(np.float64)
    order = np.lexsort((np.arange(len(z)), -z))  # descending; equal ones by id
    p = np.zeros(len(z))
    if sampling.temperature == 0:
        p[order[0]] = 1
        return p, 1.0
    exponents = (z - z.max()) / np.float64(np.float32(sampling.temperature))
    w = np.where(exponents < UNDERFLOW, 0, np.exp(exponents))
    if 0 < sampling.top_k < len(z):
        w[order[sampling.top_k :]] = 0
    margin = float(np.abs(exponents - UNDERFLOW).min())
    if sampling.top_p < 1:
        before = (np.cumsum(w[order]) - w[order]) / w.sum()
        margin = min(margin, float(np.abs(before - np.float32(sampling.top_p)).min()))
        w[order[before >= np.float32(sampling.top_p)]] = 0
    if sampling.min_p > 0:
        margin = min(margin, float(np.abs(w - np.float32(sampling.min_p)).min()))
        w[w < np.float32(sampling.min_p)] = 0
    return w / w.sum(), margin


def dense(found: dict[int, float], vocab: int) -> np.ndarray:
    p = np.zeros(vocab)
    p[list(found)] = list(found.values())
    return p


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([0, 1, 2, 7, 50, 1000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.2, 0.8]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    logit_bias=st.dictionaries(st.integers(0, 4), st.sampled_from([-100.0, -1.0, 3.0]), max_size=2),
)


@settings(max_examples=400, deadline=None)
@given(
    sampling=SAMPLINGS,
    vocab=st.integers(5, 400),
    seed=st.integers(0, 10**6),
    coarse=st.booleans(),
    prompt=st.lists(st.integers(0, 4), max_size=4),
    answer=st.lists(st.integers(0, 4), max_size=4),
)
def test_the_processed_distribution_is_as_described(
    sampling: Sampling, vocab: int, seed: int, coarse: bool, prompt: list[int], answer: list[int]
) -> None:
    logits = np.random.default_rng(seed).normal(0, 4, vocab).astype(np.float32)
    if coarse:
        logits = np.round(logits)  # many ties
    row = Row(logits, prompt, answer)
    wanted, margin = processed(row, sampling)
    found = dense(row.probabilities(sampling), vocab)
    if margin > 2e-5:  # else float32 may decide the other way
        assert np.array_equal(found > 0, wanted > 0)
    kept = (found > 0) & (wanted > 0)
    assert found.sum() == pytest.approx(1, abs=1e-12)
    if margin > 2e-5:
        assert np.allclose(found[kept], wanted[kept], rtol=2e-5, atol=1e-30)


@settings(max_examples=200, deadline=None)
@given(sampling=SAMPLINGS, vocab=st.integers(5, 600), seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**31))
def test_a_token_wins_the_race(sampling: Sampling, vocab: int, seed: int, position: int) -> None:
    row = Row(np.random.default_rng(seed % 997).normal(0, 3, vocab), seed=seed, sequence=2, position=position)
    times = {token: noise(seed, 2, position, token) / p for token, p in row.probabilities(sampling).items()}
    assert times[row.sample(sampling).token] <= min(times.values()) * (1 + 1e-9)


def chi_square(tokens: Sequence[int], p: np.ndarray) -> float:
    """In standard deviations of a chi-square with that many degrees of freedom, about."""
    counts = np.bincount(tokens, minlength=len(p))
    assert counts[p == 0].sum() == 0
    expected = p[p > 0] * len(tokens)
    statistic = ((counts[p > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    return float((statistic - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize(
    "sampling",
    [
        PLAIN,
        Sampling(temperature=0.7, top_k=8),
        Sampling(temperature=1.3, top_p=0.8),
        Sampling(temperature=1, min_p=0.1),
    ],
)
def test_frequencies_are_the_distribution(sampling: Sampling) -> None:
    logits = np.linspace(0, 2, 16)
    p = dense(Row(logits).probabilities(sampling), 16)
    tokens = [Row(logits, seed=7, position=i).sample(sampling).token for i in range(6000)]
    assert chi_square(tokens, p) < 5
    biased = p * np.where(np.arange(16) % 2 == 0, 1.15, 0.85)  # the test notices a distribution that is off by 15 %
    assert chi_square(tokens, biased / biased.sum()) > 5


def test_philox_gives_the_published_numbers() -> None:
    """Random123's kat_vectors."""
    ones = 0xFFFFFFFF
    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox([ones] * 4, [ones] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_uniform_numbers_are_as_the_header_says() -> None:
    """What the reference server has to do to draw the same ones."""
    for seed, sequence, position, draw in [(0, 0, 0, TOKEN), (2**63 + 12345, 3, 70000, RESIDUAL), (9, 0, 2**31, DRAFT)]:
        r0, r1, _, _ = philox([sequence, position, draw, 0], [seed & 0xFFFFFFFF, seed >> 32])
        assert uniform(seed, sequence, position, draw) == ((r0 >> 5) * 2**26 + (r1 >> 6)) / 2**53


def test_no_two_draws_share_a_number() -> None:
    drawn = {
        uniform(seed, sequence, position, draw)
        for seed in (0, 1, 2**32, 2**63)
        for sequence in range(4)
        for position in range(64)
        for draw in (TOKEN, DRAFT, ACCEPT, RESIDUAL)
    }
    assert len(drawn) == 4 * 4 * 64 * 4
    assert all(0 <= u < 1 for u in drawn)
    assert abs(np.mean(list(drawn)) - 0.5) < 0.01


@pytest.mark.parametrize("top_k", [0, 5])  # with and without the list of candidates
def test_min_p_is_a_share_of_the_likeliest(top_k: int) -> None:
    logits = np.array([0.0, math.log(0.5) + 1e-4, math.log(0.5) - 1e-4, -1.0, -3.0, -4.0])
    assert list(Row(logits).probabilities(Sampling(temperature=1.0, min_p=0.5, top_k=top_k))) == [0, 1]


def test_greedy_is_the_lowest_of_equal_tokens() -> None:
    assert Row(np.array([1.0, 5.0, 5.0, 2.0])).sample(Sampling()).token == 1


def test_logprobs_are_the_models_own() -> None:
    """Before bias, penalties, temperature and truncation."""
    logits = np.random.default_rng(3).normal(0, 5, 1000).astype(np.float32)
    sampling = Sampling(
        temperature=0.5, top_k=3, repetition_penalty=1.5, logit_bias={7: 60.0}, logprobs=4, presence_penalty=2.0
    )
    sampled = Row(logits, prompt=[1, 2], answer=[3]).sample(sampling)
    exact = logits.astype(np.float64)
    exact = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    assert sampled.token == 7
    assert sampled.logprob == pytest.approx(exact[7], abs=1e-5)
    assert [t for t, _ in sampled.top] == list(np.argsort(-exact, kind="stable")[:4])
    assert [p for _, p in sampled.top] == pytest.approx([exact[t] for t, _ in sampled.top], abs=1e-5)
    assert math.isnan(Row(logits).sample(PLAIN).logprob)


def test_alternatives_that_are_equal_stand_by_token() -> None:
    sampled = Row(np.array([0.0, 1.0, 1.0, 0.0, 1.0])).sample(Sampling(logprobs=4))
    assert [t for t, _ in sampled.top] == [1, 2, 4, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sampling", [Sampling(), PLAIN, Sampling(logprobs=2)])
def test_logits_that_are_no_numbers_give_no_token(bad: float, sampling: Sampling) -> None:
    logits = np.zeros(333)
    logits[-1] = bad
    assert Row(logits).sample(sampling).bad_logits
    assert Row(logits).probabilities(sampling) == {}


def test_extreme_logits_are_fine() -> None:
    logits = np.array([3e38, -3e38, 0.0, 3e38], dtype=np.float32)
    assert Row(logits).sample(Sampling()).token == 0
    assert Row(logits).probabilities(PLAIN) == {0: 0.5, 3: 0.5}
    assert Row(np.array([1.0, 0.0])).probabilities(Sampling(temperature=1e-30)) == {0: 1.0}


REFUSED: dict[str, Any] = {
    "max_tokens": [-1],
    "temperature": [-0.1, 101.0],
    "top_k": [-1],
    "top_p": [0.0, -1.0, 1.001],
    "min_p": [-0.1, 1.0],
    "repetition_penalty": [0.0, -1.0, 1000.0],
    "frequency_penalty": [-2.1, 2.1],
    "presence_penalty": [-2.1, 2.1],
    "logprobs": [21],
    "n": [0, -1, 65, 2],  # 2 at temperature 0: the same answer twice
    "logit_bias": [{-1: 0.0}, {100: 0.0}, {0: 101.0}],
    "stop": [("x",) * 17, ("x" * 257,)],
    "stop_tokens": [(-1,), (100,)],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in REFUSED.items() for v in values])
def test_what_is_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
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
