"""Which tensor of one trace is which of another, and where the two part. NumPy only; engines are not known here.

Tensors are paired by name where names and sizes agree; then by content, whatever the layout (NHWC is NCHW transposed)
and the shape (a reshape keeps the order); then, for what is left, by the closest content between neighbours that are
paired. The last kind is what a tensor that went wrong looks like.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from edgec.errors import ParityError
from edgec.parity import Row, compare

Arrays = dict[str, np.ndarray]

ALIKE = 0.9  # cosine from which two tensors are taken for the same, though not equal
LEAST = 8  # tensors with fewer elements, and constant ones, look alike by accident


@dataclass(frozen=True)
class Trace:
    """One run of one signature.

    Attributes:
        tensors: what was computed, in order, floats where integers stand for floats.
        outputs: which of `tensors` each output of the signature is.
        inputs_of: the tensors that each tensor was computed from; empty when the engine doesn't say.
        ops: the kind of the operation behind each tensor.
        steps: the quantisation step of tensors that have one.
    """

    tensors: Arrays
    outputs: dict[str, str]
    inputs_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ops: Mapping[str, str] = field(default_factory=dict)
    steps: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Pair:
    """Tensor `a` of one side and `b` of the other. `how` is "output", "name", "content" or "place".

    `row` is None, and `fault` says why, when they can't be compared (NaN on one side, another shape).
    """

    a: str
    b: str
    how: str
    row: Row | None
    fault: str = ""
    transposed: bool = False


@dataclass(frozen=True)
class Limits:
    """What counts as equal: a relative error up to `relative_error`, or up to `off_by` quantisation steps."""

    relative_error: float = 1e-3
    off_by: int = 1

    def holds(self, pair: Pair) -> bool:
        if pair.row is None:
            return False
        near = pair.row.off_by_n is not None and pair.row.max_abs_error > 0 and pair.row.off_by_n <= self.off_by
        # Integers count their distance in off_by_n too, and a wrong index is wrong at any distance.
        near = near and pair.row.sqnr_db > -300.0
        return pair.row.relative_error <= self.relative_error or near


def layouts(a: tuple[int, ...], b: tuple[int, ...]) -> list[tuple[int, ...] | None]:
    """How an array of shape `b` can be laid out as one of shape `a`: None for a reshape, or a permutation of its axes.

    Axes of size 1 are ignored, so that (1, 8, 8, 3) → (3, 8, 8) is a permutation. At most 4 axes are permuted.
    """
    if math.prod(a) != math.prod(b):
        return []
    found: list[tuple[int, ...] | None] = [None]
    big_a = tuple(d for d in a if d != 1)
    axes = [i for i, d in enumerate(b) if d != 1]
    ones = [i for i, d in enumerate(b) if d == 1]
    if 1 < len(axes) <= 4 and len(axes) == len(big_a):
        for order in itertools.permutations(axes):
            if order != tuple(axes) and tuple(b[i] for i in order) == big_a:
                found.append((*ones, *order))
    return found


def laid_out(b: np.ndarray, shape: tuple[int, ...], axes: tuple[int, ...] | None) -> np.ndarray:
    return (b if axes is None else b.transpose(axes)).reshape(shape)


def compare_tensors(name: str, other: str, how: str, a: np.ndarray, b: np.ndarray, step: float | None) -> Pair:
    """Compare under the layout that makes them most alike."""
    best: Pair | None = None
    for axes in layouts(a.shape, b.shape):
        arranged = laid_out(b, a.shape, axes)
        if a.dtype.kind == "f" or b.dtype.kind == "f":
            arranged, left = arranged.astype(np.float64), a.astype(np.float64)
        else:
            left = a
        try:
            parity = compare([{name: arranged}], [{name: left}], {} if step is None else {name: step})
            pair = Pair(name, other, how, parity.worst, transposed=axes is not None)
        except ParityError as error:
            pair = Pair(name, other, how, None, fault=error.message.removeprefix(f"output `{name}` of step 0"))
        if best is None or (pair.row is not None and (best.row is None or pair.row.cosine > best.row.cosine)):
            best = pair
        if best.row is not None and best.row.equal:
            break
    return best or Pair(name, other, how, None, fault=f" has shape {list(a.shape)}, the other {list(b.shape)}")


def match(a: Trace, b: Trace, outputs: Iterable[tuple[str, str]], limits: Limits) -> list[Pair]:
    """Pair the tensors of two traces; in the order in which `a` computed them.

    Args:
        outputs: which output of `a` is which of `b`, by the signature's names.
        limits: what counts as equal.
    """
    matcher = _Matcher(a, b, limits)
    for left, right in outputs:
        matcher.pair(a.outputs[left], b.outputs[right], "output")
    matcher.by_name()
    matcher.by_content()
    matcher.by_place()
    order = {name: i for i, name in enumerate(a.tensors)}
    return sorted(matcher.pairs, key=lambda p: order[p.a])


class _Matcher:
    def __init__(self, a: Trace, b: Trace, limits: Limits) -> None:
        self.a, self.b, self.limits = a, b, limits
        self.pairs: list[Pair] = []
        self.left = {n: i for i, n in enumerate(a.tensors)}
        self.right = {n: i for i, n in enumerate(b.tensors)}
        self.order_a, self.order_b = dict(self.left), dict(self.right)
        self._prints: dict[tuple[str, str], tuple[float, ...] | None] = {}

    def pair(self, name: str, other: str, how: str) -> None:
        self.accept(self.compared(name, other, how))

    def compared(self, name: str, other: str, how: str) -> Pair:
        step = self.a.steps.get(name, self.b.steps.get(other))
        return compare_tensors(name, other, how, self.a.tensors[name], self.b.tensors[other], step)

    def accept(self, pair: Pair) -> None:
        self.pairs.append(pair)
        self.left.pop(pair.a, None)
        self.right.pop(pair.b, None)

    def by_name(self) -> None:
        """Names that both sides have mean the same tensor, unless sizes or contents say that they don't."""
        plain = {_plain(n): n for n in self.right}
        for name in list(self.left):
            other = plain.get(_plain(name))
            if other in self.right and self.a.tensors[name].size == self.b.tensors[other].size:
                pair = self.compared(name, other, "name")
                if name == other or self.limits.holds(pair):
                    self.accept(pair)

    def by_content(self) -> None:
        """Equal tensors first, then alike ones, the most alike first."""
        for least, how in ((None, "content"), (ALIKE, "content")):
            found: list[tuple[float, int, Pair]] = []
            for name in list(self.left):
                candidates = [self.compared(name, o, how) for o in self._candidates(name, loose=least is not None)]
                if least is None:
                    if good := [p for p in candidates if self.limits.holds(p)]:
                        self.accept(min(good, key=lambda p: self._away(p)))
                else:
                    found += [(p.row.cosine, -self._away(p), p) for p in candidates if p.row and p.row.cosine > least]
            for _, _, pair in sorted(found, key=lambda f: f[:2], reverse=True):
                if pair.a in self.left and pair.b in self.right:
                    self.accept(pair)

    def by_place(self) -> None:
        """What is left, between paired neighbours: same size, the most alike first."""
        anchors = sorted((self.order_a[p.a], self.order_b[p.b]) for p in self.pairs if p.how != "output")
        found: list[tuple[float, int, Pair]] = []
        for name, at in self.left.items():
            low = max((j for i, j in anchors if i < at), default=-1)
            high = min((j for i, j in anchors if i > at), default=len(self.order_b))
            for other in self._same_size(name):
                if low < self.order_b[other] < max(high, low + 2):
                    pair = self.compared(name, other, "place")
                    found.append((pair.row.cosine if pair.row else 0.0, -self._away(pair), pair))
        for _, _, pair in sorted(found, key=lambda f: f[:2], reverse=True):
            if pair.a in self.left and pair.b in self.right:
                self.accept(pair)

    def _away(self, pair: Pair) -> int:
        """How far apart the two stand in their orders, in thousandths of the whole."""
        a = self.order_a[pair.a] / max(1, len(self.order_a))
        b = self.order_b[pair.b] / max(1, len(self.order_b))
        return int(1000 * abs(a - b))

    def _same_size(self, name: str) -> list[str]:
        array = self.a.tensors[name]
        if array.dtype.kind != "f" or array.size < LEAST:
            return []
        return [o for o in self.right if self.b.tensors[o].dtype.kind == "f" and self.b.tensors[o].size == array.size]

    def _candidates(self, name: str, *, loose: bool) -> list[str]:
        """Tensors whose spread and extremes, which no layout changes, are near enough to be worth comparing."""
        mine = self._print("a", name, self.a.tensors[name])
        if mine is None:
            return []
        slack = 0.3 if loose else 0.02 + 2 * self.limits.relative_error
        found = []
        for other in self._same_size(name):
            theirs = self._print("b", other, self.b.tensors[other])
            if theirs is not None and all(abs(x - y) <= slack * mine[0] for x, y in zip(mine, theirs, strict=True)):
                found.append(other)
        return found

    def _print(self, side: str, name: str, array: np.ndarray) -> tuple[float, ...] | None:
        """(greatest magnitude, root mean square, least, greatest), or None for a constant or non-finite tensor."""
        key = (side, name)
        if key not in self._prints:
            self._prints[key] = _fingerprint(array)
        return self._prints[key]


