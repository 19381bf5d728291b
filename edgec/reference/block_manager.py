"""Which block of the KV pool belongs to whom, and which prefix is in it. Holds no tensors.

Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention" (2023). A block is *free*, *cached* (it
has no owner, but its prefix can still be found), or *owned* by sequences: free + cached + owned == total.

**Prefixes.** A full block is published under `(parent's serial, salt, its tokens)`. Serials are given out once and
never again, so by induction two chains meet in one block only when all their tokens, from the first on, are equal. The
index is a dict, which finds a key by its hash and then compares it in full: hashes that collide cost time, never an
answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ROOT = 0  # the parent of a first block

Key = tuple[int, int, tuple[int, ...]]


@dataclass
class Block:
    owners: int = 0
    filled: int = 0  # positions with keys and values, while it is owned
    serial: int = ROOT  # of the prefix that is in it; ROOT: not published
    key: Key | None = None


class BlockManager:
    """Gives out blocks 0 … `blocks` − 1 of `block_size` positions."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = [Block() for _ in range(blocks)]
        self.owned_tokens = 0  # positions filled in owned blocks; a shared block counts once
        self._free = list(range(blocks - 1, -1, -1))  # the one freed last is taken first
        self._cached: dict[int, None] = {}  # a dict keeps the order of insertion: the least recently used comes first
        self._index: dict[Key, int] = {}
        self._serials = ROOT

    # ---- Owners

    @property
    def total(self) -> int:
        return len(self.blocks)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def owned(self) -> int:
        return self.total - self.free - self.cached

    @property
    def available(self) -> int:
        """How often `allocate` would succeed."""
        return self.free + self.cached

    def owners(self, number: int) -> int:
        return self.blocks[number].owners

    def allocate(self) -> int:
        """An empty block with one owner; the least recently used prefix gives way when none is free.

        Raises:
            MemoryError: every block is owned. Callers look at `available` first.
        """
        if self._free:
            number = self._free.pop()
        elif self._cached:
            number = next(iter(self._cached))
            del self._cached[number]
            self.forget(number)
        else:
            raise MemoryError("every block is owned")
        self.blocks[number].owners = 1
        return number

    def retain(self, number: int) -> None:
        """One owner more; takes a cached block back into use."""
        block = self.blocks[number]
        if not block.owners:
            del self._cached[number]
            self.set_filled(number, self.block_size)
        block.owners += 1

    def release(self, number: int) -> None:
        """One owner less. Without owners, a published block is cached, another one free."""
        block = self.blocks[number]
        assert block.owners > 0, f"block {number} has no owner"
        block.owners -= 1
        if block.owners:
            return
        self.set_filled(number, 0)
        if block.key is not None:
            self._cached[number] = None
        else:
            self._free.append(number)

    def make_writable(self, number: int) -> int:
        """Copy-on-write: the block itself when it has one owner, else an empty one in exchange for the caller's share.

        The caller copies the contents.
        """
        if self.owners(number) == 1:
            self.forget(number)  # what it held is about to change
            return number
        own = self.allocate()
        self.release(number)
        return own

    def set_filled(self, number: int, positions: int) -> None:
        block = self.blocks[number]
        self.owned_tokens += positions - block.filled
        block.filled = positions

    # ---- Prefixes

    def publish(self, number: int, parent: int, salt: int, tokens: Sequence[int]) -> tuple[int, int]:
        """Let others find this full, owned block. Gives the block to use from now on, and its serial.

        When an equal prefix is published already, the caller's share of his block is exchanged for a share of that one.
        """
        key = (parent, salt, tuple(tokens))
        known = self._index.get(key)
        if known is None:
            block = self.blocks[number]
            self._serials += 1
            block.serial, block.key = self._serials, key
            self._index[key] = number
            return number, block.serial
        if known != number:
            self.retain(known)
            self.release(number)
        return known, self.blocks[known].serial

    def find_prefix(self, tokens: Sequence[int], salt: int, most: int) -> list[int]:
        """The blocks of the longest published prefix of `tokens`, at most `most`. Changes nothing: `retain` them."""
        found: list[int] = []
        parent = ROOT
        for start in range(0, most * self.block_size, self.block_size):
            number = self._index.get((parent, salt, tuple(tokens[start : start + self.block_size])))
            if number is None:
                break
            found.append(number)
            parent = self.blocks[number].serial
        return found

    def trim(self) -> None:
        """Forget every prefix that has no owner."""
        for number in self._cached:
            self.forget(number)
            self._free.append(number)
        self._cached.clear()

    def forget(self, number: int) -> None:
        """Let nobody find this block any more; it may not be cached."""
        block = self.blocks[number]
        if block.key is not None:
            del self._index[block.key]
            block.key, block.serial = None, ROOT

    # ---- Looking

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Hold the books against the block tables of everyone who owns something.

        Raises:
            AssertionError: with what is wrong.
        """
        counted = [0] * self.total
        for table in tables:
            for number in table:
                counted[number] += 1
        for number, block in enumerate(self.blocks):
            assert block.owners == counted[number], (
                f"block {number} has {block.owners} owners, and stands in {counted[number]} block tables"
            )
        free, cached = set(self._free), set(self._cached)
        owned = {number for number, block in enumerate(self.blocks) if block.owners}
        assert len(free) == self.free, "a block is free twice"
        assert not (free & cached or free & owned or cached & owned), "a block is in two states"
        assert len(free) + len(cached) + len(owned) == self.total, (
            f"{len(free)} free + {len(cached)} cached + {len(owned)} owned blocks are not {self.total}"
        )
        assert self.owned == len(owned), "the number of owned blocks is wrong"
        for number in free:
            assert self.blocks[number].key is None, f"block {number} is free, and published"
        for number in cached:
            assert self.blocks[number].key is not None, f"block {number} is cached, and not published"
        published = {block.key: number for number, block in enumerate(self.blocks) if block.key is not None}
        assert published == self._index, "the index of prefixes does not fit the blocks"
        assert self.owned_tokens == sum(block.filled for block in self.blocks), "the filled positions are miscounted"
        assert all(not b.filled for b in self.blocks if not b.owners), "a block without owner counts as filled"
