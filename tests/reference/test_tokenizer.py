"""The reference's tokenizer: Hugging Face's `tokenizers` with special tokens as text, and streaming."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from edgec.errors import SourceError, UsageError
from edgec.reference.tokenizer import ReferenceTokenizer
from edgec.runtime.chat import Message
from tests.reference.checkpoints import END, write_tokenizer
from tests.runtime.tokenizer_files import STYLES, TEXT, train

BEGIN = 256


@pytest.fixture
def tokenizer(tmp_path: Path) -> ReferenceTokenizer:
    write_tokenizer(tmp_path)
    found = ReferenceTokenizer.open(tmp_path)
    assert found is not None
    return found


@pytest.mark.parametrize("style", STYLES)
def test_text_is_encoded_as_hugging_face_does_and_comes_back(style: str) -> None:
    source = train(style).to_str()
    ours, theirs = ReferenceTokenizer(source.encode(), {}), Tokenizer.from_str(source)
    theirs.encode_special_tokens = True
    tokens = ours.encode(TEXT)
    assert tokens == theirs.encode(TEXT, add_special_tokens=False).ids
    assert ours.decode(tokens, skip_special=False) == theirs.decode(tokens, skip_special_tokens=False)
    assert "".join(map(ours.detokenizer().push, tokens)) == ours.decode(tokens)


def test_special_tokens_are_text_unless_asked_for(tokenizer: ReferenceTokenizer) -> None:
    assert len(tokenizer.encode("<|im_end|>")) == len("<|im_end|>")
    assert tokenizer.encode("<|im_end|>", special=True) == [END]
    assert tokenizer.eos == (END,)
    assert tokenizer.token_bytes(END) == b"<|im_end|>" and tokenizer.token_bytes(9999) == b""
    assert tokenizer.decode([END, *tokenizer.encode("a"), END]) == "a"
    assert tokenizer.decode([END, *tokenizer.encode("a")], skip_special=False) == "<|im_end|>a"


def test_a_message_can_t_end_itself(tokenizer: ReferenceTokenizer) -> None:
    tokens = tokenizer.chat.tokens([Message("user", "a<|im_end|>b")])
    assert tokens.count(END) == 1 and tokens[0] == BEGIN


def test_a_beginning_is_added_where_the_model_wants_one(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|im_start|>", "add_bos_token": True}))
    tokenizer = ReferenceTokenizer.open(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode_prompt("a") == [BEGIN, *tokenizer.encode("a")]


@given(st.lists(st.integers(0, END), max_size=30))
def test_pieces_join_to_the_whole_and_never_split_a_character(tokens: list[int]) -> None:
    tokenizer = _byte_tokenizer()
    stream = tokenizer.detokenizer()
    pieces = [stream.push(token) for token in tokens]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(tokens)


_MADE: list[ReferenceTokenizer] = []


def _byte_tokenizer() -> ReferenceTokenizer:
    if not _MADE:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
        _MADE.append(ReferenceTokenizer(made.to_str().encode(), {}))
    return _MADE[0]


def test_sentence_piece_s_spaces_and_bytes_are_read() -> None:
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁a", "b", "▁"]
    made = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = ReferenceTokenizer(made.to_str().encode(), {})
    e_acute = [1 + b for b in "é".encode()]
    stream = tokenizer.detokenizer()
    assert [stream.push(t) for t in (257, 258, *e_acute)] == [" a", "b", "", "é"]


def test_what_can_t_be_turned_into_bytes_is_refused() -> None:
    made = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    with pytest.raises(SourceError, match="decoder 'WordPiece'"):
        ReferenceTokenizer(made.to_str().encode(), {})
    with pytest.raises(SourceError, match="can't be read"):
        ReferenceTokenizer(b"{}", {})


def test_lone_surrogates_are_refused(tokenizer: ReferenceTokenizer) -> None:
    with pytest.raises(UsageError, match="not valid Unicode"):
        tokenizer.encode("\ud800")
