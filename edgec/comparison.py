"""Comparisons between numbers of a build, such as `distill.top1 > distill.alone_top1`.

The grammar is one comparison and nothing more; there is no evaluation of code:

    comparison := operand (">" | ">=" | "<" | "<=") operand [("+" | "-") number]
    operand    := name "." metric | number

A name is a stage's or a target's, a metric one of its metrics, or one of `bytes`, `parameters`, `metric`, `drop`,
`compression`, `seconds`, `peak_memory`. Operators stand between spaces, since names may contain "-".
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgec.units import format_number

if TYPE_CHECKING:
    from edgec.gates import Verdict
    from edgec.report.document import BuildDocument, StageRecord, TargetRecord

_OPERATORS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_OPERAND = rf"(?:{_NUMBER}|[A-Za-z_][\w-]*\.[A-Za-z_][\w@/-]*)"
_COMPARISON = re.compile(rf"\s*({_OPERAND})\s+(>=|<=|>|<)\s+({_OPERAND})(?:\s+([+-])\s+({_NUMBER}))?\s*")


@dataclass(frozen=True)
class Comparison:
    """`left op right + offset`; an operand is a number or `(stage or target, metric)`."""

    left: float | tuple[str, str]
    op: str
    right: float | tuple[str, str]
    offset: float

    @property
    def stages(self) -> list[str]:
        """Names of the stages and targets that it refers to."""
        return [side[0] for side in (self.left, self.right) if isinstance(side, tuple)]


def parse_comparison(text: str) -> Comparison:
    """Raises ValueError, which pydantic turns into an error at the recipe's line."""
    found = _COMPARISON.fullmatch(text)
    if found is None:
        raise ValueError(f"not a comparison: {text!r}; write for example `quantize.top1 >= quantize.ptq_top1 - 0.002`")
    left, op, right, sign, offset = found.groups()
    shift = float(offset) if offset else 0.0
    return Comparison(_operand(left), op, _operand(right), -shift if sign == "-" else shift)


def _operand(text: str) -> float | tuple[str, str]:
    if re.fullmatch(_NUMBER, text):
        return float(text)
    name, metric = text.split(".", 1)
    return name, metric


def judge_comparison(text: str, document: BuildDocument) -> Verdict:
    """The verdict; unproven, with the reason, when a number that it names was not measured."""
    from edgec.gates import Verdict

    comparison = parse_comparison(text)
    values = []
    for side in (comparison.left, comparison.right):
        value = side if isinstance(side, float) else _look_up(document, *side)
        if isinstance(value, str):
            # Names are checked against the recipe: what isn't in the build was left out by hand, with --target.
            required = isinstance(side, float) or _find(document, side[0]) is not None
            return Verdict(f"compare.{text}", text, None, "unproven", required, value)
        values.append(value)
    left, right = values
    holds = _OPERATORS[comparison.op](left, right + comparison.offset)
    shown = f"{format_number(left)} {comparison.op} {format_number(right + comparison.offset)}"
    return Verdict(f"compare.{text}", text, shown, "pass" if holds else "fail")


def _find(document: BuildDocument, name: str) -> StageRecord | TargetRecord | None:
    return document.targets.get(name) or document.stage(name)


def _look_up(document: BuildDocument, name: str, metric: str) -> float | str:
    """The number, or why there is none."""
    entry = _find(document, name)
    if entry is None:
        return f"`{name}` was left out of this build with --target"
    if metric in entry.metrics:
        return entry.metrics[metric]
    fields = ("bytes", "parameters", "metric", "drop", "compression", "seconds", "peak_memory")
    value = getattr(entry, metric, None) if metric in fields else None
    if value is None:
        known = ", ".join(sorted(entry.metrics)) or "no metrics"
        return f"`{name}` has no `{metric}`; it has: {known}"
    return float(value)
