"""Sampled answers: whether tokens follow their random numbers, and whether their distribution is the right one.

draws         each token against its own engine's probabilities: the noise E of its position is known (keyed by seed and
              position), so the token must be the one with the least E / q
sampled       the same text and the same noise with the reference's probabilities P. Where the engine's are Q, both
              races have token i for winner with probability 1 / Σ_j max(q_j / q_i, p_j / p_i). So of many tokens
              Σ (1 − Σ_i …) may be others, give or take; more than that, at a chance of ALPHA, is a failure
distribution  without knowing the draws: tokens drawn after the same prompts on both sides, compared by a two-sample
              chi-square test; and where in its interval's cumulated probability each token of the answers lies,
              which must be uniform (a chi-square test over 16 bins). The lesser p-value, doubled for there being two
              tests, must not be below ALPHA
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgec.reference.philox import noise
from edgec.reference.sampler import History, distribution
from edgec.runtime.sampling import Sampling
from edgec.validation.check_greedy import common_prefix
from edgec.validation.findings import Finding, judged, unproven
from edgec.validation.scores import Doubles
from edgec.validation.subjects import Generated, NotOffered, Reference, Subject
from edgec.validation.tails import chi_square_tail, poisson_tail

ALPHA = 1e-4
"""Chance of a false alarm. Seeds are fixed, so a check that passes does so each time; one in ten thousand models and
texts would be unlucky."""

_EDGE = 1e-5  # of a quotient: the same float32 exponentials, divided by their sums, differ by less
_BINS = 16
_REQUESTS = 64  # at a time: engines refuse more than wait in their queues
_LEAST = 10  # samples of both sides together, for a token to be a category of its own


@dataclass(frozen=True)
class SamplingEvidence:
    """What the diagnosis looks at."""

    stray: int
    """Tokens that are not where their draw points, by the engine's own probabilities."""
    uniform_p: float
    two_sample_p: float | None


def check_sampling(
    subject: Subject, reference: Reference, prompts: Sequence[Sequence[int]], length: int, samples: int
) -> tuple[list[Finding], SamplingEvidence | None]:
    """All three findings. The evidence is None where the engine doesn't sample."""
    sampling = [
        Sampling(
            max_tokens=length,
            temperature=1.0 if i % 2 == 0 else 0.8,
            top_k=0 if i % 2 == 0 else 40,
            seed=1000 + i,
            ignore_eos=True,
        )
        for i in range(len(prompts))
    ]
    try:
        ours = subject.generate(prompts, sampling)
    except NotOffered as why:
        names = ("draws", "sampled", "distribution")
        return [unproven(name, str(why), "" if name == "draws" else reference.name) for name in names], None
    tally = _Tally()
    for prompt, wanted, answer in zip(prompts, sampling, ours, strict=True):
        tally.add(subject, reference, prompt, wanted, answer)
    total = sum(len(a.tokens) for a in ours)
    text = f"of {total} sampled tokens, by the engine's own probabilities and the noise of their positions"
    found = [judged("draws", tally.stray, 0, text)]
    found.append(_sampled(tally, total, _same_answers(reference, prompts, sampling, ours), reference.name))
    uniform_p = _uniformity(np.array(tally.places))
    evenly, two_sample_p = _two_sample(subject, reference, prompts, samples)
    worst = min(1.0, 2 * min(p for p in (uniform_p, two_sample_p) if p is not None))
    text = f"p-value; uniform in its intervals: {uniform_p:.2g}; {evenly}"
    if two_sample_p is None and worst >= ALPHA:
        found.append(unproven("distribution", text, reference.name))
    else:
        found.append(judged("distribution", worst, ALPHA, text, reference.name, least=True))
    return found, SamplingEvidence(tally.stray, uniform_p, two_sample_p)


class _Tally:
    """Counts over all sampled tokens."""

    def __init__(self) -> None:
        self.stray = 0
        self.places: list[float] = []
        self.unlike = 0  # the reference's draw is another token
        self.expected = 0.0
        self.refusal = ""
        self._random = np.random.default_rng(0)

    def add(
        self, subject: Subject, reference: Reference, prompt: Sequence[int], wanted: Sampling, answer: Generated
    ) -> None:
        text = [*prompt, *answer.tokens]
        ours = subject.score(text)
        theirs = None
        if not self.refusal:
            try:
                theirs = reference.score(text)
            except NotOffered as why:
                self.refusal = str(why)
            if theirs is not None and theirs.logits is None:
                theirs, self.refusal = None, "the reference gives no probabilities of all tokens"
        assert ours.logits is not None
        for i, token in enumerate(answer.tokens):
            row = len(prompt) - 1 + i
            q = _probabilities(ours.logits[row], wanted)
            clocks = noise(wanted.seed or 0, 0, len(prompt) + i, np.arange(len(q)))
            times = _times(clocks, q)
            self.stray += not times[token] <= times.min() * (1 + _EDGE)
            before = float(q[:token].sum())
            self.places.append(before + self._random.random() * float(q[token]))
            if theirs is None or theirs.logits is None:
                continue
            p = _probabilities(theirs.logits[row], wanted)
            self.unlike += int(_times(clocks, p).argmin()) != token
            self.expected += max(0.0, 1 - coupling(p, q))


