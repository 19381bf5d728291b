"""What the rows of a step are for: which logits are wanted, and what is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from edgec.reference.model_runner import Rows
from edgec.reference.request import Answer
from edgec.reference.sampler import Sampled, greatest, is_plain, log_probabilities, sample
from edgec.reference.scheduler import Chunk


@dataclass(frozen=True)
class Use:
    """What a wanted row is for: the next token of a chunk's answers, or the score of the prompt's token after it."""

    chunk: Chunk
    answer: Answer
    position: int
    scores: bool


@dataclass(frozen=True)
class Score:
    logprob: float
    top: tuple[tuple[int, float], ...]


Result = list[Sampled | None] | Score | None
"""Of a use: a token for each answer, or a score. None: the logits are no numbers."""


def uses_of(chunk: Chunk, answer: Answer) -> list[Use]:
    """The rows of a chunk whose logits are wanted, in order."""
    request = answer.owner
    uses = []
    if request.request.score_prompt and answer.index == 0:
        first, end = max(chunk.start, request.scored), min(chunk.start + chunk.count, len(request.prompt) - 1)
        uses = [Use(chunk, answer, position, True) for position in range(first, end)]
    if chunk.samples:
        uses.append(Use(chunk, answer, chunk.start + chunk.count - 1, False))
    return uses


def heirs(answer: Answer) -> list[Answer]:
    """Whose tokens a row gives: the answer's own, or, when a prompt has just been computed, all answers' first."""
    return [answer] if answer.owner.forked else answer.owner.answers


def rows_of(chunk: Chunk, uses: Sequence[Use]) -> Rows:
    sequence = chunk.sequence
    return Rows(
        sequence.tokens[chunk.start : chunk.start + chunk.count],
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
            results.append(
                [
                    sample(
                        row.cpu().numpy(),
                        sampling,
                        answer.history,
                        seed=use.answer.owner.seed,
                        answer=answer.index,
                        position=use.position + 1,
                    )
                    for answer in heirs(use.answer)
                ]
            )
    return results


def score(row: NDArray[np.float32], use: Use) -> Score:
    request = use.answer.owner
    scores = log_probabilities(row)
    alternatives = request.request.sampling.logprobs or 0
    return Score(float(scores[request.prompt[use.position + 1]]), greatest(row, scores, alternatives))
