"""The core's tokenizer against Hugging Face's, token for token and byte for byte."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Reference

from edgec.errors import UsageError
from edgec.runtime.abi import Status
from edgec.runtime.compile import NATIVE
from edgec.runtime.failures import EngineError
from edgec.runtime.tokenizer import Tokenizer
from edgec.store import default_root
from tests.conftest import REPOSITORY
from tests.runtime.text_core import Detokenizer
from tests.runtime.tokenizer_files import ADDED, ADDED_TEXT, SPECIAL, STYLES, TEXT, byte_characters, train, write

PIECES = [
    *(t.content for t in [*SPECIAL, *ADDED]),
    *("'s", "'S", "'LL", "'ll", "'Re", "'ſ", "'", "''", ",", "?!", "½", "Ⅷ", "١٢", "1", "12", "123456"),
    *("wordy", "é", "e\u0301", "한글", "한", "世界", "👩\u200d👩\u200d👧", "\ufffd", "\r\n", "\n", "\t", "\x00"),
    *("", " ", "  ", "    ", "\u00a0", "\u3000", "\n\n", " \n ", "word", "a" * 70, "abc" * 40),
]
# Any character but surrogates, which are no text: assigned or not, private or not.
CHARACTERS = st.characters(exclude_categories=("Cs",))
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(CHARACTERS, max_size=6)), max_size=12).map("".join)


@cache
def pair(style: str, added: bool = False, alphabet: bool = True, ignore_merges: bool = False) -> tuple[Any, Tokenizer]:
    path = Path(mkdtemp()) / "tokenizer.json"
    write(train(style, added=added, alphabet=alphabet), path, ignore_merges=ignore_merges)
    return Reference.from_file(str(path)), Tokenizer(path)


def assert_equal(reference: Any, tokenizer: Tokenizer, text: str) -> None:
    for special in (True, False):
        reference.encode_special_tokens = not special
        wanted = reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, special=special) == wanted, (text, special)
        for skip in (True, False):
            assert tokenizer.decode(wanted, skip_special=skip) == reference.decode(wanted, skip_special_tokens=skip)


@pytest.mark.parametrize("style", STYLES)
def test_large_mixed_text_is_equal(style: str) -> None:
    reference, tokenizer = pair(style)
    assert tokenizer.vocab_size == reference.get_vocab_size()
    shuffled = random.Random(0).sample(TEXT.splitlines() * 40, 400)
    assert_equal(reference, tokenizer, "".join(line + "\n" for line in shuffled))
    for line in TEXT.splitlines():
        assert_equal(reference, tokenizer, line)


@pytest.mark.slow
@pytest.mark.parametrize("style", ["smollm", "gpt2", "llama3", "qwen2"])
def test_every_class_of_character_is_split_equally(style: str, tmp_path: Path) -> None:
    """A letter, a number and a mark each merge with the last byte of the character before them, if in one word with it:
    so the tokens show what the character was taken for."""
    trained = train(style, vocabulary=0)
    model = json.loads(trained.to_str())["model"]
    spelling = {bytes([b]): c for b, c in zip(range(256), byte_characters(), strict=True)}
    merges = [[spelling[bytes([b])], after] for b in range(0x80, 0xC0) for after in "b1!"]
    vocabulary = {token: i for i, token in enumerate([*model["vocab"], *("".join(m) for m in merges)])}
    path = write(trained, tmp_path / "t.json", vocab=vocabulary, merges=merges)
    reference, tokenizer = Reference.from_file(str(path)), Tokenizer(path)
    common = set(range(0x3400, 0xA000)) | set(range(0xAC00, 0xE000)) | set(range(0x20000, 0x110000))
    points = [c for c in range(0x80, 0x110000) if not 0xD800 <= c < 0xE000 and (c not in common or c % 31 == 0)]
    texts = [f"{chr(c)}b {chr(c)}1 {chr(c)}!" for c in points]
    for text, wanted in zip(texts, reference.encode_batch(texts, add_special_tokens=False), strict=True):
        assert tokenizer.encode(text) == wanted.ids, text


@pytest.mark.slow
def test_the_table_of_classes_is_that_of_the_library() -> None:
    """For all code points; the script asks the library about each."""
    subprocess.run([sys.executable, NATIVE / "scripts/unicode_tables.py", "--check"], check=True)


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=TEXTS)
def test_random_text_is_equal(style: str, text: str) -> None:
    assert_equal(*pair(style), text)


@pytest.mark.parametrize("style", ["smollm", "gpt2-prefix", "qwen2"])
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=TEXTS)
def test_random_text_with_added_tokens_of_every_kind_is_equal(style: str, text: str) -> None:
    assert_equal(*pair(style, added=True), text)


@pytest.mark.parametrize("style", STYLES)
def test_added_tokens_take_the_space_beside_them_equally(style: str) -> None:
    assert_equal(*pair(style, added=True), ADDED_TEXT)


@pytest.mark.parametrize("style", STYLES)
def test_contractions_are_equal(style: str, tmp_path: Path) -> None:
    """The letter after a contraction merges with the letter before it, if they are in one word: tokens show the cut."""
    trained = train(style, vocabulary=0)
    vocabulary = json.loads(trained.to_str())["model"]["vocab"]
    ends = [*"stmdelSTMDEL", byte_characters()[0xBF]]  # 0xBF ends ſ
    merges = [[end, "x"] for end in ends]
    vocabulary |= {"".join(m): len(vocabulary) + i for i, m in enumerate(merges)}
    path = write(trained, tmp_path / "t.json", vocab=vocabulary, merges=merges)
    for letters in ("s", "t", "m", "d", "re", "ve", "ll", "S", "rE", "Ll", "ſ", "r", "l", "lſ", "e"):
        assert_equal(Reference.from_file(str(path)), Tokenizer(path), f"a'{letters}x '{letters}x ''{letters}x")


def test_ties_in_long_words_merge_from_the_left() -> None:
    """Longer than what the short-word merge takes, and an odd number of equal letters."""
    reference, tokenizer = pair("gpt2")
    for letter in "aeo=-":
        for size in (33, 65, 101, 255):
            assert_equal(reference, tokenizer, letter * size)
    trained = train("gpt2", vocabulary=0)
    vocabulary = json.loads(trained.to_str())["model"]["vocab"]
    vocabulary |= {"aa": len(vocabulary), "aaa": len(vocabulary) + 1}
    path = write(trained, Path(mkdtemp()) / "t.json", vocab=vocabulary, merges=[["a", "a"], ["aa", "a"]])
    for size in range(30, 80):
        assert_equal(Reference.from_file(str(path)), Tokenizer(path), "a" * size)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_bytes_without_a_token_are_dropped_as_there(text: str) -> None:
    assert_equal(*pair("smollm", alphabet=False), text)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_ignored_merges_are_equal(text: str) -> None:
    assert_equal(*pair("llama3", ignore_merges=True), text)


@settings(max_examples=300, deadline=None)
@given(tokens=st.lists(st.integers(0, 720), max_size=40))
def test_random_tokens_decode_equally(tokens: list[int]) -> None:
    """Also where they are no UTF-8, or no tokens at all; streamed too."""
    reference, tokenizer = pair("smollm", added=True)
    for skip in (True, False):
        wanted = reference.decode(tokens, skip_special_tokens=skip)
        assert tokenizer.decode(tokens, skip_special=skip) == wanted
        assert b"".join(Detokenizer(tokenizer, skip_special=skip).pieces(tokens)).decode() == wanted


@pytest.mark.parametrize("fuse", [False, True])
def test_unknown_token_is_equal(tmp_path: Path, fuse: bool) -> None:
    path = write(train("gpt2", alphabet=False), tmp_path / "t.json", unk_token="<|endoftext|>", fuse_unk=fuse)
    for text in ("ʚʚʚ", "a\U00020000b", TEXT, "\u0600\u0700ʚ "):
        assert_equal(Reference.from_file(str(path)), Tokenizer(path), text)


def test_merges_as_strings_are_equal(tmp_path: Path) -> None:
    trained = train("smollm")
    merges = [" ".join(m) for m in json.loads(trained.to_str())["model"]["merges"]]
    path = write(trained, tmp_path / "t.json", merges=merges)
    assert_equal(trained, Tokenizer(path), TEXT)


@pytest.mark.slow
def test_one_word_of_two_million_bytes() -> None:
    """A quadratic merge would take days."""
    reference, tokenizer = pair("gpt2")
    text = "abcde" * 400_000
    assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False).ids


def test_encode_grows_beyond_a_token_per_byte() -> None:
    """A space before each digit: more tokens than bytes."""
    reference, tokenizer = pair("digit-runs")
    assert_equal(reference, tokenizer, "1a2b3c4d5e" * 10)


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(UsageError, match="not valid Unicode"):
        pair("gpt2")[1].encode("a\ud800")


UNKNOWN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "model": (lambda f: f["model"].update(type="WordPiece"), "WordPiece"),
    "normalizer": (lambda f: f.update(normalizer={"type": "NFC"}), "NFC"),
    "regex": (
        lambda f: f.update(
            pre_tokenizer={"type": "Split", "pattern": {"Regex": r"\w+|x"}, "behavior": "Isolated", "invert": False}
        ),
        r"\\w\+\|x",
    ),
    "pre-tokenizer": (lambda f: f.update(pre_tokenizer={"type": "Metaspace"}), "Metaspace"),
    "decoder": (lambda f: f.update(decoder={"type": "Fuse"}), "Fuse"),
    "byte fallback": (lambda f: f["model"].update(byte_fallback=True), "byte_fallback"),
    "dropout": (lambda f: f["model"].update(dropout=0.1), "dropout"),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_is_not_known_is_refused_by_name(what: str, tmp_path: Path) -> None:
    change, name = UNKNOWN[what]
    content = json.loads(train("gpt2").to_str())
    change(content)
    (tmp_path / "t.json").write_text(json.dumps(content))
    with pytest.raises(EngineError, match=name) as caught:
        Tokenizer(tmp_path / "t.json")
    assert caught.value.status is Status.UNSUPPORTED


def test_a_truncated_file_is_corrupt_at_every_length(tmp_path: Path) -> None:
    text = train("gpt2", alphabet=False, vocabulary=100).to_str().encode()
    for size in range(0, len(text), 97):
        (tmp_path / "t.json").write_bytes(text[:size])
        with pytest.raises(EngineError) as caught:
            Tokenizer(tmp_path / "t.json")
        assert caught.value.status is Status.CORRUPT


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"can't open .*nothing\.json") as caught:
        Tokenizer(tmp_path / "nothing.json")
    assert caught.value.status is Status.NOT_FOUND


@pytest.mark.network
def test_smollm2_is_equal(tmp_path: Path) -> None:
    """The tokenizer of recipes/smollm2-135m.yaml, fetched as that recipe does."""
    from edgec.recipe import load_recipe
    from edgec.sources.fetch import fetch
    from edgec.sources.gguf_header import read_gguf_header
    from edgec.sources.gguf_tokenizer import build_tokenizer

    recipe = REPOSITORY / "recipes/smollm2-135m.yaml"
    model = load_recipe(recipe).model
    path = fetch(str(model.from_), model.sha256, recipe_dir=recipe.parent, cache=default_root())
    reference = build_tokenizer(read_gguf_header(path).metadata, path)
    reference.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    for line in TEXT.splitlines(keepends=True):
        assert_equal(reference, tokenizer, line)
    draw = random.Random(0)
    for _ in range(3000):
        assert_equal(reference, tokenizer, "".join(draw.choice(PIECES) for _ in range(draw.randrange(20))))
