"""Tokens to text as they come, and the strings that end it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Tokens to whole characters, one token at a time."""

    def push(self, token: int) -> str:
        """The characters that `token` completed; special tokens and ids outside the vocabulary are no text."""

    def flush(self) -> str:
        """What is left at the end; an unfinished character is U+FFFD."""


class TextTokenizer(Protocol):
    """What the engine needs of a tokenizer; `tokenizer.ReferenceTokenizer` is one."""

    def detokenizer(self) -> Detokenizer:
        """A new one, for one answer."""


class StopStrings:
    """Lets text through until a stop string is complete; what may still become one is held back.

    The string that is complete first wins, however the text was cut into pieces; of two that end together the longer.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """What is certain to be text now; nothing any more once `stopped`."""
        if not self._stops:
            return text
        out = ""
        for character in text:
            if self.stopped:
                break
            self._held += character
            if stop := next((s for s in self._stops if self._held.endswith(s)), None):
                self.stopped = True
                out += self._held.removesuffix(stop)
                self._held = ""
            else:
                at = next((i for i in range(len(self._held)) if self._held[i:] in self._beginnings), len(self._held))
                out += self._held[:at]
                self._held = self._held[at:]
        return out

    def flush(self) -> str:
        """The text has ended: what was held back is text after all."""
        held, self._held = self._held, ""
        return held
