"""A text's log-probabilities on both sides, every token after the right ones before it (teacher forcing).

    kl           mean over tokens of KL(reference ‖ engine), nats
    kl_p99       its 99th percentile: a fault that shows in few places
    top1         share of tokens whose likeliest successor is the same
    perplexity   the engine's over the reference's, on the same tokens

Each window starts with nothing before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgec.validation.findings import Finding, judged, unproven
from edgec.validation.options import Limits
from edgec.validation.scores import Doubles, Scores, divergence
from edgec.validation.subjects import NotOffered, Reference, Subject


@dataclass
class TextComparison:
    """A subject against one reference, over all tokens of all windows, in order.

    `kl` and `agree` have NaN and False where the reference gave nothing but the following token's log-probability.
    """

    partial: bool = False
    refusal: str = ""
    kl: Doubles = field(default_factory=lambda: np.empty(0))
    agree: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    position: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    ours: Doubles = field(default_factory=lambda: np.empty(0))  # log-probability of the following token
    theirs: Doubles = field(default_factory=lambda: np.empty(0))

    def add(self, reference: Scores, subject: Scores) -> None:
        """Take in a window."""
        known = reference.known
        kl = divergence(reference, subject) if known else np.full(len(subject), np.nan)
        best = reference.best
        self.partial |= known and reference.logits is None
        self.kl = np.concatenate([self.kl, kl])
        self.agree = np.concatenate([self.agree, (best == subject.best) & (best >= 0)])
        self.position = np.concatenate([self.position, np.arange(len(subject))])
        self.ours = np.concatenate([self.ours, subject.following])
        self.theirs = np.concatenate([self.theirs, reference.following])

    @property
    def has_kl(self) -> bool:
        return len(self.kl) > 0 and bool(np.isfinite(self.kl).all())

    @property
    def summary(self) -> tuple[float, float, float]:
        """Mean KL, its 99th percentile, and the share of tokens with the same likeliest successor."""
        return float(self.kl.mean()), float(np.quantile(self.kl, 0.99)), float(self.agree.mean())

    @property
    def greatest(self) -> float | None:
        """The greatest KL at any token."""
        return float(self.kl.max()) if self.has_kl else None

    @property
    def perplexities(self) -> tuple[float, float] | None:
        """Ours and theirs, over the tokens that the reference has a log-probability for."""
        there = np.isfinite(self.theirs)
        if not there.any():
            return None
        return float(np.exp(-self.ours[there].mean())), float(np.exp(-self.theirs[there].mean()))


def compare_text(
    subject: Subject, references: Sequence[Reference], windows: Sequence[Sequence[int]]
) -> dict[str, TextComparison]:
    """Score every window once on each side; by the references' names. A reference that refuses is left at that."""
    found = {r.name: TextComparison() for r in references}
    for window in windows:
        ours = subject.score(window)
        for reference in references:
            comparison = found[reference.name]
            if comparison.refusal:
                continue
            try:
                comparison.add(reference.score(window), ours)
            except NotOffered as why:
                comparison.refusal = str(why)
    return found


def judge_text(comparison: TextComparison, reference: str, limits: Limits | None) -> list[Finding]:
    """The findings of a comparison; without limits they are only reported."""
    count = len(comparison.ours)
    if comparison.refusal or not count:
        why = comparison.refusal or "there is no text"
        return [unproven(check, why, reference) for check in ("kl", "kl_p99", "top1", "perplexity")]
    found = []
    if comparison.has_kl:
        bound = "; a lower bound: the reference gives its likeliest tokens only" if comparison.partial else ""
        kl, kl_p99, top1 = comparison.summary
        text = f"nats a token over {count:,} tokens{bound}"
        found.append(judged("kl", kl, limits.kl if limits else None, text, reference))
        text = f"99th percentile of the same; the greatest is {comparison.kl.max():.3g}"
        found.append(judged("kl_p99", kl_p99, limits.kl_p99 if limits else None, text, reference))
        text = f"{int((~comparison.agree).sum()):,} of {count:,} tokens have another likeliest successor"
        found.append(judged("top1", top1, limits.top1 if limits else None, text, reference, least=True))
    else:
        why = "the reference gives no alternatives to the tokens of a text"
        found += [unproven(check, why, reference) for check in ("kl", "kl_p99", "top1")]
    if (both := comparison.perplexities) is not None:
        text = f"{both[0]:.4f} against {both[1]:.4f}"
        found.append(judged("perplexity", both[0] / both[1], None, text, reference))
    else:
        found.append(unproven("perplexity", "the reference gives no log-probabilities of a text's tokens", reference))
    return found
