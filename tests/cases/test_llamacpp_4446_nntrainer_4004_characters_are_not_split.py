"""llama.cpp#4446, nntrainer#4004: a UTF-8 character is split between two chunks of a stream.

Here: each piece is whole characters, and the pieces together are the text, byte for byte.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgec.runtime.tokenizer import Tokenizer
from tests.runtime.text_core import Detokenizer
from tests.runtime.tokenizer_files import train, write

TEXTS = [
    "안녕하세요, 세계! 오늘은 날씨가 정말 좋네요.",
    "👩‍👩‍👧‍👦 family, 👍🏽 thumbs, 🇰🇷 flag, 🏳️‍🌈 rainbow",
    "e\u0301a\u0308 中文字符 العربية ไทย हिन्दी 𝔘𝔫𝔦 \U0010ffff",
]


@cache
def tokenizer() -> Tokenizer:
    """So small a vocabulary that most of these characters are several tokens."""
    return Tokenizer(write(train("smollm", vocabulary=300), Path(mkdtemp()) / "tokenizer.json"))


@pytest.mark.parametrize("text", TEXTS)
def test_every_piece_is_whole_characters(text: str) -> None:
    tokens = tokenizer().encode(text)
    assert len(tokens) > len(text)  # characters are split between tokens: there is something to hold back
    pieces = Detokenizer(tokenizer()).pieces(tokens)
    assert b"".join(pieces) == text.encode()
    assert "".join(piece.decode() for piece in pieces) == text  # decode() raises on half a character


@settings(max_examples=300, deadline=None)
@given(tokens=st.lists(st.integers(0, 299), max_size=30))
def test_pieces_of_any_tokens_are_the_whole_text(tokens: list[int]) -> None:
    pieces = Detokenizer(tokenizer()).pieces(tokens)
    assert "".join(piece.decode() for piece in pieces) == tokenizer().decode(tokens)


def test_an_answer_that_ends_inside_a_character_says_so_at_the_end() -> None:
    half = tokenizer().encode("한")[:-1]
    assert Detokenizer(tokenizer()).pieces(half) == [b""] * len(half) + ["\ufffd".encode()]
