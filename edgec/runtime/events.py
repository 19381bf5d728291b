"""What goes into an engine and what comes out: requests, events, and an answer put together from its events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from edgec.runtime.abi import EventKind, Finish
from edgec.runtime.sampling import Sampling

__all__ = ["Answer", "Event", "EventKind", "Finish", "Request", "collect"]


@dataclass(frozen=True)
class Request:
    """One prompt, and how to answer it."""

    tokens: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    priority: int = 0
    """Greater goes first; −8…7."""
    tenant: int = 0
    """Tenants share the engine by weight, whatever they submit."""
    tenant_weight: float = 1.0
    cache_salt: int = 0
    """Prefixes are shared only among equal salts."""
    score_prompt: bool = False
    """Also report the log-probability of each prompt token."""


@dataclass(slots=True)
class Event:
    """One thing that happened to a request.

    Not frozen, because that triples the time to make one, and one is made for each token.
    """

    request: int
    sequence: int
    kind: EventKind
    token: int = -1
    position: int = -1
    logprob: float | None = None
    finish: Finish = Finish.NONE
    text: str = ""
    """Whole characters that became certain; may be empty."""
    top: tuple[tuple[int, float], ...] = ()
    """(token, log-probability), most likely first."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0


@dataclass
class Answer:
    """One finished sequence."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    finish: Finish = Finish.NONE
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0

    def add(self, event: Event) -> None:
        """Take in the next event of this sequence."""
        if event.kind is EventKind.PROMPT_SCORE:
            return
        self.text += event.text
        if event.kind is EventKind.TOKEN:
            self.tokens.append(event.token)
            self.logprobs.append(event.logprob)
        else:
            self.finish = event.finish
            self.prompt_tokens = event.prompt_tokens
            self.cached_tokens = event.cached_tokens
            self.answer_tokens = event.answer_tokens


def collect(events: Iterable[Event], n: int = 1) -> list[Answer]:
    """The answers of a request with `n` sequences, from all of its events."""
    answers = [Answer() for _ in range(n)]
    for event in events:
        answers[event.sequence].add(event)
    return answers
