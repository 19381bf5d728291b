"""The interactive chat of `edgec run`: keeps the history, whose keys and values the prefix cache keeps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from edgec.cli.answering import Interrupt, show, summary
from edgec.cli.out import out

if TYPE_CHECKING:
    from edgec.runtime.chat import Message
    from edgec.runtime.engine import Engine
    from edgec.runtime.sampling import Sampling

_HELP = """\
/drop   forget the oldest question and its answer
/new    forget the whole conversation
/quit   leave, as does Ctrl-D
Ctrl-C stops an answer; at the prompt it leaves."""


def converse(
    engine: Engine,
    sampling: Sampling,
    *,
    system: str | None = None,
    stats: bool = False,
    read: Callable[[], str] | None = None,
) -> None:
    """Chat until the user leaves.

    Args:
        read: gives the next line; raises EOFError at the end.
    """
    conversation = Conversation(engine, sampling, system)
    if read is None:
        out.progress("/help lists commands; /quit or Ctrl-D leaves")
        read = _read
    while True:
        try:
            line = read().strip()
        except (EOFError, KeyboardInterrupt):
            show("\n")
            return
        if line in ("/quit", "/exit", "/bye"):
            return
        if line.startswith("/"):
            out.progress(conversation.command(line))
        elif line:
            conversation.say(line, stats=stats)


class Conversation:
    """A chat's turns."""

    def __init__(self, engine: Engine, sampling: Sampling, system: str | None) -> None:
        from edgec.runtime.chat import Chat, Message

        self._engine = engine
        self._sampling = sampling
        self._chat = Chat.of(engine)
        self._head = [Message("system", system)] if system is not None else []
        self._turns: list[Message] = []
        self._chat.tokens([*self._head, Message("user", "?")])  # no template: said before the user types

    @property
    def messages(self) -> list[Message]:
        return [*self._head, *self._turns]

    def command(self, line: str) -> str:
        """Do a `/command`; gives what to say about it."""
        if line == "/new":
            self._turns.clear()
            return "(a new conversation)"
        if line == "/drop":
            if not self._turns:
                return "(there is nothing to forget)"
            del self._turns[:2]
            return f"(forgotten; {len(self._turns) // 2} exchanges are left)"
        return _HELP if line in ("/help", "/?") else f"(no command {line}; /help lists them)"

    def say(self, text: str, *, stats: bool = False) -> None:
        """Answer; a question that doesn't fit is taken back, and said so."""
        from edgec.errors import EdgecError, Reason
        from edgec.runtime.chat import Message
        from edgec.runtime.timing import Timing

        self._turns.append(Message("user", text))
        before, timing, pieces = self._engine.stats(), Timing(), []
        try:
            tokens = self._chat.tokens(self.messages)
            with Interrupt() as interrupt:
                for event in interrupt.events(self._engine, tokens, self._sampling.with_seed()):
                    timing.add(event)
                    pieces.append(event.text)
                    show(event.text)
        except EdgecError as error:
            self._turns.pop()
            if error.reason is Reason.TOO_LONG:
                out.progress(f"(the context of {self._engine.context} tokens has no room for this. {_MORE_ROOM})")
                return
            if error.exit_code == 1:
                raise
            out.progress(f"({error.message})")
            return
        show("\n")
        self._turns.append(Message("assistant", "".join(pieces)))
        if timing.finish.name == "LENGTH":
            full = timing.prompt_tokens + timing.tokens >= self._engine.context
            why = (
                f"the context of {self._engine.context} tokens is full. {_MORE_ROOM}" if full else "cut at --max-tokens"
            )
            out.progress(f"({why})")
        if stats:
            for line in summary(self._engine, timing, self._engine.stats().since(before)):
                out.progress(line)


_MORE_ROOM = "/drop forgets the oldest question and its answer, /new the whole conversation"


def _read() -> str:
    with suppress(ImportError):
        import readline  # noqa: F401 - gives `input` a history and line editing
    return input("> ")
