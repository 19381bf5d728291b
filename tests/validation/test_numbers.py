"""The arithmetic behind the checks: tails, divergences, intervals, ratios of weights."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from edgec.validation.check_greedy import explained
from edgec.validation.check_sampling import coupling, two_sample_chi_square
from edgec.validation.check_weights import _compare
from edgec.validation.options import EXACT, ValidateOptions
from edgec.validation.scores import Scores, divergence, log_softmax
from edgec.validation.tails import chi_square_tail, poisson_tail


@pytest.mark.parametrize("freedom", [1, 7, 15, 49, 400])
@pytest.mark.parametrize("factor", [0.1, 0.9, 1.0, 1.3, 3.0])
def test_chi_square_tail_is_scipys(freedom: int, factor: float) -> None:
    x = freedom * factor
    assert chi_square_tail(x, freedom) == pytest.approx(stats.chi2.sf(x, freedom), rel=1e-9, abs=1e-300)


@pytest.mark.parametrize(("count", "mean"), [(0, 1.0), (1, 0.01), (20, 21.0), (40, 21.0), (3, 0.0)])
def test_poisson_tail_is_scipys(count: int, mean: float) -> None:
    assert poisson_tail(count, mean) == pytest.approx(stats.poisson.sf(count - 1, mean), rel=1e-6, abs=1e-12)


def scores(seed: int, rows: int = 40, vocab: int = 50) -> tuple[Scores, list[int]]:
    random = np.random.default_rng(seed)
    tokens = random.integers(0, vocab, rows + 1).tolist()
    return Scores.whole(random.standard_normal((rows, vocab)).astype(np.float32) * 2, tokens), tokens


def test_divergence_is_the_sum_over_the_vocabulary() -> None:
    (p, _), (q, _) = scores(1), scores(2)
    assert p.logits is not None and q.logits is not None
    a, b = log_softmax(p.logits), log_softmax(q.logits)
    assert np.allclose(divergence(p, q), (np.exp(a) * (a - b)).sum(-1))
    assert np.allclose(divergence(p, p), 0, atol=1e-12)


def of_the_likeliest(whole: Scores, count: int) -> Scores:
    """What a server would give of them."""
    assert whole.logits is not None
    logprobs = log_softmax(whole.logits)
    ids = np.argsort(-logprobs, -1)[:, :count].astype(np.int32)
    top = np.take_along_axis(logprobs, ids.astype(np.int64), 1).astype(np.float32)
    return Scores(None, ids, top, whole.following)


def test_a_few_likeliest_tokens_give_a_lower_bound_that_more_tokens_raise() -> None:
    (p, _), (q, _) = scores(1), scores(2)
    true = divergence(p, q)
    few, more, all_ = (divergence(of_the_likeliest(p, n), q) for n in (3, 20, 50))
    assert (few <= true + 1e-6).all() and (more <= true + 1e-6).all()
    assert few.mean() < more.mean() <= true.mean() + 1e-6
    assert np.allclose(all_, true, atol=1e-4)


def test_unknown_alternatives_change_nothing() -> None:
    (p, _), (q, _) = scores(1), scores(2)
    top = of_the_likeliest(p, 3)
    ids = np.pad(top.ids, ((0, 0), (0, 2)), constant_values=-1)
    logprobs = np.pad(top.logprobs, ((0, 0), (0, 2)), constant_values=-np.inf).astype(np.float32)
    assert np.allclose(divergence(Scores(None, ids, logprobs, p.following), q), divergence(top, q))


def test_pinskers_bound_holds_and_is_the_lesser_of_the_two() -> None:
    assert explained(0.002, 0.01) == pytest.approx(math.sqrt(0.004))
    assert explained(5.0, 0.01) == explained(None, 0.01) == pytest.approx(math.sqrt(0.02))
    random = np.random.default_rng(0)
    for _ in range(200):  # the best of one against the best of the other, never further apart than the KL explains
        z = random.standard_normal(20)
        p, q = (np.exp(x) / np.exp(x).sum() for x in (z, z + 0.3 * random.standard_normal(20)))
        a, b = p.argmax(), q.argmax()
        assert p[a] - p[b] <= math.sqrt(2 * (p * np.log(p / q)).sum()) + 1e-12


def test_two_samples_of_one_distribution_pass_and_of_two_do_not() -> None:
    random = np.random.default_rng(3)
    weights = random.dirichlet(np.ones(200) * 0.3)
    draw = lambda u: Counter(np.searchsorted(np.cumsum(weights), u).tolist())  # noqa: E731
    a, b = (draw(random.random(500)) for _ in range(2))
    assert chi_square_tail(*two_sample_chi_square(a, b)) > 1e-3
    assert chi_square_tail(*two_sample_chi_square(a, draw(random.random(500) ** 2))) < 1e-6


def test_two_samples_without_a_repeated_token_are_still_compared() -> None:
    random = np.random.default_rng(4)
    a, b = (Counter(random.integers(0, 10**6, 300).tolist()) for _ in range(2))
    low = Counter((random.random(300) ** 2 * 10**6).astype(int).tolist())
    assert two_sample_chi_square(a, b)[1] > 10
    assert chi_square_tail(*two_sample_chi_square(a, b)) > 1e-3
    assert chi_square_tail(*two_sample_chi_square(a, low)) < 1e-4


def test_too_few_samples_say_nothing() -> None:
    assert two_sample_chi_square(Counter([1, 2]), Counter([3])) == (0.0, 0)


def weight(rows: int = 6, columns: int = 40) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    q = random.integers(-127, 128, (rows, columns)).astype(np.int8)
    return q, (random.random(rows) * 0.01 + 0.001).astype(np.float32)


def test_equal_weights_are_no_difference() -> None:
    q, scale = weight()
    assert _compare("w", q, scale, q.astype(np.float32) * scale[:, None]) is None


def test_scales_weights_and_rows_are_told_apart() -> None:
    q, scale = weight()
    right = q.astype(np.float32) * scale[:, None]

    def text(stored: np.ndarray, by: np.ndarray) -> str:
        found = _compare("w", stored, by, right)
        assert found is not None
        return found.text

    assert text(q, scale * np.float32(1.05)) == "w: its scales are 1.05× the reference's"
    one = scale.copy()
    one[2] *= 2
    assert text(q, one) == "w: its scales are 2× the reference's in 1 of 6 rows"
    two = one.copy()
    two[4] *= 3
    assert text(q, two) == "w: its scales are between 2× and 3× the reference's in 2 of 6 rows"
    changed = q.copy()
    changed[1, :3] += 1
    assert text(changed, scale) == "w: 3 of 240 weights are not the reference's"


def test_limits_are_the_recipes_over_the_targets_own() -> None:
    options = ValidateOptions.model_validate({"limits": {"native": {"kl": 0.5}}})
    assert (options.limits_of("native").kl, options.limits_of("native").top1) == (0.5, EXACT["top1"])
    assert options.limits_of("tflite").kl == 0.03


def test_coupling_is_how_often_two_races_have_one_winner() -> None:
    random = np.random.default_rng(3)
    for _ in range(4):
        p, q = (random.dirichlet(np.full(9, 0.6)) for _ in range(2))
        p[2] = q[5] = 0.0
        p, q = p / p.sum(), q / q.sum()
        clocks = random.exponential(size=(40_000, 9))
        with np.errstate(divide="ignore"):
            same = ((clocks / p).argmin(1) == (clocks / q).argmin(1)).mean()
        assert coupling(p, q) == pytest.approx(same, abs=0.01)
        assert coupling(p, p) == pytest.approx(1)
