"""What the HTTP server needs of an engine. The C++ runtime implements it, and so can any other.

A backend steps in a thread of its own: `submit` and `cancel` return at once, and events are delivered from that thread.
Refusals are `EdgecError`s whose `reason` tells the server which status to answer with (`too-long`: 400, `queue-full`:
429, and so on).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from edgec.runtime.chat import Message
from edgec.runtime.events import Event, Request
from edgec.runtime.stats import Stats

Deliver = Callable[[Sequence[Event]], None]


@dataclass(frozen=True)
class ModelInfo:
    """What is served."""

    name: str
    context: int
    """Positions that prompt and answer have together."""
    vocab_size: int
    created: int
    """Seconds since 1970, for /v1/models."""
    chat: bool
    """Whether there is a chat template."""
    engine: str
    """The engine and its version, for people."""
    block_size: int = 1


class Backend(Protocol):
    """An engine behind the server. Everything but `start` and `stop` may be called from any thread."""

    @property
    def info(self) -> ModelInfo: ...

    def start(self) -> None:
        """Begin to step."""

    def stop(self) -> None:
        """Cancel what is left, deliver its last events, and end."""

    def encode(self, text: str) -> list[int]:
        """A prompt's tokens; special tokens that are written out in it are text."""

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a prompt that asks for the next turn.

        Raises:
            EdgecError: there is no chat template, or it refuses these messages.
        """

    def token_bytes(self, token: int) -> bytes:
        """A token's bytes, special tokens written out."""

    def submit(self, request: Request, deliver: Deliver) -> int:
        """Queue a request and give its number. Each of its sequences ends with one FINISH event, whatever happens.

        Raises:
            EdgecError: it is refused.
        """

    def cancel(self, number: int) -> None:
        """End a request within one step; nothing happens when it has finished."""

    @property
    def stats(self) -> Stats:
        """The counters, at most a moment old."""

    @property
    def failure(self) -> str | None:
        """Why the engine does not work any more; None while it does."""
