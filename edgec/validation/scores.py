"""What a model thinks of each next token of a text, and how far two models are apart in it.

Whole scores are log-probabilities of every token. A server gives those of its N likeliest tokens only; then the rest
counts as one token on both sides. That loses something, so a KL from such scores is a lower bound of the true one (the
data processing inequality), never too great.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

_ROWS = 64  # compared at a time, in double


@dataclass(frozen=True)
class Scores:
    """Of the T − 1 tokens that follow the first of T.

    Attributes:
        logits: (T − 1, vocab), up to a constant in each row; None when only some tokens are known.
        ids: (T − 1, N) int32, the known tokens, −1 where there are fewer; the likeliest is in column 0.
        logprobs: (T − 1, N) float32, their log-probabilities.
        following: (T − 1,) float32, of the token that does follow; NaN where it isn't known.
    """

    logits: Floats | None
    ids: NDArray[np.int32]
    logprobs: Floats
    following: Floats

    @staticmethod
    def whole(logits: Floats, tokens: Sequence[int]) -> Scores:
        """From logits (T − 1, vocab) after each token but the last of `tokens`."""
        rows = np.arange(len(logits))
        follows = np.asarray(tokens[1:], np.int64)
        following = logits[rows, follows] - log_total(logits)
        none = np.empty((len(logits), 0))
        return Scores(logits, none.astype(np.int32), none.astype(np.float32), following.astype(np.float32))

    def __len__(self) -> int:
        return len(self.following)

    @property
    def known(self) -> bool:
        """There is more than the following token's log-probability."""
        return self.logits is not None or self.ids.shape[1] > 0

    @property
    def best(self) -> NDArray[np.int64]:
        """(T − 1,) the likeliest token; −1 when none is known."""
        if self.logits is not None:
            best: NDArray[np.int64] = self.logits.argmax(-1)
            return best
        if not self.ids.shape[1]:
            return np.full(len(self), -1, np.int64)
        return self.ids[:, 0].astype(np.int64)

    def logprob(self, row: int, token: int) -> float | None:
        """Log-probability of a token in a row (−1: the last); None when it isn't known."""
        row %= len(self)
        if self.logits is not None:
            logits = self.logits[row : row + 1]
            return float(logits[0, token] - log_total(logits)[0])
        found = np.flatnonzero(self.ids[row] == token)
        return float(self.logprobs[row, found[0]]) if len(found) else None

    def probabilities(self, row: int) -> Doubles:
        """(vocab,) of whole scores."""
        assert self.logits is not None
        return cast(Doubles, np.exp(log_softmax(self.logits[row : row + 1])[0]))


def log_total(logits: Floats) -> Doubles:
    """(T,) log Σ exp of each row, in double."""
    out = np.empty(len(logits))
    for start in range(0, len(logits), _ROWS):
        rows = logits[start : start + _ROWS].astype(np.float64)
        greatest = rows.max(-1)
        out[start : start + _ROWS] = greatest + np.log(np.exp(rows - greatest[:, None]).sum(-1))
    return out


def log_softmax(logits: Floats) -> Doubles:
    """(T, vocab) in double."""
    return logits.astype(np.float64) - log_total(logits)[:, None]


def divergence(reference: Scores, subject: Scores) -> Doubles:
    """(T − 1,) KL(reference ‖ subject) in nats; of partial reference scores a lower bound. `subject` is whole."""
    assert subject.logits is not None
    out = np.empty(len(subject))
    for start in range(0, len(out), _ROWS):
        rows = slice(start, start + _ROWS)
        q = log_softmax(subject.logits[rows])
        if reference.logits is not None:
            p = log_softmax(reference.logits[rows])
        else:
            p, q = _lumped(reference.ids[rows], reference.logprobs[rows], q)
        # Of a token with no probability nothing is lost, and the rest of a top-N can be empty to rounding.
        there = np.isfinite(p)
        out[rows] = (np.exp(p) * np.where(there, np.where(there, p, 0.0) - q, 0.0)).sum(-1)
    return np.maximum(out, 0.0)


def _lumped(ids: NDArray[np.int32], logprobs: Floats, q: Doubles) -> tuple[Doubles, Doubles]:
    """(rows, N + 1) of both sides: the known tokens, and all others as one."""
    there = ids >= 0
    p = np.where(there, logprobs.astype(np.float64), -np.inf)
    q = np.where(there, np.take_along_axis(q, np.where(there, ids, 0).astype(np.int64), 1), -np.inf)
    both = []
    with np.errstate(divide="ignore", invalid="ignore"):
        for side in (p, q):
            rest = np.maximum(1 - np.exp(side).sum(-1, keepdims=True), 0.0)
            both.append(np.concatenate([side, np.log(rest)], -1))
    # A rest of 0 on the subject's side alone would make the KL infinite for rounding of reported numbers.
    both[1][:, -1] = np.maximum(both[1][:, -1], np.log(1e-7))
    # p = −∞ must not become (−∞) − (−∞).
    both[1] = np.where(np.isneginf(both[0]), 0.0, both[1])
    return both[0], both[1]
