"""Speculation: who proposes the tokens that one pass of the model then verifies, which, and for whom.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023). γ proposals go through the model
behind a sequence's last token, in one pass over γ + 1 positions (scheduler.py, uses.py); verification (sampler.py)
keeps some of them, and the token after those is the target's own. At temperature 0 the tokens are those of plain
decoding, above it their distribution is.

Proposals come from the text itself ("prompt lookup": Saxena, 2023), or from a draft head, whose state is one vector:
the hidden state from which the newest token was drawn. So prefix hits, forks and preemption need nothing of a drafter.

What the native engine does and this one does not: γ is `draft_length` and doesn't follow what is measured, so
speculation that doesn't pay stays on; and proposals are one chain, no tree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from edgec.architectures.draft_head import Head, RecurrentHead
from edgec.reference.options import ReferenceOptions
from edgec.reference.request import Answer
from edgec.reference.sampler import Proposal, propose
from edgec.runtime.abi import MOST_DRAFTS, Status
from edgec.runtime.failures import EngineError
from edgec.runtime.sampling import Sampling

LEAST_MATCH, MOST_MATCH = 2, 8  # tokens of an ending that are looked for: two are often found again by chance
WINDOW = 4096  # tokens that are looked through


def may_speculate(sampling: Sampling, *, head: bool = True) -> bool:
    """Whether a request is speculated on, with a draft head or with n-grams alone.

    N-grams change no token. What a head draws does above temperature 0 (not the tokens' distribution): they depend on
    how many were proposed at a time, and so on who shares the batch. A seed promises the same tokens again; then only
    `speculate=True` allows it.
    """
    if sampling.speculate is not None:
        return sampling.speculate
    return sampling.temperature == 0 or sampling.seed is None or not head


def find_ngram(
    tokens: Sequence[int], least: int = LEAST_MATCH, most: int = MOST_MATCH, window: int = WINDOW
) -> int | None:
    """Position after the longest earlier occurrence of the ending of `tokens`; of equally long ones the latest.

    Args:
        least, most: tokens of the ending that must, and may, be found again.
        window: how many of the latest tokens an occurrence may end in.
    """
    count, longest, found = len(tokens), 0, None
    for end in range(count - 2, max(0, count - window) - 1, -1):
        if tokens[end] != tokens[-1]:
            continue
        length = 1
        while length < most and length <= end and tokens[end - length] == tokens[-1 - length]:
            length += 1
        if length >= least and length > longest:
            longest, found = length, end + 1
            if longest == most:
                break
    return found


def continuation(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """The `count` tokens from `start` on; behind the text's end it goes on with what it has just said."""
    said = list(tokens[start : start + count])
    period = len(tokens) - start
    while len(said) < count:
        said.append(said[-period])
    return said


class HeadRunner(Protocol):
    """A draft head as it is computed; float32 throughout."""

    token_map: torch.Tensor
    """(V_d,) int32, ascending: the full vocabulary's number of each draft token."""

    def step(self, state: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """States (rows, hidden) and the embeddings of the tokens after them → the next states."""

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        """(rows, hidden) → (rows, V_d)."""


class Drafter:
    """Makes proposals, and counts what became of them."""

    def __init__(
        self, options: ReferenceOptions, head: HeadRunner | None, embed: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """
        Args:
            head: for `speculation` "head" and "both".
            embed: the model's embeddings: (rows,) int64 → (rows, hidden).
        """
        self._length = options.draft_length
        self._ngrams = options.speculation in ("ngram", "both")
        self._head = head if options.speculation in ("head", "both") else None
        self._embed = embed
        self._device = torch.device(options.device)
        self.active = options.speculation != "off"
        self.wants_hidden = self._head is not None
        self.reached, self.kept = [0] * MOST_DRAFTS, [0] * MOST_DRAFTS
        self.drafted = self.runs = 0
        self.seconds = 0.0

    def propose(self, answers: Sequence[tuple[Answer, Sequence[int], int]]) -> dict[Answer, list[Proposal]]:
        """Proposals for sequences that decode.

        Args:
            answers: of each sequence its answer, its tokens, and how many may be proposed at most.
        """
        started = time.perf_counter()
        proposals: dict[Answer, list[Proposal]] = {}
        by_head: list[tuple[Answer, Sequence[int], int]] = []
        for answer, tokens, room in answers:
            count = min(self._length, room)
            found = find_ngram(tokens) if self._ngrams else None
            if count < 1:
                continue
            if found is not None:
                proposals[answer] = [Proposal.certain(token) for token in continuation(tokens, found, count)]
            elif self._head is not None and answer.hidden is not None:
                by_head.append((answer, tokens, count))
        if by_head:
            proposals |= self._draft(by_head)
        self.seconds += time.perf_counter() - started
        return proposals

    @torch.inference_mode()
    def _draft(self, rows: Sequence[tuple[Answer, Sequence[int], int]]) -> dict[Answer, list[Proposal]]:
        """By the head: all sequences together, one proposal after the other."""
        assert self._head is not None
        vocabulary = self._head.token_map.cpu().numpy().astype("int64")
        proposals: dict[Answer, list[Proposal]] = {answer: [] for answer, _, _ in rows}
        state = torch.stack([answer.hidden for answer, _, _ in rows if answer.hidden is not None])
        latest = [tokens[-1] for _, tokens, _ in rows]
        for i in range(max(count for _, _, count in rows)):
            state = self._head.step(state, self._embed(torch.tensor(latest, device=self._device)).float())
            logits = self._head.logits(state).cpu().numpy()
            for row, (answer, tokens, count) in enumerate(rows):
                if i >= count or len(proposals[answer]) < i:  # enough; or a head that gave NaN
                    continue
                proposal = propose(
                    logits[row],
                    vocabulary,
                    answer.owner.request.sampling,
                    seed=answer.owner.seed,
                    answer=answer.index,
                    position=len(tokens) + i,
                )
                if proposal is not None:
                    proposals[answer].append(proposal)
                    latest[row] = proposal.token
        return proposals

    def verified(self, proposed: int, kept: int) -> None:
        """A pass verified so many proposals of a sequence, and kept the first of them."""
        self.runs += 1
        self.drafted += proposed
        for place in range(min(proposed, kept + 1)):
            self.reached[place] += 1
            self.kept[place] += place < kept


def check_head(head: Head | None, options: ReferenceOptions) -> RecurrentHead | None:
    """The head that `options.speculation` needs.

    Raises:
        EngineError: there is none, or it is of a design that is not run here.
    """
    if options.speculation not in ("head", "both"):
        return None
    if head is None:
        raise EngineError(
            Status.INVALID_ARGUMENT,
            f"speculation is {options.speculation}, and the model came without a draft head: take INT8 weights of a "
            "recipe with the pass `draft_head`, or the n-grams",
        )
    if not isinstance(head, RecurrentHead):
        raise EngineError(
            Status.UNSUPPORTED, f"the draft head is of design {head.shape.design}, and the reference runs `recurrent`"
        )
    return head
