"""One answer in the making: its tokens, its blocks, and how far it has been computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from edgec.reference.block_manager import ROOT


class State(Enum):
    WAITING = auto()  # holds no blocks
    RUNNING = auto()
    FINISHED = auto()


@dataclass(eq=False)
class Sequence:
    """What the scheduler knows of an answer; what it says, as text, is the engine's.

    Attributes:
        tokens: prompt and answer.
        prompt: how many of them are the prompt's.
        max_total: tokens that it may have in the end.
        ticket: its place among all sequences, in the order of their arrival.
        places: sequences that it will be once its prompt is computed: the request's n, and 1 from then on.
        salt: prefixes are shared only among equal salts.
        compute_all: logits are wanted of every position, so what nobody has computed yet is not taken from the cache.
        table: its blocks, in order.
        computed: positions whose keys and values are in its blocks.
        published: blocks of the table that others can find, from the first on; `parent` is the last one's identity.
        most: the greatest `computed` ever, by which recomputation is told from computation.
        cached: prompt positions that came from the prefix cache when it first started; None before.
    """

    number: tuple[int, int]  # the request's, and which of its answers
    tokens: list[int]
    prompt: int
    max_total: int
    priority: int = 0
    ticket: int = 0
    places: int = 1
    salt: int = 0
    compute_all: bool = False
    state: State = State.WAITING
    table: list[int] = field(default_factory=list)
    computed: int = 0
    published: int = 0
    parent: int = ROOT
    most: int = 0
    cached: int | None = None

    @property
    def pending(self) -> int:
        """Tokens that have not gone through the model yet; a running sequence has at least one."""
        return len(self.tokens) - self.computed

    @property
    def room(self) -> int:
        """Tokens that may still be appended."""
        return self.max_total - len(self.tokens)

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: the greater priority, then who came first."""
        return (-self.priority, self.ticket)
