"""Parity: does an artefact compute what its program computes?

Every measure is normalised by the expected output, because an absolute tolerance says nothing: outputs of 1e-9, which
random weights give, are within 1e-5 of anything small.

    relative error   max|a − b| / max|b|         the worst element, on the output's own scale
    cosine           ⟨a, b⟩ / (‖a‖ ‖b‖)          the direction
    SQNR             10 log₁₀(‖b‖² / ‖a − b‖²)   signal to quantisation noise, in dB
    off by N         round(max|a − b| / step)    in quantisation steps, where the output is quantised

with a the artefact's output and b the golden's. Integers and booleans must be equal: an index that is off by one is
wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edgec.errors import ParityError, Reason

Arrays = dict[str, np.ndarray]

# What stands for ±∞ dB, so that reports stay valid JSON. float64 itself ends at some 313 dB.
EXACT_DB = 300.0


@dataclass(frozen=True)
class Row:
    """One output of one step."""

    output: str
    step: int
    cosine: float
    sqnr_db: float
    relative_error: float
    off_by_n: int | None
    max_abs_error: float

    @property
    def equal(self) -> bool:
        return self.max_abs_error == 0.0


@dataclass(frozen=True)
class Parity:
    """The worst of every measure over all outputs and steps; `worst` is the row with the greatest relative error.

    `off_by_n` is None when no output is quantised.
    """

    cosine: float
    sqnr_db: float
    relative_error: float
    off_by_n: int | None
    worst: Row
    rows: tuple[Row, ...]

    @property
    def equal(self) -> bool:
        return all(row.equal for row in self.rows)


def compare(
    actual: Sequence[Arrays],
    expected: Sequence[Arrays],
    steps: Mapping[str, float],
    *,
    may_be_absent: Collection[str] = (),
) -> Parity:
    """Compare an artefact's outputs with the golden's, step by step.

    Args:
        actual: outputs by name, one dict a step, any float, integer or boolean dtype.
        expected: the same from the golden. Outputs that only `actual` has are not looked at.
        steps: the quantisation step of each quantised output, by output name.
        may_be_absent: outputs that `actual` may leave out: the state outputs of an engine that keeps its state itself.

    Raises:
        ParityError: another number of steps, a missing output, another shape, NaN or infinity on one side only, or
            nothing to compare. A comparison of nothing must never pass.
    """
    if len(actual) != len(expected):
        raise ParityError(f"the artefact gave {len(actual)} steps of outputs, the golden has {len(expected)}")
    rows: list[Row] = []
    for index, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
        for name, b in wanted.items():
            if name not in got:
                if name in may_be_absent:
                    continue
                raise ParityError(
                    f"step {index}: the artefact has no output `{name}`",
                    hint=f"it gave: {', '.join(sorted(got)) or 'nothing'}",
                )
            rows.append(_compare_output(name, index, got[name], b, steps.get(name)))
    if not rows:
        raise ParityError("nothing was compared: the recording has no outputs", reason=Reason.UNPROVEN)
    counted = [row.off_by_n for row in rows if row.off_by_n is not None]
    return Parity(
        cosine=min(row.cosine for row in rows),
        sqnr_db=min(row.sqnr_db for row in rows),
        relative_error=max(row.relative_error for row in rows),
        off_by_n=max(counted) if counted else None,
        worst=max(rows, key=lambda row: (row.relative_error, -row.cosine)),
        rows=tuple(rows),
    )


def _compare_output(name: str, index: int, got: np.ndarray, wanted: np.ndarray, step: float | None) -> Row:
    a, b = np.asarray(got), np.asarray(wanted)
    where = f"output `{name}` of step {index}"
    if a.shape != b.shape:
        raise ParityError(f"{where} has shape {list(a.shape)}, the golden {list(b.shape)}")
    if b.dtype.kind in "iub":
        return _compare_integers(name, index, a, b)
    if a.dtype.kind in "iub":
        raise ParityError(f"{where} is {a.dtype}, the golden is {b.dtype}", hint="dequantise at the runner's edge")
    # float64: the sums below run over up to 1e8 elements, and float16 overflows when squared.
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    a, b = _finite(a, b, where)
    error = np.abs(a - b)
    worst = float(error.max(initial=0.0))
    off_by = None if step is None else round(worst / step)
    if worst == 0.0:
        return Row(name, index, 1.0, EXACT_DB, 0.0, off_by, 0.0)
    # Scaled by the greatest element first: squares of 1e-200 would be zero, and then anything is equal.
    scale = float(np.abs(b).max())
    if scale == 0.0:
        # The golden says zero, the artefact doesn't; there is no scale on which that is a little.
        return Row(name, index, 0.0, -EXACT_DB, 1.0, off_by, worst)
    signal = float(np.vdot(b / scale, b / scale))
    noise = float(np.vdot(error / scale, error / scale))
    sqnr = 10.0 * np.log10(signal / noise) if noise > 0.0 else EXACT_DB
    sqnr = float(np.clip(sqnr, -EXACT_DB, EXACT_DB))
    return Row(name, index, cosine(a, b), sqnr, worst / scale, off_by, worst)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Cosine of two flattened float arrays of one shape, in [−1, 1]: 0 when exactly one is zero, 1 when both are."""
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    top_a, top_b = float(np.abs(a).max(initial=0.0)), float(np.abs(b).max(initial=0.0))
    if top_a == 0.0 or top_b == 0.0:
        return 1.0 if top_a == top_b else 0.0
    a, b = a / top_a, b / top_b
    value = float(np.vdot(a, b)) / (float(np.linalg.norm(a)) * float(np.linalg.norm(b)))
    return min(1.0, max(-1.0, value))


def _compare_integers(name: str, index: int, a: np.ndarray, b: np.ndarray) -> Row:
    """All or nothing: a wrong index is as wrong when it is near. `off_by_n` still says how far."""
    if np.array_equal(a, b):
        return Row(name, index, 1.0, EXACT_DB, 0.0, 0, 0.0)
    distance = float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max())
    return Row(name, index, 0.0, -EXACT_DB, 1.0, int(min(distance, 2.0**53)), distance)


def _finite(a: np.ndarray, b: np.ndarray, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Leave out elements that are the same infinity on both sides (masked logits); refuse any other non-number."""
    if np.isnan(b).any():
        raise ParityError(f"{where} is NaN in the golden itself", reason=Reason.NOT_FINITE)
    bad = np.isnan(a) | (np.isinf(a) & (a != b))
    if bad.any():
        raise ParityError(
            f"{where}: {int(bad.sum())} of {bad.size} values are NaN or infinite where the golden is finite",
            reason=Reason.NOT_FINITE,
        )
    lost = np.isinf(b) & (a != b)
    if lost.any():
        raise ParityError(
            f"{where}: {int(lost.sum())} of {lost.size} values are finite where the golden is infinite",
            hint="a constant that stands for minus infinity was clipped by the converter",
            reason=Reason.NOT_FINITE,
        )
    keep = ~np.isinf(b)
    return (a, b) if keep.all() else (a[keep], b[keep])
