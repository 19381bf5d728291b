"""The block pool: which block is given when, what is shared, what is forgotten, and that nothing is ever lost."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from edgec.runtime.failures import EngineError
from tests.scheduling_core import make_pool


def test_the_lowest_block_comes_first_and_the_last_freed_next() -> None:
    pool = make_pool(4, 16, first_block=10)
    assert [pool.allocate() for _ in range(3)] == [10, 11, 12]
    pool.release(10)
    pool.release(12)
    assert [pool.allocate() for _ in range(4)] == [12, 10, 13, None]


def test_the_least_recently_used_prefix_gives_way_and_its_tail_first() -> None:
    pool = make_pool(4, 2)
    old = pool.publish([pool.allocate() or 0, pool.allocate() or 0], [1, 2, 3, 4])
    new = pool.publish([pool.allocate() or 0, pool.allocate() or 0], [5, 6, 7, 8])
    for table in (old, new):
        for block in reversed(table):
            pool.release(block)
    assert (pool.counts.free, pool.counts.cached) == (0, 4)
    assert [pool.allocate() for _ in range(5)] == [old[1], old[0], new[1], new[0], None]


def test_a_prefix_is_found_as_far_as_it_goes() -> None:
    pool = make_pool(8, 2)
    table = pool.publish([pool.allocate() or 0 for _ in range(3)], [1, 2, 3, 4, 5, 6])
    assert pool.find([1, 2, 3, 4, 5, 6]) == table
    assert pool.find([1, 2, 3, 4, 5, 7]) == table[:2]
    assert pool.find([1, 2, 3]) == table[:1]
    assert pool.find([3, 4, 5, 6]) == []
    assert pool.find([1, 2, 3, 4], key=b"another") == []


def test_misuse_is_an_error_and_changes_nothing() -> None:
    pool = make_pool(2, 4, first_block=1)
    for wrong in (0, 3, -1):
        with pytest.raises(EngineError, match="no such block"):
            pool.retain(wrong)
    with pytest.raises(EngineError, match="nobody owns"):
        pool.release(1)
    with pytest.raises(EngineError, match="block_size"):
        make_pool(2, 0)
    assert pool.counts.free == 2


class PoolMachine(RuleBasedStateMachine):
    """Random use against a model that knows what each table must hold."""

    tables = Bundle("tables")
    colliding = False

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool(12, 2, first_block=3, colliding=self.colliding)
        self.owners: dict[int, int] = {}
        self.written: dict[int, tuple[bytes, tuple[int, ...]]] = {}  # block → key and all tokens up to its end

    def take(self) -> int | None:
        block = self.pool.allocate()
        if block is None:
            assert len(self.owners) == 12, "refused while a block is free or cached"
        else:
            assert block not in self.owners
            self.owners[block] = 1
            self.written.pop(block, None)
        return block

    @rule(target=tables, tokens=st.lists(st.integers(0, 2), min_size=2, max_size=8), key=st.sampled_from([b"", b"k"]))
    def publish(self, tokens: list[int], key: bytes) -> tuple[int, ...]:
        count = len(tokens) // 2
        hits = self.pool.find(tokens, key)
        for i, block in enumerate(hits):
            assert self.written[block] == (key, tuple(tokens[: 2 * i + 2])), "another prefix was served"
            self.pool.retain(block)
            self.owners[block] = self.owners.get(block, 0) + 1
        table = list(hits)
        while len(table) < count and (block := self.take()) is not None:
            self.written[block] = (key, tuple(tokens[: 2 * len(table) + 2]))
            table.append(block)
        published = self.pool.publish(table, tokens[: 2 * len(table)], key)
        assert published == table or len(hits) < len(table)
        for before, after in zip(table, published, strict=True):
            if before != after:
                self.let_go(before)
                self.owners[after] = self.owners.get(after, 0) + 1
        return tuple(published)

    @rule(target=tables)
    def fresh(self) -> tuple[int, ...]:
        block = self.take()
        return () if block is None else (block,)

    @rule(target=tables, table=tables.filter(bool))
    def share(self, table: tuple[int, ...]) -> tuple[int, ...]:
        if any(b not in self.owners for b in table):
            return ()
        for block in table:
            self.pool.retain(block)
            self.owners[block] += 1
        return table

    @rule(table=consumes(tables))
    def drop(self, table: tuple[int, ...]) -> None:
        if all(b in self.owners for b in table):
            for block in reversed(table):
                self.pool.release(block)
                self.let_go(block)

    @rule()
    def trim(self) -> None:
        self.pool.trim()
        assert self.pool.counts.cached == 0

    def let_go(self, block: int) -> None:
        self.owners[block] -= 1
        if not self.owners[block]:
            del self.owners[block]

    @invariant()
    def sound(self) -> None:
        self.pool.verify()
        counts = self.pool.counts
        assert counts.free + counts.cached + counts.owned == counts.total == 12
        assert counts.owned == len(self.owners)
        for block, owners in self.owners.items():
            assert self.pool.owners(block) == owners


class CollidingPoolMachine(PoolMachine):
    colliding = True


_SETTINGS = settings(max_examples=60, stateful_step_count=50, deadline=None, derandomize=True)
TestPool = PoolMachine.TestCase
TestPool.settings = _SETTINGS
TestCollidingPool = CollidingPoolMachine.TestCase
TestCollidingPool.settings = _SETTINGS
