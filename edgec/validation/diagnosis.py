"""Which way a failure points: weights, attention, or the sampler.

weights     tensors of the bundle that are not the reference's are named, with how they differ
attention   where a text's first position agrees and later ones don't, it is attention, positions, or keys and values:
            the hypotheses are tried, and the one under which the difference vanishes is named
sampler     where the logits agree and sampled tokens don't follow their draws, the chi-square test tells a sampler
            that is biased from one that draws other numbers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from edgec.validation.check_sampling import ALPHA, SamplingEvidence
from edgec.validation.check_text import TextComparison
from edgec.validation.check_weights import Difference
from edgec.validation.findings import Finding
from edgec.validation.options import Limits
from edgec.validation.scores import Scores, divergence

if TYPE_CHECKING:
    from edgec.reference.load import Loaded
    from edgec.validation.subjects import Reference, Subject

_VANISHES = 0.1  # of the KL that is to be explained, at most, under the hypothesis that explains it
_LIKE_ITSELF = 1.5  # times the KL of the reference to itself: means over a window differ by a tenth or two
_TRIED = 96  # positions that hypotheses are tried on


@dataclass(frozen=True)
class Diagnosis:
    """What was found out, in the order in which it is worth reading."""

    lines: tuple[str, ...]


def diagnose(
    subject: Subject,
    limits: Limits,
    findings: Sequence[Finding],
    *,
    text: TextComparison | None,
    weights: Sequence[Difference],
    sampling: SamplingEvidence | None,
    window: Sequence[int],
    model: Loaded | None,
    reference: Reference,
    rounded: bool,
) -> Diagnosis:
    """Explain failed findings.

    Args:
        text: the comparison with the reference that has the limits.
        weights: the bundle's tensors that are not the reference's.
        window: a piece of the text, to try hypotheses on.
        model: the reference's; None where it can't be had.
        reference: the one with the limits.
        rounded: it rounds activations, keys and values.
    """
    failed = {f.check for f in findings if f.verdict == "fail"}
    lines: list[str] = []
    for difference in sorted(weights, key=lambda d: -d.relative)[:3]:
        lines.append(f"weights: {difference.text}")
    if failed & {"kl", "kl_p99", "top1", "greedy"} and text is not None and text.has_kl and not weights:
        lines += _rounding(text, reference, window) or _logits(subject, limits, text, window, model, rounded)
    logits_agree = not failed & {"kl", "kl_p99", "top1"}
    if sampling is not None and failed & {"draws", "sampled", "distribution"}:
        lines += _sampler(sampling, failed, logits_agree)
    if paths := sorted(failed & {"requests", "batching", "chunking", "prefix_cache", "preemption"}):
        lines.append(
            f"scheduler: answers depend on {' and '.join(p.replace('_', ' ') for p in paths)}; look at how rows are "
            "placed into blocks, and at what is shared between sequences"
        )
    return Diagnosis(tuple(lines))


def _rounding(text: TextComparison, reference: Reference, window: Sequence[int]) -> list[str]:
    """Whether the engine is as near to the reference as that is to itself."""
    from edgec.validation.reference_subject import SHAKE, EngineReference

    if not isinstance(reference, EngineReference) or not reference.rounded:
        return []
    shaken = reference.shaken()
    itself = float(divergence(reference.score(window), shaken.score(window)).mean())
    shaken.close()
    ours = float(text.kl.mean())
    if ours > _LIKE_ITSELF * itself:
        return []
    return [
        f"rounding: the engine is no further from the reference (KL {ours:.3g}) than that is from itself when "
        f"embeddings change by {SHAKE:g} ({itself:.3g}): the model is right and a last bit isn't; look at the order of "
        "float sums, at fused multiply-adds, and at which kernels are used"
    ]


def _logits(
    subject: Subject,
    limits: Limits,
    text: TextComparison,
    window: Sequence[int],
    model: Loaded | None,
    rounded: bool,
) -> list[str]:
    """Where in a text the two part, and under which hypothesis they don't."""
    by_position = [float(text.kl[text.position == p].mean()) for p in range(min(64, int(text.position.max()) + 1))]
    first, later = by_position[0], float(text.kl[text.position > 0].mean()) if len(text.kl) > 1 else by_position[0]
    if first > limits.kl_p99 or first > 0.5 * later:
        return [
            f"logits: they part at the first position already (KL {first:.3g}, later {later:.3g}), where attention "
            "sees one token only: look at embeddings, norms, the MLPs and the head, and at how activations are rounded"
        ]
    start = next((p for p, kl in enumerate(by_position) if kl > max(limits.kl, 10 * first, 0.2 * later)), 1)
    lines = [
        f"attention: the first position agrees (KL {first:.3g}) and those from {start} on don't (KL {later:.3g}): look "
        "at attention, positions, or the cache of keys and values"
    ]
    if model is None:
        return [*lines, "attention: the reference's model can't be had here, so no hypothesis was tried"]
    return [*lines, _best_hypothesis(subject, model, window[: _TRIED + 1], rounded, limits.kl)]


def _best_hypothesis(subject: Subject, loaded: Loaded, window: Sequence[int], rounded: bool, limit: float) -> str:
    from edgec.validation.hypotheses import HYPOTHESES, RIGHT, Hypothesis, dense, logits_under

    model = dense(loaded, rounded=rounded)
    ours = subject.score(window)

    def distance(hypothesis: Hypothesis) -> float:
        logits = logits_under(model, window, hypothesis, rounded=rounded)
        return float(np.mean(divergence(Scores.whole(logits[:-1], window), ours)))

    now = distance(RIGHT)
    kl, best = min(((distance(h), h) for h in HYPOTHESES), key=lambda pair: pair[0])
    if kl > max(_VANISHES * now, limit) or kl > 0.5 * now:
        return (
            f"attention: none of {len(HYPOTHESES)} hypotheses explains it (the nearest: a reference {best.text}, with "
            f"a KL of {kl:.3g} against {now:.3g}); look at the cache of keys and values"
        )
    return f"agrees with a reference {best.text} (KL {kl:.3g} against {now:.3g}): {best.points_to}"


def _sampler(evidence: SamplingEvidence, failed: set[str], logits_agree: bool) -> list[str]:
    if not evidence.stray:
        if logits_agree:
            return ["sampler: tokens follow their draws by the engine's own probabilities; look at the probabilities"]
        return []  # other logits, other tokens
    agree = "the logits agree" if logits_agree else "the logits are looked at above"
    p_values = [p for p in (evidence.uniform_p, evidence.two_sample_p) if p is not None]
    if min(p_values) < ALPHA / 2:
        how = (
            "their distribution is not the model's (chi-square): the sampler is biased. Look at how the random number "
            "becomes a token"
        )
    else:
        how = (
            "their distribution is the model's (chi-square): the sampler is not biased, it draws other numbers. Look "
            "at the seed, the counter and the order of tokens"
        )
    return [f"sampler: {agree}, and {evidence.stray} sampled tokens don't follow their draws; {how}"]
