"""Blocks and prefixes: who owns what, after whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgec.reference.block_manager import ROOT, BlockManager


class Colliding(int):
    """A token whose hash says nothing, so that only comparing tells prefixes apart."""

    def __hash__(self) -> int:
        return 0


def publish(manager: BlockManager, tokens: list[int], salt: int = 0) -> list[int]:
    """Own and publish the full blocks of `tokens`."""
    table, parent, size = [], ROOT, manager.block_size
    for start in range(0, len(tokens) - len(tokens) % size, size):
        block, parent = manager.publish(manager.allocate(), parent, salt, tokens[start : start + size])
        table.append(block)
    return table


def test_a_prefix_is_found_as_far_as_it_goes() -> None:
    manager = BlockManager(8, 2)
    table = publish(manager, [1, 2, 3, 4, 5, 6])
    assert manager.find_prefix([1, 2, 3, 4, 5, 6], 0, 3) == table
    assert manager.find_prefix([1, 2, 3, 4, 9, 9], 0, 3) == table[:2]
    assert manager.find_prefix([1, 2, 3, 4, 5, 6], 0, 1) == table[:1]
    assert manager.find_prefix([9, 2, 3, 4, 5, 6], 0, 3) == []
    assert manager.find_prefix([3, 4], 0, 1) == []  # the same tokens, with other ones before them


def test_salts_share_nothing() -> None:
    manager = BlockManager(8, 2)
    publish(manager, [1, 2], salt=7)
    assert manager.find_prefix([1, 2], 0, 1) == []
    assert len(manager.find_prefix([1, 2], 7, 1)) == 1


def test_colliding_hashes_never_mix_prefixes_up() -> None:
    manager = BlockManager(16, 2)
    chains = [[Colliding(t) for t in tokens] for tokens in ([1, 2, 3, 4], [1, 3, 3, 4], [2, 1, 3, 4])]
    tables = [publish(manager, list(chain)) for chain in chains]
    assert len({block for table in tables for block in table}) == 6
    for chain, table in zip(chains, tables, strict=True):
        assert manager.find_prefix(list(chain), 0, 2) == table


def test_an_equal_prefix_is_exchanged_for_the_known_one() -> None:
    manager = BlockManager(4, 2)
    [first] = publish(manager, [1, 2])
    [second] = publish(manager, [1, 2])
    assert first == second
    assert (manager.owners(first), manager.free, manager.owned) == (2, 3, 1)


def test_the_least_recently_used_prefix_gives_way_tail_first() -> None:
    manager = BlockManager(4, 1)
    old, new = publish(manager, [1, 2]), publish(manager, [3, 4])
    for table in (old, new):
        for block in reversed(table):
            manager.release(block)
    assert (manager.free, manager.cached) == (0, 4)
    manager.allocate()
    assert manager.find_prefix([1, 2], 0, 2) == old[:1]  # its tail went first
    manager.retain(old[0])  # used again: now the other one is the oldest
    manager.release(old[0])
    manager.allocate()
    assert manager.find_prefix([3, 4], 0, 2) == new[:1]
    assert manager.find_prefix([1], 0, 1) == old[:1]


def test_a_chain_whose_head_gave_way_is_not_found_under_another() -> None:
    manager = BlockManager(2, 1)
    head, tail = publish(manager, [1, 2])
    manager.release(head)
    manager.release(tail)
    again = manager.allocate()  # takes the head's block
    assert again == head
    manager.publish(again, ROOT, 0, [5])
    assert manager.find_prefix([5, 2], 0, 2) == [again]


def test_a_shared_block_is_copied_before_it_is_written() -> None:
    manager = BlockManager(3, 4)
    block = manager.allocate()
    assert manager.make_writable(block) == block
    manager.retain(block)
    own = manager.make_writable(block)
    assert own != block
    assert (manager.owners(block), manager.owners(own)) == (1, 1)


def test_no_block_is_left() -> None:
    manager = BlockManager(1, 4)
    manager.allocate()
    with pytest.raises(MemoryError, match="owned"):
        manager.allocate()


def test_trim_forgets_what_nobody_owns() -> None:
    manager = BlockManager(4, 1)
    one, two = publish(manager, [1, 2])
    manager.release(two)
    manager.trim()
    assert (manager.free, manager.cached, manager.owned) == (3, 0, 1)
    assert manager.find_prefix([1, 2], 0, 2) == [one]


@settings(max_examples=150, deadline=None)
@given(
    blocks=st.integers(1, 8),
    actions=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7), st.integers(0, 2)), max_size=60),
)
def test_the_books_balance_after_anything(blocks: int, actions: list[tuple[int, int, int]]) -> None:
    manager = BlockManager(blocks, 2)
    tables: list[list[int]] = []
    for action, which, token in actions:
        table = tables[which % len(tables)] if tables else None
        if action == 0 and manager.available:
            tables.append([manager.allocate()])
        elif action == 1 and table:
            for block in table:
                manager.retain(block)
            tables.append(list(table))
        elif action == 2 and table:
            for block in reversed(table):
                manager.release(block)
            table.clear()
        elif action == 3 and table and manager.available:
            table[0] = manager.make_writable(table[0])
            manager.set_filled(table[0], 1)
        elif action == 4 and table and manager.blocks[table[0]].key is None:
            table[0], _ = manager.publish(table[0], ROOT, 0, [token, token])
        elif action == 5:
            manager.trim()
        manager.check(tables)


def test_the_check_finds_a_lost_and_a_stolen_block() -> None:
    manager = BlockManager(2, 2)
    block = manager.allocate()
    with pytest.raises(AssertionError, match="stands in 0"):
        manager.check([])
    with pytest.raises(AssertionError, match="stands in 2"):
        manager.check([[block], [block]])
    manager._free.append(block)
    with pytest.raises(AssertionError, match="two states"):
        manager.check([[block]])
