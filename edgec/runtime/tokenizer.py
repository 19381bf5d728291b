"""The core's tokenizer alone: text to tokens and back, as an engine on a phone does it.

tokenizer = Tokenizer(bundle / "tokenizer.json")
tokenizer.decode(tokenizer.encode("Hello"))
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from pathlib import Path

from edgec.errors import UsageError
from edgec.runtime import library
from edgec.runtime.abi import Status
from edgec.runtime.failures import EngineError, status_of


class Tokenizer:
    """A tokenizer.json, opened by the core; equal to Hugging Face's `tokenizers` without added special tokens.

    Args:
        path: a byte-level BPE tokenizer's file.
        core: the library; None takes the installed one.

    Raises:
        EngineError: there is no such file, it is corrupt, or it asks for what the core doesn't do.
    """

    def __init__(self, path: Path, core: ctypes.CDLL | None = None) -> None:
        self._core = core or library.load()
        self.handle = ctypes.c_void_p()
        """For the C ABI; valid while this object lives."""
        self._check(self._core.edgec_tokenizer_create(str(path).encode(), ctypes.byref(self.handle)))
        weakref.finalize(self, self._core.edgec_tokenizer_destroy, self.handle)

    @property
    def vocab_size(self) -> int:
        """The greatest token + 1."""
        return int(self._core.edgec_tokenizer_vocab_size(self.handle))

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Tokens of `text`.

        Args:
            special: recognise special tokens written out in it (a chat template's); else they are text like any other.
        """
        try:
            given = text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"the text is not valid Unicode: {error.reason} at {error.start}") from error
        count = ctypes.c_int32()
        capacity = len(given) + 1
        while True:
            tokens = (ctypes.c_int32 * capacity)()
            status = self._core.edgec_tokenizer_encode(
                self.handle, given, len(given), special, tokens, capacity, ctypes.byref(count)
            )
            if status != Status.BUFFER_TOO_SMALL:
                self._check(status)
                return tokens[: count.value]
            capacity = count.value

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `tokens`; what isn't valid UTF-8 in it becomes U+FFFD. Unknown tokens are no text."""
        given = (ctypes.c_int32 * len(tokens))(*tokens)
        size = ctypes.c_size_t()
        capacity = 16 * len(tokens)
        while True:
            text = ctypes.create_string_buffer(max(capacity, 1))
            status = self._core.edgec_tokenizer_decode(
                self.handle, given, len(given), skip_special, text, capacity, ctypes.byref(size)
            )
            if status != Status.BUFFER_TOO_SMALL:
                self._check(status)
                return text.raw[: size.value].decode(errors="replace")
            capacity = size.value

    def _check(self, status: int) -> None:
        if status != Status.OK:
            raise EngineError(status_of(status), self._core.edgec_last_error().decode(errors="replace"))
