"""Greedy answers on both sides: how long they are the same, and whether what parts them is more than rounding.

Where two models differ a little, a token whose rival is as likely may turn over, and from there on the answers go
their own ways; so only the first difference of an answer says anything. There the reference prefers its token a by
P(a) − P(b) over the engine's b, and the engine prefers b. With Q the engine's distribution, Q(b) ≥ Q(a), and so

    P(a) − P(b) ≤ (P(a) − Q(a)) + (Q(b) − P(b)) ≤ ‖P − Q‖₁ ≤ √(2 · KL(P ‖ Q))

by Pinsker's inequality (Cover and Thomas, "Elements of Information Theory", lemma 11.6.1). KL is taken as the greatest
at any token of the scored text, but no more than the limit of its 99th percentile. A greater margin is a failure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edgec.runtime.sampling import Sampling
from edgec.validation.findings import Finding, judged, unproven
from edgec.validation.subjects import NotOffered, Reference, Subject


@dataclass(frozen=True)
class Parting:
    """The first difference of one answer. `margin` is P(a) − P(b), None when the reference doesn't say."""

    prompt: int
    at: int
    theirs: int
    ours: int
    margin: float | None
    nats: float | None


def explained(greatest: float | None, limit: float) -> float:
    """The margin of probability that rounding explains: √(2 · KL)."""
    return math.sqrt(2 * min(limit if greatest is None else greatest, limit))


def check_greedy(
    subject: Subject, reference: Reference, prompts: Sequence[Sequence[int]], length: int, bound: float
) -> tuple[Finding, list[Parting]]:
    """The finding's value is the greatest margin at which an answer parts; 0 when none does."""
    sampling = [Sampling(max_tokens=length, ignore_eos=True)] * len(prompts)
    try:
        theirs = reference.generate(prompts, sampling)
        ours = subject.generate(prompts, sampling)
    except NotOffered as why:
        return unproven("greedy", str(why), reference.name), []
    partings = []
    for number, (prompt, a, b) in enumerate(zip(prompts, theirs, ours, strict=True)):
        at = common_prefix(a.tokens, b.tokens)
        if at < min(len(a.tokens), len(b.tokens)):
            partings.append(_parting(reference, number, [*prompt, *a.tokens[:at]], at, a.tokens[at], b.tokens[at]))
        elif len(a.tokens) != len(b.tokens):
            text = f"answer {number} has {len(b.tokens)} tokens, the reference's {len(a.tokens)}"
            return Finding("greedy", None, bound, "fail", text, reference.name), partings
    return _judge(partings, len(prompts), length, bound, reference.name), partings


def _judge(partings: list[Parting], prompts: int, length: int, bound: float, reference: str) -> Finding:
    if not partings:
        return judged("greedy", 0.0, bound, f"{prompts} answers of {length} tokens are the same", reference)
    same = f"{prompts - len(partings)} of {prompts} answers of {length} tokens are the same"
    first = min(p.at for p in partings)
    unknown = [p for p in partings if p.margin is None]
    if unknown:
        p = unknown[0]
        why = f"{same}; answer {p.prompt} parts at token {p.at}, and the reference doesn't say by what margin"
        return unproven("greedy", why, reference)
    worst = max(partings, key=lambda p: p.margin or 0.0)
    assert worst.margin is not None
    text = (
        f"{same}; the first parts at token {first}; the greatest margin there is {worst.margin:.3g} "
        f"({worst.nats:.3g} nats, token {worst.theirs} against {worst.ours})"
    )
    return judged("greedy", worst.margin, bound, text, reference)


def _parting(reference: Reference, number: int, before: list[int], at: int, theirs: int, ours: int) -> Parting:
    """The reference's margin. Of its own token it knows the probability; a rival beyond its top N has none."""
    try:
        scores = reference.score([*before, theirs])
    except NotOffered:
        return Parting(number, at, theirs, ours, None, None)
    a, b = scores.logprob(-1, theirs), scores.logprob(-1, ours)
    if a is None:
        a = float(scores.following[-1])
    if not math.isfinite(a) or not scores.known:
        return Parting(number, at, theirs, ours, None, None)
    rival = math.exp(b) if b is not None else 0.0
    nats = a - b if b is not None else math.inf
    return Parting(number, at, theirs, ours, max(0.0, math.exp(a) - rival), nats)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens are the same at the start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
