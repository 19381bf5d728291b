"""From a row of logits to a token: the contract of the native engine's sampler.h, in NumPy.

z is a row of logits, float32; m the greatest of them.

    1. log-probabilities are the model's own: z − m − log Σ exp(z − m), before anything below
    2. logit bias, then the repetition penalty over prompt and answer (Keskar et al., 2019), then frequency and presence
       penalties over the answer
    3. temperature 0: the greatest z, of equal ones the lowest token. Otherwise weights w = exp((z − m) / temperature),
       where exponents below −87.33654 (float32's smallest normal) are 0
    4. top-k: the k greatest z, of equal ones the lowest tokens
    5. top-p: in descending z, tokens before which less than top_p · Σ w has been seen (Holtzman et al., 2020)
    6. min-p: tokens with w ≥ min_p, as the greatest w is 1
    7. of all that is kept the token with the least E / w, in float64, E being its exponential noise at this position
       (philox.py): t wins this race with probability w / Σ w; of equal ones the lowest token

A row with a NaN or an infinity has no token (`None`): the model, or its input, is broken.

**Speculation** is Algorithm 1 of Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023).
With p what a token is drawn from (steps 2 to 6, normalised) and q what a drafter drew its proposal x from, x is kept
with probability min(1, p(x) / q(x)), and else replaced by a token from max(0, p − q), normalised: what comes out is
distributed as p, whatever q is. Each of the three draws has random numbers of its own (philox.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgec.reference.philox import ACCEPT, DRAFT, RESIDUAL, noise, uniform
from edgec.runtime.abi import Status
from edgec.runtime.failures import EngineError
from edgec.runtime.sampling import Sampling

LEAST_EXPONENT = -87.33654
MAX_LOGPROBS = 20
MAX_ANSWERS = 64
MAX_STOPS, MAX_STOP_BYTES = 16, 256
MAX_BIAS = 100.0

Row = NDArray[np.float32]


@dataclass(frozen=True)
class Sampled:
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class History:
    """Which tokens a sequence has had: what the penalties look at."""

    prompt: frozenset[int] = frozenset()
    answer: Counter[int] = field(default_factory=Counter)


def has_penalties(sampling: Sampling) -> bool:
    return (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) != (1, 0, 0)


def is_plain(sampling: Sampling) -> bool:
    """Whether the token is the greatest logit, and nothing else is asked for: then a whole batch is one argmax."""
    return (
        sampling.temperature == 0
        and sampling.logprobs is None
        and not sampling.logit_bias
        and not (has_penalties(sampling))
    )


def sample(
    logits: Row, sampling: Sampling, history: History, *, seed: int, answer: int, position: int
) -> Sampled | None:
    """The token at `position` of the request's `answer`-th sequence, from a row of logits (vocab,)."""
    if not np.isfinite(logits).all():
        return None
    tokens, weights = distribution(logits, sampling, history)
    if not len(tokens):
        return None  # a bias or a penalty has overflowed
    if sampling.temperature == 0:
        return _report(int(tokens[0]), logits, sampling)
    return _report(race(tokens, weights, seed=seed, answer=answer, position=position), logits, sampling)


def race(tokens: NDArray[np.int64], weights: NDArray[np.float64], *, seed: int, answer: int, position: int) -> int:
    """Step 7."""
    return int(tokens[(noise(seed, answer, position, tokens) / weights).argmin()])


def draw(tokens: NDArray[np.int64], weights: NDArray[np.float64], u: float) -> int:
    """By inverse CDF in ascending order of token: a drafter's own tokens, and those that replace rejected ones."""
    sums = np.cumsum(weights)
    at = int(np.searchsorted(sums, u * sums[-1], side="right"))
    return int(tokens[min(at, len(tokens) - 1)])


def _report(token: int, logits: Row, sampling: Sampling) -> Sampled:
    """The token with the log-probabilities that are asked for."""
    if sampling.logprobs is None:
        return Sampled(token)
    scores = log_probabilities(logits)
    return Sampled(token, float(scores[token]), greatest(logits, scores, sampling.logprobs))


# ---- Speculation


