"""The two sides of a validation: a *subject*, an engine of the bundle, and a *reference*.

Both score: a text's tokens in, what they think of each next token out. Both may answer prompts. What a side can't do it
refuses with `NotOffered`, and the check that needed it ends as unproven, with the refusal as its message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from edgec.runtime.sampling import Sampling
from edgec.validation.scores import Scores


class NotOffered(Exception):
    """This side can't do what a check needs; the message says what is missing."""


@dataclass
class Generated:
    """One answer: its tokens, and of each the log-probability and the likeliest alternatives, where known."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    cached: int = 0
    """Prompt tokens whose keys and values were there already."""


class Side(Protocol):
    """What subjects and references share."""

    label: str
    """What it is, for people: "native, avx512vnni" or "reference, INT8 weights"."""
    context: int
    """Positions that a sequence may have."""
    batch: int
    """Answers to one prompt that it can give in one request."""

    def score(self, tokens: Sequence[int]) -> Scores:
        """What is thought of tokens[1], …, tokens[-1], each after those before it.

        Raises:
            NotOffered: it can't score a text.
        """

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling]) -> list[Generated]:
        """An answer to each prompt.

        Raises:
            NotOffered: it can't answer, or not with this sampling.
        """

    def close(self) -> None:
        """Give everything back."""


class Subject(Side, Protocol):
    """An engine of the bundle. Its scores are whole: of every token of the vocabulary."""

    target: str


class Reference(Side, Protocol):
    """Something independent to hold it against."""

    name: str
    """A short name for findings: "int8", "float", "server"."""
    philox: bool
    """Draws the same random numbers for the same seed as the native engine."""
