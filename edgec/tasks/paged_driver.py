"""Drives the paged step graph through a Runner: block tables, slots, padding. The scheduler in miniature.

Used to record inputs and to evaluate artefacts, so that both go through the shapes a device will use. `Placed` is a
sequence in blocks; `prefill_feed` and `decode_feed` turn its new tokens into a signature's inputs.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from edgec.model import Runner

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class PagedShape:
    """The fixed sizes of a paged step graph; `blocks` counts block 0, which only takes padding."""

    block_size: int
    blocks: int
    blocks_per_sequence: int
    batch: int  # rows of `decode`
    chunk: int  # tokens of `prefill`

    @property
    def slots(self) -> int:
        return self.blocks * self.block_size

    @property
    def context(self) -> int:
        """Positions that a sequence can have."""
        return self.blocks_per_sequence * self.block_size

    @property
    def sequences(self) -> int:
        """Full-length sequences that fit into a decode batch and into the pools."""
        return min(self.batch, (self.blocks - 1) // self.blocks_per_sequence)


@dataclass
class Placed:
    """A sequence in the pools: the blocks it owns, and how many of its positions are filled."""

    shape: PagedShape
    blocks: list[int] = field(default_factory=list)
    length: int = 0

    def table(self) -> np.ndarray:
        """(blocks_per_sequence,) int32; unused entries are 0."""
        table = np.zeros(self.shape.blocks_per_sequence, np.int32)
        table[: len(self.blocks)] = self.blocks
        return table

    def extend(self, count: int, free: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Make room for `count` more tokens; gives their positions and slots, each (count,) int32."""
        positions = np.arange(self.length, self.length + count, dtype=np.int32)
        self.length += count
        while len(self.blocks) * self.shape.block_size < self.length:
            self.blocks.append(free.pop(0))
        size = self.shape.block_size
        return positions, self.table()[positions // size] * size + positions % size


def free_blocks(shape: PagedShape) -> list[int]:
    return list(range(1, shape.blocks))


def prefill_feed(shape: PagedShape, sequence: Placed, tokens: np.ndarray, free: list[int]) -> Arrays:
    """Inputs of `prefill` for up to `chunk` new tokens of one sequence, padded behind."""
    feed = _padding(1, shape.chunk, shape)
    positions, slots = sequence.extend(len(tokens), free)
    for name, values in (("tokens", tokens), ("positions", positions), ("slot_mapping", slots)):
        feed[name][0, : len(tokens)] = values
    feed["block_table"][0] = sequence.table()
    return feed


def decode_feed(shape: PagedShape, rows: Items[tuple[Placed, int]], free: list[int]) -> Arrays:
    """Inputs of `decode` for one new token of each of up to `batch` sequences; the other rows are padding."""
    feed = _padding(shape.batch, 1, shape)
    for row, (sequence, token) in enumerate(rows):
        positions, slots = sequence.extend(1, free)
        feed["tokens"][row], feed["positions"][row], feed["slot_mapping"][row] = token, positions, slots
        feed["block_table"][row] = sequence.table()
    return feed


def _padding(batch: int, length: int, shape: PagedShape) -> Arrays:
    """Token 0 at position 0 in slot 0: every padding position computes and writes the same (see paged.py)."""
    feed = {name: np.zeros((batch, length), np.int32) for name in ("tokens", "positions", "slot_mapping")}
    feed["block_table"] = np.zeros((batch, shape.blocks_per_sequence), np.int32)
    return feed


def score(runner: Runner, shape: PagedShape, windows: np.ndarray, decode_tokens: int) -> np.ndarray:
    """Logits after each token but the last of each window, (N, length − 1, vocab) float32.

    The N windows (at most `shape.sequences`) share the pools: each is prefilled in chunks but for its last
    `decode_tokens` tokens, which are decoded in one batch. `runner` keeps the state (see golden.Carrying).
    """
    count, length = windows.shape
    prefilled = length - 1 - decode_tokens
    free, sequences = free_blocks(shape), [Placed(shape) for _ in range(count)]
    logits: list[list[np.ndarray]] = [[] for _ in range(count)]
    for start in range(0, prefilled, shape.chunk):
        for i, sequence in enumerate(sequences):  # chunk by chunk, so that their blocks interleave
            tokens = windows[i, start : min(start + shape.chunk, prefilled)]
            feed = prefill_feed(shape, sequence, tokens, free)
            logits[i].append(runner.run("prefill", feed)["logits"][0, : len(tokens)])
    for position in range(prefilled, length - 1):
        rows = [(s, int(windows[i, position])) for i, s in enumerate(sequences)]
        out = runner.run("decode", decode_feed(shape, rows, free))["logits"]  # (batch, 1, vocab)
        for i in range(count):
            logits[i].append(out[i])
    return np.stack([np.concatenate(parts) for parts in logits])