@dataclass(frozen=True)
class Proposal:
    """A drafter's token, and the distribution q that it was drawn from.

    Attributes:
        tokens: those that could have been drawn, ascending.
        weights: of each; not normalised.
        sure: it was not drawn at all.
    """

    token: int
    tokens: NDArray[np.int64]
    weights: NDArray[np.float64]
    sure: bool = False

    @staticmethod
    def certain(token: int) -> Proposal:
        """Of a drafter that could not have proposed another."""
        return Proposal(token, np.array([token]), np.ones(1), sure=True)


def propose(
    logits: Row, vocabulary: NDArray[np.int64], sampling: Sampling, *, seed: int, answer: int, position: int
) -> Proposal | None:
    """A draft head's choice from its own logits (V_d,); `vocabulary` (V_d,) are their tokens, ascending.

    Temperature, top-k, top-p and min-p apply, which brings q near p; bias and penalties don't. None for bad logits.
    """
    if not np.isfinite(logits).all():
        return None
    own = Sampling(temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
    places, weights = distribution(logits, own, History())
    if sampling.temperature == 0:
        return Proposal.certain(int(vocabulary[places[0]]))
    tokens = vocabulary[places]
    return Proposal(draw(tokens, weights, uniform(seed, answer, position, DRAFT)), tokens, weights)


def verify(
    logits: Row, sampling: Sampling, history: History, proposal: Proposal, *, seed: int, answer: int, position: int
) -> Sampled | None:
    """The token at `position`, where `proposal` was made: it is kept exactly when it is the token that comes out.

    At temperature 0, and for a proposal that wasn't drawn, that is the token which `sample` gives: q(x) = 1 is kept
    with probability p(x), and so is this. Else one that replaces the proposal never equals it: it is rejected only
    where p(x) < q(x), and there max(0, p − q) is 0.
    """
    if sampling.temperature == 0 or proposal.sure:
        return sample(logits, sampling, history, seed=seed, answer=answer, position=position)
    if not np.isfinite(logits).all():
        return None
    tokens, weights = distribution(logits, sampling, history)
    if not len(tokens):
        return None
    p, q = np.zeros(len(logits)), np.zeros(len(logits))
    p[tokens] = weights / weights.sum()
    q[proposal.tokens] = proposal.weights / proposal.weights.sum()
    token = proposal.token
    if uniform(seed, answer, position, ACCEPT) * q[token] >= p[token]:
        residual = np.maximum(p - q, 0.0)
        left = np.flatnonzero(residual)
        if len(left):  # else p = q but for rounding, where every proposal is kept
            token = draw(left, residual[left], uniform(seed, answer, position, RESIDUAL))
    return _report(token, logits, sampling)


# ---- The distribution


def distribution(logits: Row, sampling: Sampling, history: History) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Steps 2 to 6: the tokens that may be drawn, ascending, and their weights, which are not normalised.

    Empty when bias and penalties leave something that is no finite number.
    """
    z = adjusted(logits, sampling, history)
    if not np.isfinite(z).all():
        return np.empty(0, np.int64), np.empty(0)
    if sampling.temperature == 0:
        return np.array([z.argmax()]), np.ones(1)
    w = np.zeros(len(z), np.float32)
    with np.errstate(over="ignore"):  # to −inf, whose weight is 0
        exponents = (z - z.max()) / np.float32(sampling.temperature)
    np.exp(exponents, out=w, where=exponents >= LEAST_EXPONENT)
    kept = np.arange(len(z))
    if 0 < sampling.top_k < len(z):
        kth = np.partition(z, -sampling.top_k)[-sampling.top_k]
        kept = np.flatnonzero(z >= kth)  # the k greatest, and what equals the least of them
        kept = np.sort(descending(z, kept)[: sampling.top_k])
    kept = kept[w[kept] > 0]
    if np.float32(sampling.top_p) < 1:
        total = w[kept].sum(dtype=np.float64)
        wanted = float(np.float32(sampling.top_p)) * total
        # Tokens below this have, all together, less than top-p may leave out. What is left is quicker to sort.
        kept = kept[w[kept] >= 0.5 * (total - wanted) / len(z)]
        order = descending(z, kept)
        before = np.cumsum(np.append(0.0, w[order][:-1]))
        kept = np.sort(order[before < wanted])
    if sampling.min_p > 0:
        kept = kept[w[kept] >= np.float32(sampling.min_p)]
    return kept, w[kept].astype(np.float64)


def adjusted(logits: Row, sampling: Sampling, history: History) -> Row:
    """Step 2."""
    z = logits.copy()
    with np.errstate(over="ignore"):
        for token, bias in sampling.logit_bias.items():
            z[token] += np.float32(bias)
        if not has_penalties(sampling):
            return z
        seen = np.array(sorted(history.prompt | history.answer.keys()), np.int64)
        r = np.float32(sampling.repetition_penalty)
        z[seen] = np.where(z[seen] > 0, z[seen] / r, z[seen] * r)
        said = np.array(list(history.answer), np.int64)
        counts = np.array(list(history.answer.values()), np.float32)
        z[said] -= np.float32(sampling.frequency_penalty) * counts
        z[said] -= np.float32(sampling.presence_penalty)
    return z


def descending(z: Row, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """`tokens`, which ascend, by falling z; equal ones stay in their order."""
    order: NDArray[np.int64] = tokens[np.argsort(-z[tokens], kind="stable")]
    return order


def log_probabilities(logits: Row) -> Row:
    """Step 1, of a whole row; the sum is in float64."""
    shifted = logits - logits.max()
    scores: Row = shifted - np.float32(math.log(np.exp(shifted).sum(dtype=np.float64)))
    return scores


def greatest(logits: Row, scores: Row, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` likeliest tokens with their log-probabilities, descending; equal ones by token."""
    if count == 0:
        return ()
    count = min(count, len(logits))
    kth = np.partition(logits, -count)[-count]
    best = descending(logits, np.flatnonzero(logits >= kth))[:count]
    return tuple((int(token), float(scores[token])) for token in best)


def check_sampling(sampling: Sampling, vocab: int) -> None:
    """Refuse what the native engine refuses, with the same status.

    Raises:
        UsageError: a number that is not finite, or too great for its field; a stop string that is empty.
        EngineError: INVALID_ARGUMENT, naming the field that is out of range.
    """
    sampling.to_c()  # what can't even be said to the core

    def want(good: bool, name: str, span: str) -> None:
        if not good:
            raise _bad(f"{name} is {getattr(sampling, name):g}; it must be {span}")

    s = sampling
    want(s.max_tokens >= 0, "max_tokens", "0 or more")
    want(0 <= s.temperature <= 100, "temperature", "between 0 and 100")
    want(s.top_k >= 0, "top_k", "0 (off) or more")
    want(0 < float(np.float32(s.top_p)) <= 1, "top_p", "above 0 and at most 1")
    want(0 <= float(np.float32(s.min_p)) < 1, "min_p", "at least 0 and below 1")
    want(0 < float(np.float32(s.repetition_penalty)) <= 100, "repetition_penalty", "above 0 and at most 100")
    want(-2 <= s.frequency_penalty <= 2, "frequency_penalty", "between -2 and 2")
    want(-2 <= s.presence_penalty <= 2, "presence_penalty", "between -2 and 2")
    want(s.logprobs is None or s.logprobs <= MAX_LOGPROBS, "logprobs", f"between 0 and {MAX_LOGPROBS}, or none")
    want(1 <= s.n <= MAX_ANSWERS, "n", f"between 1 and {MAX_ANSWERS}")
    if s.n > 1 and s.temperature == 0:
        raise _bad(f"n is {s.n} at temperature 0: all answers would be the same")
    _want_tokens("logit_bias", list(s.logit_bias), vocab)
    for bias in s.logit_bias.values():
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise _bad(f"logit_bias is {bias:g}; it must be between -100 and 100")
    if len(s.stop) > MAX_STOPS:
        raise _bad(f"stop has {len(s.stop)} strings; at most {MAX_STOPS}")
    if any(len(text.encode()) > MAX_STOP_BYTES for text in s.stop):
        raise _bad(f"stop has a string of more than {MAX_STOP_BYTES} bytes")
    _want_tokens("stop_tokens", s.stop_tokens, vocab)


def _want_tokens(name: str, tokens: Sequence[int], vocab: int) -> None:
    for token in tokens:
        if not 0 <= token < vocab:
            raise _bad(f"{name} names the token {token}, but the vocabulary ends at {vocab - 1}")


def _bad(what: str) -> EngineError:
    return EngineError(Status.INVALID_ARGUMENT, what)
