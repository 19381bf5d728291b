"""Run two models on the same inputs and find the first tensor at which they part.

Both sides run every step of a recording (or one step of random inputs), each carrying its own state. At the first step
whose outputs differ by more than the limits, the intermediate tensors of both are paired (diff_match.py), and the walk
from the differing outputs back towards the inputs ends at the operation that was given equal tensors and made
different ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from edgec.diff_match import ALIKE, Limits, Pair, Trace, compare_tensors, first_parting, laid_out, layouts, match
from edgec.diff_subject import Subject, random_inputs
from edgec.errors import UsageError
from edgec.golden import Step, zero_state
from edgec.model import Signature

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Parting:
    """Where two models part: at `pair`, made by operations `op_a` and `op_b` from tensors that agree."""

    step: int
    signature: str
    pair: Pair
    op_a: str
    op_b: str
    agreeing: tuple[Pair, ...]


@dataclass(frozen=True)
class Difference:
    """The result. `outputs` are the worst of each output over all steps, `pairs` all tensors of the last step."""

    steps: int
    outputs: tuple[Pair, ...]
    pairs: tuple[Pair, ...]
    alone_a: int
    alone_b: int
    parting: Parting | None
    limits: Limits
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return self.parting is None

    def to_dict(self) -> dict[str, Any]:
        """What `edgec diff --json` prints."""
        parting = self.parting
        return {
            "equal": self.equal,
            "steps": self.steps,
            "limits": {"relative_error": self.limits.relative_error, "off_by": self.limits.off_by},
            "outputs": [_pair(p) for p in self.outputs],
            "parting": None
            if parting is None
            else {
                "step": parting.step,
                "signature": parting.signature,
                **_pair(parting.pair),
                "op_a": parting.op_a,
                "op_b": parting.op_b,
                "computed_from": [_pair(p) for p in parting.agreeing],
            },
            "tensors": {
                "paired": len(self.pairs),
                "differing": sum(not self.limits.holds(p) for p in self.pairs),
                "only_a": self.alone_a,
                "only_b": self.alone_b,
            },
            "pairs": [_pair(p) for p in self.pairs],
            "notes": list(self.notes),
        }


def _pair(pair: Pair) -> dict[str, Any]:
    row = pair.row
    return {
        "a": pair.a,
        "b": pair.b,
        "how": pair.how,
        "transposed": pair.transposed,
        "relative_error": row.relative_error if row else None,
        "cosine": row.cosine if row else None,
        "sqnr_db": row.sqnr_db if row else None,
        "off_by_n": row.off_by_n if row else None,
        "fault": pair.fault.strip(),
    }


def diff(
    a: Subject, b: Subject, steps: list[Step] | None, *, seed: int = 0, limits: Limits | None = None
) -> Difference:
    """Compare two subjects.

    Args:
        steps: a recording's; None draws one step per signature of `a` from `seed`.
        limits: what counts as equal.

    Raises:
        UsageError: the two have no signature, or no inputs or outputs, in common.
        ConversionError: one of them can't be run on these inputs.
    """
    limits = limits or Limits()
    if steps is None:
        shared = [s for s in a.signatures if any(t.name == s.name for t in b.signatures)]
        steps = [Step(s.name, random_inputs(s, seed)) for s in shared or a.signatures[:1]]
    if not steps:
        raise UsageError("there is nothing to run: the recording has no steps")
    notes: list[str] = []
    side_a, side_b = _Side(a, notes), _Side(b, notes)
    worst: dict[tuple[str, str], Pair] = {}
    pairs: list[Pair] = []
    traces: tuple[Trace, Trace] | None = None
    parting = None
    for i, step in enumerate(steps):
        traces = left, right = side_a.run(step), side_b.run(step)
        shared_outputs = _pair_outputs(side_a.last, side_b.last, left, right)
        pairs = match(left, right, shared_outputs, limits)
        for pair in pairs:
            key = (pair.a, pair.b)
            if pair.how == "output" and _worse(pair, worst.get(key)):
                worst[key] = pair
        if not all(limits.holds(p) for p in pairs if p.how == "output"):
            found, agreeing = first_parting(left, pairs, limits.holds)
            assert found is not None
            ops = left.ops.get(found.a, ""), right.ops.get(found.b, "")
            parting = Parting(i, step.signature, found, *ops, tuple(agreeing))
            break
    assert traces is not None
    alone = [len(t.tensors) - len(pairs) for t in traces]
    return Difference(i + 1, tuple(worst.values()), tuple(pairs), alone[0], alone[1], parting, limits, tuple(notes))


def _worse(pair: Pair, than: Pair | None) -> bool:
    if than is None or pair.row is None:
        return True
    return than.row is not None and pair.row.relative_error > than.row.relative_error


class _Side:
    """One subject with its state."""

    def __init__(self, subject: Subject, notes: list[str]) -> None:
        self.subject, self.notes = subject, notes
        self.state: Arrays = {}
        self.last: Signature = subject.signatures[0]
        subject.runner.reset()

    def run(self, step: Step) -> Trace:
        signature = self.last = self.subject.signature(step.signature)
        stateful = self.subject.runner.stateful
        if signature.state and not stateful:
            self.state = self.state or zero_state(signature)
        trace = self.subject.trace(signature, {**self._feeds(signature, step.inputs), **self.state})
        if signature.state and not stateful:
            self.state = {name: trace.tensors[trace.outputs[out]] for name, out in signature.state}
        return trace

    def _feeds(self, signature: Signature, inputs: Arrays) -> Arrays:
        """The step's inputs under this side's names and layouts: by name, else in order."""
        wanted = [t for t in signature.inputs if t.name not in signature.state_inputs]
        unnamed = [n for n in inputs if n not in {t.name for t in wanted}]
        feeds: Arrays = {}
        for spec in wanted:
            if spec.name in inputs:
                value = inputs[spec.name]
            elif unnamed:
                value = inputs[unnamed.pop(0)]
            else:
                value = np.zeros(tuple(d if isinstance(d, int) else 1 for d in spec.shape), spec.dtype)
                self._note(f"{self.subject.label}: input `{spec.name}` is not among those given: zeros")
            feeds[spec.name] = self._laid_out(value, spec.name, spec.shape).astype(_numpy(spec.dtype), copy=False)
        return feeds

    def _laid_out(self, value: np.ndarray, name: str, shape: tuple[int | str, ...]) -> np.ndarray:
        fits = len(shape) == value.ndim and all(
            d == v or isinstance(d, str) for d, v in zip(shape, value.shape, strict=True)
        )
        if fits:
            return value
        sizes = tuple(d if isinstance(d, int) else 1 for d in shape)
        ways = layouts(sizes, value.shape)
        if not ways:
            raise UsageError(
                f"{self.subject.label}: input `{name}` has shape {list(shape)}, the one given {list(value.shape)}",
                hint="compare models that take the same inputs, or give a --recording",
            )
        axes = ways[-1]  # a permutation where there is one: channels first against channels last
        self._note(f"{self.subject.label}: input `{name}` is laid out as {list(sizes)}")
        return np.ascontiguousarray(laid_out(value, sizes, axes))

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _numpy(dtype: str) -> np.dtype[Any]:
    return np.dtype(np.float32 if dtype == "bfloat16" else dtype)


def _pair_outputs(a: Signature, b: Signature, left: Trace, right: Trace) -> list[tuple[str, str]]:
    """Outputs by name; the others with the most alike of their size, in order when none is. State that an engine keeps
    to itself is left out."""
    mine = [o.name for o in a.outputs if o.name in left.outputs]
    theirs = [o.name for o in b.outputs if o.name in right.outputs]
    pairs = [(n, n) for n in mine if n in theirs]
    rest = []
    for i, name in enumerate(n for n in mine if n not in theirs):
        for j, other in enumerate(n for n in theirs if n not in mine):
            x, y = left.tensors[left.outputs[name]], right.tensors[right.outputs[other]]
            if x.size == y.size:
                row = compare_tensors(name, other, "output", x, y, None).row
                rest.append((-row.cosine if row and row.cosine > ALIKE else 0.0, abs(i - j), name, other))
    while rest:
        _, _, name, other = min(rest)
        pairs.append((name, other))
        rest = [r for r in rest if r[2] != name and r[3] != other]
    if not pairs:
        raise UsageError(
            f"the two have no output in common: {', '.join(mine) or 'none'} against {', '.join(theirs) or 'none'}",
            hint="`edgec inspect` shows the outputs of each",
        )
    return pairs
