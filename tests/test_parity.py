"""What parity must see, and what it must not be fooled by."""

from __future__ import annotations

import numpy as np
import pytest

from edgec.errors import ParityError, Reason
from edgec.parity import EXACT_DB, compare, cosine

RNG = np.random.default_rng(7)


def outputs(*arrays: np.ndarray) -> list[dict[str, np.ndarray]]:
    return [{"y": a} for a in arrays]


def test_identical_outputs_are_exact_and_finite() -> None:
    y = RNG.normal(size=(3, 5)).astype(np.float32)
    parity = compare(outputs(y), outputs(y.copy()), {"y": 0.1})
    assert (parity.cosine, parity.sqnr_db, parity.relative_error, parity.off_by_n) == (1.0, EXACT_DB, 0.0, 0)
    assert parity.equal


@pytest.mark.parametrize("scale", [1e-9, 1e-30, 1.0, 1e30])
def test_scale_of_the_outputs_does_not_matter(scale: float) -> None:
    """Random weights give outputs of 1e-9, and any absolute tolerance calls anything near those equal."""
    wanted = RNG.normal(size=1000)
    unrelated = RNG.normal(size=1000)
    near = wanted + 1e-3 * RNG.normal(size=1000)
    far = compare(outputs(unrelated * scale), outputs(wanted * scale), {})
    assert np.allclose(unrelated * 1e-9, wanted * 1e-9, atol=1e-8)  # what such a tolerance would have said
    assert far.cosine < 0.2 and far.sqnr_db < 0 and far.relative_error > 0.5
    close = compare(outputs(near * scale), outputs(wanted * scale), {})
    assert close.cosine > 0.999 and 57 < close.sqnr_db < 63 and close.relative_error < 2e-3


def test_measures_follow_their_definitions() -> None:
    b = np.array([3.0, -4.0, 0.0])
    a = np.array([3.0, -4.0, 1.0])
    parity = compare(outputs(a), outputs(b), {"y": 0.25})
    assert parity.relative_error == pytest.approx(1 / 4)
    assert parity.cosine == pytest.approx(25 / (5 * np.sqrt(26)))
    assert parity.sqnr_db == pytest.approx(10 * np.log10(25 / 1))
    assert parity.off_by_n == 4
    assert parity.worst.max_abs_error == 1.0


def test_the_worst_output_and_step_is_named() -> None:
    good = RNG.normal(size=8)
    actual = [{"a": good, "b": good}, {"a": good, "b": good + 0.5}]
    expected = [{"a": good, "b": good}, {"a": good, "b": good}]
    parity = compare(actual, expected, {"b": 0.5})
    assert (parity.worst.output, parity.worst.step) == ("b", 1)
    assert len(parity.rows) == 4 and parity.off_by_n == 1
    assert [r.off_by_n for r in parity.rows] == [None, 0, None, 1]
    bad = parity.worst
    assert (parity.cosine, parity.sqnr_db, parity.relative_error) == (bad.cosine, bad.sqnr_db, bad.relative_error)
    assert parity.sqnr_db < 30 and parity.cosine < 1.0 and not parity.equal


def test_off_by_n_is_none_for_float_outputs() -> None:
    y = RNG.normal(size=4)
    assert compare(outputs(y), outputs(y), {}).off_by_n is None


def test_zeros_equal_only_zeros() -> None:
    zero = np.zeros(4, np.float32)
    assert compare(outputs(zero), outputs(zero), {}).cosine == 1.0
    parity = compare(outputs(zero + 1e-12), outputs(zero), {})
    assert (parity.cosine, parity.relative_error, parity.sqnr_db) == (0.0, 1.0, -EXACT_DB)
    dead = compare(outputs(zero), outputs(RNG.normal(size=4)), {})
    assert dead.cosine == 0.0 and dead.relative_error == 1.0 and dead.sqnr_db == pytest.approx(0.0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_artefact_that_is_not_finite_fails(value: float) -> None:
    y = RNG.normal(size=4)
    broken = y.copy()
    broken[2] = value
    with pytest.raises(ParityError, match="output `y` of step 0: 1 of 4 values") as caught:
        compare(outputs(broken), outputs(y), {})
    assert caught.value.reason == Reason.NOT_FINITE and caught.value.exit_code == 6


def test_a_golden_that_is_nan_proves_nothing() -> None:
    nan = np.array([np.nan])
    with pytest.raises(ParityError, match="NaN in the golden itself"):
        compare(outputs(nan), outputs(nan), {})


def test_masked_logits_may_be_infinite_on_both_sides_only() -> None:
    masked = np.array([-np.inf, 1.0, 2.0])
    assert compare(outputs(masked), outputs(masked), {}).equal
    with pytest.raises(ParityError, match="finite where the golden is infinite"):
        compare(outputs(np.array([-1e9, 1.0, 2.0])), outputs(masked), {})


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.bool_, np.uint8])
def test_integers_must_be_equal(dtype: type) -> None:
    wanted = np.array([50000, 7, 1]).astype(dtype)
    assert compare(outputs(wanted), outputs(wanted), {}).equal
    other = wanted.copy()
    other[1] = 0
    parity = compare(outputs(other), outputs(wanted), {})
    assert parity.cosine == 0.0 and parity.relative_error == 1.0 and parity.off_by_n is not None and parity.off_by_n > 0


def test_float_for_integers_is_not_equal_by_rounding() -> None:
    parity = compare(outputs(np.array([1.4])), outputs(np.array([1])), {})
    assert not parity.equal and parity.cosine == 0.0


def test_half_precision_does_not_overflow() -> None:
    y = np.full(1000, 60000, np.float16)
    assert compare(outputs(y), outputs(y.astype(np.float32)), {}).equal


def test_a_shape_is_named_when_it_differs() -> None:
    with pytest.raises(ParityError, match=r"output `y` of step 0 has shape \[2, 3\], the golden \[3, 2\]"):
        compare(outputs(np.ones((2, 3))), outputs(np.ones((3, 2))), {})


def test_a_missing_output_is_an_error_unless_the_engine_keeps_it() -> None:
    y = np.ones(2)
    expected = [{"y": y, "k_out": y}]
    with pytest.raises(ParityError, match="no output `k_out`"):
        compare(outputs(y), expected, {})
    assert len(compare(outputs(y), expected, {}, may_be_absent={"k_out"}).rows) == 1


@pytest.mark.parametrize("expected", [[], [{}]])
def test_comparing_nothing_never_passes(expected: list[dict[str, np.ndarray]]) -> None:
    with pytest.raises(ParityError, match="nothing was compared"):
        compare([{}] * len(expected), expected, {})


def test_a_missing_step_is_an_error() -> None:
    with pytest.raises(ParityError, match="gave 1 steps of outputs, the golden has 2"):
        compare(outputs(np.ones(2)), outputs(np.ones(2), np.ones(2)), {})


def test_cosine_survives_the_ends_of_the_range() -> None:
    a = np.array([1e-300, 2e-300])
    assert cosine(a, a) == pytest.approx(1.0)
    assert cosine(np.array([1e300, 1e300]), np.array([1e-300, -1e-300])) == pytest.approx(0.0)
    assert cosine(a, -a) == pytest.approx(-1.0)