def _fingerprint(array: np.ndarray) -> tuple[float, ...] | None:
    if array.dtype.kind != "f" or array.size < LEAST or not np.isfinite(array).all():
        return None
    least, greatest = float(array.min()), float(array.max())
    if least == greatest:
        return None
    scale = max(abs(least), abs(greatest))
    return scale, scale * float(np.sqrt(np.mean((array.astype(np.float64) / scale) ** 2))), least, greatest


def _plain(name: str) -> str:
    """A tensor's name without what converters add: TFLite joins fused names by `;`, TensorFlow ends them in `:0`."""
    return name.rsplit(";", 1)[-1].removesuffix(":0")


def first_parting(a: Trace, pairs: list[Pair], holds: Callable[[Pair], bool]) -> tuple[Pair | None, list[Pair]]:
    """Walk from the outputs that differ towards the inputs, as far as tensors differ.

    Returns:
        The earliest pair that differs on the way, and the pairs that agree at which the walk stopped: what the first
        differing operation was given. Without edges, each tensor counts as computed from the one before it.
    """
    by_name = {p.a: p for p in pairs}
    names = list(a.tensors)
    order = {n: i for i, n in enumerate(names)}
    before = {n: (names[i - 1],) for i, n in enumerate(names) if i} if not a.inputs_of else a.inputs_of

    def walk(start: Iterable[str]) -> tuple[list[str], list[str]]:
        """`(differing, agreeing)` tensors that can be reached from `start` through tensors that do not agree."""
        stack, seen = list(start), set[str]()
        differing, agreeing = [], []
        while stack:
            name = stack.pop()
            if name in seen:
                continue
            seen.add(name)
            pair = by_name.get(name)
            if pair is not None and holds(pair):
                agreeing.append(name)
                continue
            if pair is not None:
                differing.append(name)
            stack += before.get(name, ())
        return differing, sorted(agreeing, key=lambda n: order[n])

    differing, _ = walk(p.a for p in pairs if p.how == "output" and not holds(p))
    first = min(differing, key=lambda n: order[n], default=None)
    if first is None:
        return None, []
    _, agreeing = walk(before.get(first, ()))
    return by_name[first], [by_name[n] for n in agreeing]
