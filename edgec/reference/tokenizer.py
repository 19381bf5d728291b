"""Text to tokens and back, over Hugging Face's `tokenizers`: independent of the core's own tokenizer.

What a user types stays text: special tokens written out in it are not recognised, as in the core.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from edgec.decoder import turn_ends
from edgec.errors import Reason, SourceError, UsageError
from edgec.runtime.chat import Chat, ChatTemplate, template_source, template_variables
from edgec.runtime.settings import read_settings, token_text


class ReferenceTokenizer:
    """A tokenizer.json with its settings and its chat template. Its methods may be called from any thread."""

    def __init__(self, source: bytes, settings: Mapping[str, Any], template: str | None = None) -> None:
        """
        Args:
            source: tokenizer.json.
            settings: what tokenizer_config.json says.
            template: the chat template, in jinja.

        Raises:
            SourceError: `tokenizers` can't read it, or its tokens can't be turned into bytes one by one.
        """
        self.settings = dict(settings)
        try:
            self._plain = tokenizers.Tokenizer.from_str(source.decode())
            self._special = tokenizers.Tokenizer.from_str(source.decode())
            data = json.loads(source)
            added = {int(token["id"]): token for token in data.get("added_tokens", ())}
        except Exception as error:  # `tokenizers` raises plain Exceptions
            raise _bad(f"tokenizer.json can't be read: {error}") from error
        for tokenizer in (self._plain, self._special):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self._plain.encode_special_tokens = True
        self.special = {i: str(token["content"]) for i, token in added.items() if token.get("special")}
        """Special tokens as text, by number."""
        self._added = {i: str(token["content"]) for i, token in added.items()}
        self._piece = _pieces(data)
        self.eos = turn_ends(added.values(), self.settings)
        """What ends an answer."""
        made = None
        if template is not None:
            made = ChatTemplate(template, tuple(self.special.values()), template_variables(self.settings))
        self.chat = Chat(made, self.encode)

    @staticmethod
    def open(folder: Path) -> ReferenceTokenizer | None:
        """The tokenizer of a model's folder; None when it has no tokenizer.json.

        Raises:
            SourceError, EngineError: a file is damaged.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            return None
        settings = read_settings(folder)
        return ReferenceTokenizer(path.read_bytes(), settings, template_source(folder, settings))

    @property
    def vocab_size(self) -> int:
        """The greatest token + 1; the model may have more."""
        return max(self._plain.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Tokens of `text`; `special` recognises special tokens that are written out in it (a chat template's)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"the text is not valid Unicode: {error.reason} at {error.start}") from error
        ids: list[int] = (self._special if special else self._plain).encode(text, add_special_tokens=False).ids
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """A plain prompt's tokens, with the beginning-of-sequence token where the model wants one."""
        begin = token_text(self.settings.get("bos_token")) if self.settings.get("add_bos_token") else ""
        return [*self.encode(begin, special=True), *self.encode(text)]

    def token_bytes(self, token: int) -> bytes:
        """A token's bytes, special tokens written out; none for a number outside the vocabulary."""
        if token in self._added:
            return self._added[token].encode()
        piece = self._plain.id_to_token(token) if token >= 0 else None
        return b"" if piece is None else self._piece(piece)

    def decode_bytes(self, tokens: Sequence[int], *, skip_special: bool = False) -> bytes:
        """Tokens to bytes, which may end inside a character."""
        return b"".join(self.token_bytes(t) for t in tokens if not (skip_special and t in self.special))

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Tokens to text; bytes that are no character become U+FFFD."""
        return self.decode_bytes(tokens, skip_special=skip_special).decode(errors="replace")

    def detokenizer(self) -> Detokenizer:
        """A new one, for one answer."""
        return Detokenizer(self)


class Detokenizer:
    """Tokens to whole characters as they come; joined, they are `ReferenceTokenizer.decode` of the whole answer."""

    def __init__(self, tokenizer: ReferenceTokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The characters that `token` completed; special tokens and ids outside the vocabulary are no text."""
        return self._stream.decode(self._tokenizer.decode_bytes([token], skip_special=True))

    def flush(self) -> str:
        """What is left at the end; an unfinished character is U+FFFD."""
        return self._stream.decode(b"", final=True)


class _ByteLevel:
    """GPT-2's alphabet: each byte is one printable character, its own where it has one."""

    @cached_property
    def _bytes(self) -> dict[str, int]:
        own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [b for b in range(256) if b not in own]
        return {chr(b): b for b in own} | {chr(256 + i): b for i, b in enumerate(others)}

    def __call__(self, piece: str) -> bytes:
        return bytes(self._bytes[c] for c in piece)


def _sentence_piece(piece: str) -> bytes:
    """SentencePiece's: `▁` is a space, and `<0x0A>` a byte. The space in front of a text's first word stays."""
    if found := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):
        return bytes([int(found[1], 16)])
    return piece.replace("▁", " ").encode()


def _pieces(data: Mapping[str, Any]) -> Any:
    """What turns a vocabulary's entry into bytes, by the decoder that tokenizer.json names."""
    decoder = data.get("decoder") or {}
    kinds = {decoder.get("type"), *(part.get("type") for part in decoder.get("decoders", ()))}
    if "ByteLevel" in kinds:
        return _ByteLevel()
    if kinds & {"ByteFallback", "Metaspace"}:
        return _sentence_piece
    raise _bad(f"its decoder {decoder.get('type')!r} has no bytes for single tokens")


def _bad(what: str) -> SourceError:
    return SourceError(
        f"the model's tokenizer: {what}",
        hint="the reference reads byte-level BPE and SentencePiece tokenizers",
        reason=Reason.BAD_CHECKPOINT,
    )
