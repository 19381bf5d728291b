"""Tokens to text as they come, and the strings that end it."""

from __future__ import annotations

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
