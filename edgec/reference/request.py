"""A request's way from prompt to text: its answers, and the events that its owner sees."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch

from edgec.reference.sampler import History, Sampled
from edgec.reference.sequence import Sequence
from edgec.reference.text import Detokenizer, StopStrings
from edgec.runtime.abi import EventKind, Finish
from edgec.runtime.events import Event, Request


@dataclass(eq=False)
class Answer:
    """One sequence of a request: what it has said so far, as tokens and as text.

    Attributes:
        sequence: its place in the scheduler; answers after the first have one once the prompt is computed.
        tokens: how many it has said; the one that ends it is not among them.
        hidden: (hidden,) float32, the state that its newest token was drawn from; only kept for a draft head.
    """

    owner: OpenRequest
    index: int
    history: History
    stops: StopStrings
    detokenizer: Detokenizer | None
    sequence: Sequence | None = None
    tokens: int = 0
    finished: bool = False
    hidden: torch.Tensor | None = None

    def say(self, sampled: Sampled, position: int, room: int) -> tuple[Event | None, Finish]:
        """Append a token. Gives its event, None for one that only ends the answer, and whether the answer ends here.

        Args:
            position: the token's, in its sequence.
            room: tokens that could come after it.
        """
        if self.owner.ends(sampled.token):
            return None, Finish.STOP
        sampling = self.owner.request.sampling
        self.tokens += 1
        self.history.answer[sampled.token] += 1
        text = self.stops.push(self.detokenizer.push(sampled.token)) if self.detokenizer is not None else ""
        event = Event(
            self.owner.number,
            self.index,
            EventKind.TOKEN,
            token=sampled.token,
            position=position,
            logprob=sampled.logprob,
            text=text,
            top=sampled.top,
        )
        if self.stops.stopped:
            return event, Finish.STOP
        full = room <= 0 or 0 < sampling.max_tokens <= self.tokens
        return event, Finish.LENGTH if full else Finish.NONE

    def last_event(self, finish: Finish) -> Event:
        """The FINISH event, with the text that was still held back."""
        text = ""
        if self.detokenizer is not None and not self.stops.stopped:
            text = self.stops.push(self.detokenizer.flush())
            text += "" if self.stops.stopped else self.stops.flush()
        return Event(
            self.owner.number,
            self.index,
            EventKind.FINISH,
            finish=finish,
            text=text,
            prompt_tokens=len(self.owner.prompt),
            cached_tokens=self.owner.cached,
            answer_tokens=self.tokens,
        )


@dataclass(eq=False)
class OpenRequest:
    """A request that has answers to come.

    Attributes:
        scored: prompt positions whose scores are out.
        forked: its answers are sequences of their own; with n > 1 they are once the prompt is computed.
        cached: prompt tokens whose keys and values were in the prefix cache.
    """

    number: int
    request: Request
    prompt: list[int]
    seed: int
    eos: frozenset[int]
    answers: list[Answer] = field(default_factory=list)
    scored: int = 0
    forked: bool = False

    @property
    def cached(self) -> int:
        first = self.answers[0].sequence
        return (first.cached or 0) if first is not None else 0

    @property
    def finished(self) -> bool:
        return all(answer.finished for answer in self.answers)

    def ends(self, token: int) -> bool:
        sampling = self.request.sampling
        return (token in self.eos and not sampling.ignore_eos) or token in sampling.stop_tokens

    def score_events(self, position: int, logprob: float, top: SequenceOf[tuple[int, float]]) -> list[Event]:
        """The score of the prompt's token at `position`; in front of the second, the first, which has none."""

        def event(at: int, value: float | None, alternatives: SequenceOf[tuple[int, float]]) -> Event:
            return Event(
                self.number,
                0,
                EventKind.PROMPT_SCORE,
                token=self.prompt[at],
                position=at,
                logprob=value,
                top=tuple(alternatives),
            )

        first = [event(0, None, ())] if position == 1 else []
        return [*first, event(position, logprob, top)]
