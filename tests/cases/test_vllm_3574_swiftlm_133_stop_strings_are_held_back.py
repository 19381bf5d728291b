"""vllm#3574, SwiftLM#133: part of a stop string is streamed before the whole of it is recognised.

Here: text that may still become a stop string is held back until it can't be one; nothing from a stop string on is let
out, however the text is cut into pieces.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.text_core import StopMatcher

STRINGS = st.lists(st.text("ab한\n", min_size=1, max_size=4), min_size=1, max_size=4)


def wanted(text: str, stop: list[str]) -> str:
    """Up to the stop string that is complete first; of two that end together, the longer."""
    ends = [(text.find(s) + len(s), -len(s)) for s in stop if s in text]
    if not ends:
        return text
    end, length = min(ends)
    return text[: end + length]


def test_no_part_of_a_stop_string_is_let_out() -> None:
    matcher = StopMatcher("<|im_end|>", "User:")
    assert matcher.push("Hi<|im") == b"Hi"
    assert matcher.push("_end|") == b""
    assert matcher.push("> and more") == b""
    assert matcher.stopped
    assert matcher.push("still more") == b""
    assert matcher.flush() == b""


def test_what_turns_out_not_to_be_one_is_let_out_at_once() -> None:
    matcher = StopMatcher("User:")
    assert matcher.push("the U") == b"the "
    assert matcher.push("s") == b""
    assert matcher.push("A") == b"UsA"
    assert matcher.push("Use") == b""
    assert matcher.flush() == b"Use"


@settings(max_examples=400, deadline=None)
@given(stop=STRINGS, pieces=st.lists(st.text("ab한\n😀", max_size=4), max_size=10))
def test_any_pieces_give_the_text_up_to_the_first_stop(stop: list[str], pieces: list[str]) -> None:
    assert StopMatcher(*stop).run(pieces) == wanted("".join(pieces), stop)


@settings(max_examples=200, deadline=None)
@given(stop=STRINGS, text=st.text("ab한\n", max_size=12))
def test_what_is_held_back_could_become_a_stop_string(stop: list[str], text: str) -> None:
    matcher = StopMatcher(*stop)
    out = b"".join(matcher.push(c) for c in text).decode()
    if not matcher.stopped:
        held = text.removeprefix(out)
        assert out + held == text
        longest = max((n for s in stop for n in range(len(s)) if text.endswith(s[:n])), default=0)
        assert len(held) == longest