def _probabilities(logits: NDArray[np.float32], sampling: Sampling) -> Doubles:
    """(vocab,), what the request's options leave of the distribution."""
    tokens, weights = distribution(logits, sampling, History())
    row = np.zeros(len(logits))
    row[tokens] = weights / weights.sum()
    return row


def _times(clocks: Doubles, probabilities: Doubles) -> Doubles:
    """When each token would be the winner; never, without a probability."""
    times: Doubles = np.full(len(clocks), np.inf)
    np.divide(clocks, probabilities, out=times, where=probabilities > 0)
    return times


def coupling(p: Doubles, q: Doubles) -> float:
    """Probability that two races with the same clocks have the same winner: Σ_i 1 / Σ_j max(q_j / q_i, p_j / p_i).

    In rising p / q, those before i have the greater q_j / q_i, and the others the greater p_j / p_i.
    """
    both = np.flatnonzero((p > 0) & (q > 0))
    order = both[np.argsort(p[both] / q[both], kind="stable")]
    p_i, q_i = p[order], q[order]
    q_before = np.cumsum(q_i) - q_i + float(q[p == 0].sum())
    p_after = float(p.sum()) - (np.cumsum(p_i) - p_i)
    return float((1 / (q_before / q_i + p_after / p_i)).sum())


def _sampled(tally: _Tally, total: int, same: str, reference: str) -> Finding:
    if tally.refusal:
        return unproven("sampled", tally.refusal, reference)
    limit = 0
    while poisson_tail(limit + 1, tally.expected) >= ALPHA:
        limit += 1
    text = f"of {total} tokens are others by the reference's probabilities; {tally.expected:.2g} are expected{same}"
    return judged("sampled", tally.unlike, limit, text, reference)


def _same_answers(
    reference: Reference, prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling], ours: Sequence[Generated]
) -> str:
    """How many answers the reference gives itself, to the same seeds."""
    if not reference.philox:
        return ""
    theirs = reference.generate(prompts, sampling)
    shared = [common_prefix(a.tokens, b.tokens) for a, b in zip(theirs, ours, strict=True)]
    same = sum(s == len(b.tokens) for s, b in zip(shared, ours, strict=True))
    return f"; {same} of {len(ours)} answers are the same from start to end"


def _uniformity(places: Doubles) -> float:
    """p-value of a chi-square test that `places` are uniform in [0, 1)."""
    if not len(places):
        return 1.0
    counts = np.bincount(np.minimum((places * _BINS).astype(int), _BINS - 1), minlength=_BINS)
    expected = len(places) / _BINS
    return chi_square_tail(float(((counts - expected) ** 2 / expected).sum()), _BINS - 1)


def _two_sample(
    subject: Subject, reference: Reference, prompts: Sequence[Sequence[int]], samples: int
) -> tuple[str, float | None]:
    """p-value of next tokens drawn after each prompt being of one distribution; in words too."""
    if not samples:
        return "no samples were asked for", None

    def draw(side: Subject | Reference, seed: int) -> list[Counter[int]]:
        counts = []
        for i, prompt in enumerate(prompts):
            group = min(samples, side.batch, 8)
            asked = [
                Sampling(max_tokens=1, temperature=1.0, seed=seed + i * samples + j, n=group, ignore_eos=True)
                for j in range(math.ceil(samples / group))
            ]
            drawn: list[Generated] = []
            for start in range(0, len(asked), _REQUESTS):
                some = asked[start : start + _REQUESTS]
                drawn += side.generate([prompt] * len(some), some)
            counts.append(Counter(a.tokens[0] for a in drawn[:samples] if a.tokens))
        return counts

    try:
        # Other seeds on either side: samples of the same draws would be alike, whatever the distributions.
        ours, theirs = draw(subject, 1_000_000), draw(reference, 2_000_000)
    except NotOffered as why:
        return f"two samples: {why}", None
    statistic, freedom = 0.0, 0
    for a, b in zip(ours, theirs, strict=True):
        own = two_sample_chi_square(a, b)
        statistic, freedom = statistic + own[0], freedom + own[1]
    if not freedom:
        return f"two samples: {samples} tokens a prompt are too few to compare", None
    p = chi_square_tail(statistic, freedom)
    drawn_ = sum(a.total() for a in ours)
    return f"two samples of {drawn_} tokens: {p:.2g} (χ² {statistic:.1f}, {freedom} degrees)", p


def two_sample_chi_square(a: Counter[int], b: Counter[int]) -> tuple[float, int]:
    """The statistic and its degrees of freedom; neighbours among tokens that are too rare for the test count as one.

    Neighbours by number. Categories depend on the two samples' sum only, so neither side is favoured.
    """
    rows: list[tuple[int, int]] = []
    rare = (0, 0)
    for token in sorted(a.keys() | b.keys()):
        if a[token] + b[token] >= _LEAST:
            rows.append((a[token], b[token]))
            continue
        rare = (rare[0] + a[token], rare[1] + b[token])
        if sum(rare) >= _LEAST:
            rows.append(rare)
            rare = (0, 0)
    if sum(rare) and rows:
        rows[-1] = (rows[-1][0] + rare[0], rows[-1][1] + rare[1])
    if len(rows) < 2 or not a.total() or not b.total():
        return 0.0, 0
    ratio = math.sqrt(b.total() / a.total())
    return sum((x * ratio - y / ratio) ** 2 / (x + y) for x, y in rows), len(rows) - 1
