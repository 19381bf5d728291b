"""vllm#44701: adapter names and salts were joined into a cache key in which different pairs looked the same.

Right behaviour: each part of a key has its tag and its length, so different parts are different keys.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from edgec.runtime.scheduling import prefix_key
from tests.scheduling_core import FakeEngine, core

PART = st.tuples(st.sampled_from(["a", "ab", "salt", "adapter"]), st.binary(max_size=6))
PARTS = st.lists(PART, max_size=3)


def test_parts_that_look_alike_when_joined_are_different_keys() -> None:
    pairs = [
        ([("salt", b"ab"), ("adapter", b"c")], [("salt", b"a"), ("adapter", b"bc")]),
        ([("salt", b"")], []),
        ([("salt", b"x")], [("adapter", b"x")]),
        ([("a", b"bc")], [("ab", b"c")]),
        ([("a", b"b\0")], [("a", b"b")]),
    ]
    for one, two in pairs:
        assert prefix_key(one, core()) != prefix_key(two, core())


@settings(max_examples=300, deadline=None, derandomize=True)
@given(PARTS, PARTS)
def test_keys_are_equal_only_for_equal_parts(one: list[tuple[str, bytes]], two: list[tuple[str, bytes]]) -> None:
    assert (prefix_key(one, core()) == prefix_key(two, core())) == (one == two)


def test_requests_share_prefixes_only_among_equal_keys() -> None:
    engine = FakeEngine(blocks=32, block_size=2, context=40, max_batch=1, step_tokens=16)
    keys = [
        [("salt", b"ab"), ("adapter", b"c")],
        [("salt", b"a"), ("adapter", b"bc")],
        [("salt", b"ab"), ("adapter", b"c")],
    ]
    for id, parts in enumerate(keys):
        engine.add(id, [1, 2, 3, 4, 5], answer=2, key=prefix_key(parts, core()))
    cached = []
    for id in range(3):
        engine.step()
        cached.append(engine.scheduler.sequence(id).cached_tokens)
        engine.step()
    assert cached == [0, 0, 4]
