"""What the rows of a step are for: which logits are wanted, and what is made of them.

A sequence with γ proposals has γ + 1 rows: one for each proposal, which verifies it, and one for the token after them.
Each is judged by itself, as if the proposals before it had been kept; `counted` then drops what comes after the first
that was not. A draw depends on nothing but its position, so those that are dropped disturb nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from edgec.reference.model_runner import Rows
from edgec.reference.request import Answer
from edgec.reference.sampler import (
    History,
    Proposal,
    Sampled,
    greatest,
    has_penalties,
    is_plain,
    log_probabilities,
    sample,
    verify,
)
from edgec.reference.scheduler import Chunk


@dataclass(frozen=True)
class Use:
    """What a wanted row is for: the next token of a chunk's answers, or the score of the prompt's token after it.

    Attributes:
        proposals: those of the chunk.
        place: how many of them come before the token that the row gives; the one after those is to be verified.
    """

    chunk: Chunk
    answer: Answer
    position: int
    scores: bool
    proposals: Sequence[Proposal] = ()
    place: int = 0

    @property
    def proposal(self) -> Proposal | None:
        return self.proposals[self.place] if self.place < len(self.proposals) else None


@dataclass(frozen=True)
class Score:
    logprob: float
    top: tuple[tuple[int, float], ...]


Result = list[Sampled | None] | Score | None
"""Of a use: a token for each answer, or a score. None: the logits are no numbers."""


def uses_of(chunk: Chunk, answer: Answer, proposals: Sequence[Proposal] = ()) -> list[Use]:
    """The rows of a chunk whose logits are wanted, in order; `proposals` for its `drafts` positions."""
    request = answer.owner
    uses = []
    if request.request.score_prompt and answer.index == 0:
        first, end = max(chunk.start, request.scored), min(chunk.start + chunk.count, len(request.prompt) - 1)
        uses = [Use(chunk, answer, position, True) for position in range(first, end)]
    if chunk.samples:
        last = chunk.start + chunk.count - chunk.drafts - 1
        uses += [Use(chunk, answer, last + i, False, proposals[: chunk.drafts], i) for i in range(chunk.drafts + 1)]
    return uses


def heirs(answer: Answer) -> list[Answer]:
    """Whose tokens a row gives: the answer's own, or, when a prompt has just been computed, all answers' first."""
    return [answer] if answer.owner.forked else answer.owner.answers


def rows_of(chunk: Chunk, uses: Sequence[Use], proposals: Sequence[Proposal] = ()) -> Rows:
    sequence = chunk.sequence
    own = sequence.tokens[chunk.start : chunk.start + chunk.count]
    return Rows(
        [*own, *(proposal.token for proposal in proposals[: chunk.drafts])],
        chunk.start,
        list(sequence.table),  # a copy: `cancel` may take the blocks away meanwhile
        [use.position for use in uses if use.chunk is chunk],
    )


def use_rows(logits: torch.Tensor, uses: Sequence[Use]) -> list[Result]:
    """logits (R, vocab) float32 on the device, one row for each use."""
    finite, best = logits.isfinite().all(-1).tolist(), logits.argmax(-1).tolist()  # of equal ones the first
    results: list[Result] = []
    for row, use, good, token in zip(logits, uses, finite, best, strict=True):
        sampling = use.answer.owner.request.sampling
        if not good:
            results.append(None)
        elif use.scores:
            results.append(score(row.cpu().numpy(), use))
        elif is_plain(sampling):
            results.append([Sampled(token)])
        else:
            results.append([_next(row.cpu().numpy(), use, answer) for answer in heirs(use.answer)])
    return results


def _next(row: NDArray[np.float32], use: Use, answer: Answer) -> Sampled | None:
    """An answer's token after the row's, if the proposals before it are kept."""
    sampling, history = use.answer.owner.request.sampling, answer.history
    if use.place and has_penalties(sampling):
        earlier = Counter(proposal.token for proposal in use.proposals[: use.place])
        history = History(history.prompt, history.answer + earlier)
    seed, position = use.answer.owner.seed, use.position + 1
    if use.proposal is not None:
        return verify(row, sampling, history, use.proposal, seed=seed, answer=answer.index, position=position)
    return sample(row, sampling, history, seed=seed, answer=answer.index, position=position)


def counted(uses: Sequence[Use], results: Sequence[Result]) -> list[int]:
    """Which rows count: of each sequence's proposals those that were kept, and the row after them."""
    rows: list[int] = []
    ended: Chunk | None = None
    for row, (use, result) in enumerate(zip(uses, results, strict=True)):
        if use.chunk is ended:
            continue
        rows.append(row)
        if use.proposal is not None and not _kept(use.proposal, result):
            ended = use.chunk
    return rows


def _kept(proposal: Proposal, result: Result) -> bool:
    return isinstance(result, list) and result[0] is not None and result[0].token == proposal.token


def score(row: NDArray[np.float32], use: Use) -> Score:
    request = use.answer.owner
    scores = log_probabilities(row)
    alternatives = request.request.sampling.logprobs or 0
    return Score(float(scores[request.prompt[use.position + 1]]), greatest(row, scores, alternatives))
