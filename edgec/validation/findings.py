"""What a check gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Result = Literal["pass", "fail", "unproven", "reported"]


@dataclass(frozen=True)
class Finding:
    """One check's number, its limit, and what that means. `reported`: a number without a limit.

    Attributes:
        check: a name of `options.CheckName`.
        value: what was measured; None when it could not be.
        limit: what `value` may be at most (at least, where `least`); None for a number that is only reported.
        message: one line for people, without the numbers' repetition.
        reference: which reference it was held against; empty where the engine is held against itself.
    """

    check: str
    value: float | int | None
    limit: float | int | None
    verdict: Result
    message: str
    reference: str = ""
    least: bool = False


def judged(
    check: str, value: float | int, limit: float | int | None, message: str, reference: str = "", *, least: bool = False
) -> Finding:
    """A finding whose verdict follows from its number. NaN is beyond every limit."""
    if limit is None:
        return Finding(check, value, None, "reported", message, reference, least)
    holds = value >= limit if least else value <= limit
    return Finding(check, value, limit, "pass" if holds else "fail", message, reference, least)


def unproven(check: str, why: str, reference: str = "") -> Finding:
    """A finding of a check that could not be made."""
    return Finding(check, None, None, "unproven", why, reference)
