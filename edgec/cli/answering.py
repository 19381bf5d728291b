"""What `edgec run` shows while it answers: text on stdout, Ctrl-C that stops an answer, and a summary at the end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import typer

if TYPE_CHECKING:
    from edgec.runtime.engine import Engine
    from edgec.runtime.events import Event
    from edgec.runtime.sampling import Sampling
    from edgec.runtime.stats import Stats
    from edgec.runtime.timing import Timing

# What a terminal would act on; a model's words are not to move its cursor or set its title.
_CONTROL = dict.fromkeys(c for c in (*range(0x20), *range(0x7F, 0xA0)) if chr(c) not in "\n\t")


class Interrupt:
    """Ctrl-C cancels the request that is being answered, once; the second one is a KeyboardInterrupt."""

    def __init__(self) -> None:
        self.stopped = False
        self._cancel: Callable[[], object] = bool
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def events(self, engine: Engine, tokens: list[int], sampling: Sampling) -> Iterator[Event]:
        """A request's events, also when it is cancelled in the middle of a long prompt."""
        events = engine.generate(tokens, sampling)
        # The handler runs between two instructions of this thread, never inside the core.
        self._cancel = lambda: engine.cancel(events.number)
        if self.stopped:
            self._cancel()
        return events

    def _handle(self, _: int, frame: FrameType | None) -> None:
        if self.stopped:
            raise KeyboardInterrupt
        self.stopped = True
        self._cancel()


def show(text: str) -> None:
    """Text to stdout at once. When nobody reads any more, the command is over."""
    if sys.stdout.isatty():
        text = text.translate(_CONTROL)
    try:
        sys.stdout.buffer.write(text.encode(errors="replace"))
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit from None


def summary(engine: Engine, timing: Timing, stats: Stats) -> list[str]:
    """Speed and waste, for people."""
    from edgec.units import format_bytes, format_milliseconds, format_percent

    about = engine.description
    first = timing.first_token_seconds
    memory = about.get("memory", {})
    drafts = []
    if stats.draft_runs:
        drafts = [
            f"speculation: {stats.tokens_per_run:.2f} tokens a run of {stats.drafted_tokens / stats.draft_runs:.1f} "
            f"proposals, {format_percent(stats.wasted_drafts)} of them thrown away"
        ]
    return [
        f"prompt: {timing.prompt_tokens} tokens ({timing.cached_tokens} cached), "
        f"first token after {format_milliseconds(None if first is None else first * 1e3)}, {_rate(timing.prompt_rate)}",
        f"answer: {timing.answer_tokens} tokens, {_rate(timing.answer_rate)}, ended by {timing.finish.name.lower()}",
        f"KV utilisation {format_percent(stats.utilisation)}, step occupancy {format_percent(stats.occupancy)}, "
        f"scheduling {format_percent(stats.scheduling)} of the steps' time, "
        f"recomputed {format_percent(stats.recomputed)}",
        *drafts,
        f"kernel {about.get('kernel')}, threads {about.get('threads')}, KV {about.get('kv_dtype')}, "
        f"memory {', '.join(f'{name} {format_bytes(size)}' for name, size in memory.items())}",
    ]


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} tok/s"
