"""How fast a request was answered, from when its events arrived."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from edgec.runtime.events import Event, EventKind, Finish


@dataclass
class Timing:
    """Fed with each event as it comes; `start` is when the request was submitted."""

    start: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    finish: Finish = Finish.NONE

    def add(self, event: Event) -> None:
        if event.kind is EventKind.TOKEN:
            self.last = time.perf_counter()
            self.first = self.last if self.first is None else self.first
            self.tokens += 1
        elif event.kind is EventKind.FINISH:
            self.prompt_tokens, self.cached_tokens = event.prompt_tokens, max(self.cached_tokens, event.cached_tokens)
            self.answer_tokens += event.answer_tokens
            self.finish = event.finish

    @property
    def first_token_seconds(self) -> float | None:
        return None if self.first is None else self.first - self.start

    @property
    def prompt_rate(self) -> float | None:
        """Prompt tokens computed (cached ones were not) a second, until the first token."""
        seconds = self.first_token_seconds
        return (self.prompt_tokens - self.cached_tokens) / seconds if seconds else None

    @property
    def answer_rate(self) -> float | None:
        """Tokens a second after the first."""
        if self.first is None or self.tokens < 2 or self.last <= self.first:
            return None
        return (self.tokens - 1) / (self.last - self.first)
