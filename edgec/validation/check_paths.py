"""The native engine against itself: a request's answer must not depend on how it came about.

    requests       a request's log-probabilities are those that scoring its text gives
    batching       all requests together, against each alone
    chunking       prompts in pieces of a few tokens
    prefix_cache   prompts whose beginning is cached
    preemption     requests lose their blocks every few steps and are computed again

Tokens and log-probabilities must be equal bit for bit (`requests`: to rounding). A check whose situation did not come
about (nothing was preempted) is unproven.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from edgec.runtime.abi import Trim
from edgec.runtime.engine import Engine
from edgec.runtime.sampling import Sampling
from edgec.runtime.stats import Stats
from edgec.validation.check_greedy import common_prefix
from edgec.validation.findings import Finding, judged, unproven
from edgec.validation.native_subject import NativeSubject
from edgec.validation.requests import answer
from edgec.validation.subjects import Generated

_SAME_LOGPROB = 1e-4  # float32 of numbers up to some 30, once by the core's logarithm and once by NumPy's
_STEP = 8  # tokens of a step, for chunking
_PREEMPTED_EVERY = 5  # steps

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class _Asked:
    prompts: Prompts
    sampling: Sequence[Sampling]


def check_paths(subject: NativeSubject, prompts: Prompts, length: int) -> list[Finding]:
    """All five findings; the value is how many answers differ."""
    sampling = [
        Sampling(max_tokens=length, temperature=0.0 if i % 2 == 0 else 1.0, seed=i, logprobs=0, ignore_eos=True)
        for i in range(len(prompts))
    ]
    asked = _Asked(prompts, sampling)
    with subject.open(prefix_cache=False) as engine:
        alone = [answer(engine, [p], [s])[0] for p, s in zip(prompts, sampling, strict=True)]
    return [
        _requests(subject, prompts, alone),
        _batching(subject, asked, alone),
        _chunking(subject, asked, alone),
        _prefix_cache(subject, asked, alone),
        _preemption(subject, asked, alone),
    ]


def _requests(subject: NativeSubject, prompts: Prompts, alone: Sequence[Generated]) -> Finding:
    worst = 0.0
    for prompt, made in zip(prompts, alone, strict=True):
        scored = subject.score([*prompt, *made.tokens]).following[len(prompt) - 1 :]
        reported = np.array([math.nan if x is None else x for x in made.logprobs])
        difference = np.abs(scored - reported)
        worst = max(worst, float(difference.max()) if np.isfinite(difference).all() else math.inf)
    text = "the greatest difference of a token's log-probability between answering and scoring"
    return judged("requests", worst, _SAME_LOGPROB, text)


def _batching(subject: NativeSubject, asked: _Asked, alone: Sequence[Generated]) -> Finding:
    def happened(stats: Stats, _: Sequence[Generated]) -> str | None:
        together = stats.batch_used / max(stats.steps, 1)
        return f"{together:.1f} sequences a step" if together > 1 else None

    with subject.open(prefix_cache=False) as engine:
        return _compare("batching", engine, asked, alone, happened, "requests never shared a step")


def _chunking(subject: NativeSubject, asked: _Asked, alone: Sequence[Generated]) -> Finding:
    longest = max(map(len, asked.prompts))

    def happened(_: Stats, __: Sequence[Generated]) -> str | None:
        return f"steps of {_STEP} tokens" if longest > _STEP else None

    with subject.open(prefix_cache=False, max_batch=min(4, _STEP), step_tokens=_STEP) as engine:
        return _compare("chunking", engine, asked, alone, happened, f"no prompt has more than {_STEP} tokens")


def _prefix_cache(subject: NativeSubject, asked: _Asked, alone: Sequence[Generated]) -> Finding:
    def happened(_: Stats, made: Sequence[Generated]) -> str | None:
        cached = sum(a.cached for a in made)
        return f"{cached} prompt tokens were cached" if cached else None

    with subject.open(prefix_cache=True) as engine:
        answer(engine, asked.prompts, asked.sampling)  # leaves its prompts behind
        return _compare("prefix_cache", engine, asked, alone, happened, "no prompt fills a block, so none was cached")


def _preemption(subject: NativeSubject, asked: _Asked, alone: Sequence[Generated]) -> Finding:
    """Every few steps, all but one of the requests lose their blocks, as when the system asks for memory back."""

    def happened(stats: Stats, _: Sequence[Generated]) -> str | None:
        if not stats.preemptions:
            return None
        return f"{stats.preemptions} preemptions, {stats.recomputed_tokens} tokens computed again"

    with subject.open(prefix_cache=False) as engine:

        def between(step: int) -> None:
            if step % _PREEMPTED_EVERY == 0:
                engine.trim(Trim.CRITICAL)

        return _compare("preemption", engine, asked, alone, happened, "requests never shared a step", between)


def _compare(
    check: str,
    engine: Engine,
    asked: _Asked,
    alone: Sequence[Generated],
    happened: Callable[[Stats, Sequence[Generated]], str | None],
    otherwise: str,
    between: Callable[[int], None] = lambda _: None,
) -> Finding:
    before = engine.stats()
    made = answer(engine, asked.prompts, asked.sampling, between)
    what = happened(engine.stats().since(before), made)
    if what is None:
        return unproven(check, otherwise)
    wrong = [i for i, (a, b) in enumerate(zip(alone, made, strict=True)) if not _same(a, b)]
    if not wrong:
        return judged(check, 0, 0, f"{len(made)} answers are the same bit for bit; {what}")
    at = common_prefix(alone[wrong[0]].tokens, made[wrong[0]].tokens)
    where = "only in log-probabilities" if at == len(alone[wrong[0]].tokens) else f"from token {at} on"
    return judged(check, len(wrong), 0, f"of {len(made)} answers differ; number {wrong[0]} does {where} ({what})")


def _same(a: Generated, b: Generated) -> bool:
    return a.tokens == b.tokens and a.logprobs == b.logprobs
