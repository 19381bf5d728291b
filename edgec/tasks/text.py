"""Text as token windows: fetched, tokenised with the model's own tokenizer, cut into pieces of one length."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import ConfigDict, Field

from edgec.errors import Reason, SourceError
from edgec.registry import Options

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from edgec.tasks.base import TaskContext

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_SETTINGS = "tokenizer_config.json"


class TextOptions(Options):
    """A text file, UTF-8."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, populate_by_name=True)

    source: str = Field(alias="from", description="reference to the file, as in `model: from:`")
    sha256: str | None = Field(None, description="SHA-256 of the file; required for everything but a local path")
    skip: int = Field(0, ge=0, description="characters to leave out at the start (a preface, a licence)")


def load_tokenizer(context: TaskContext) -> Tokenizer:
    """The tokenizer that came with the model.

    Raises:
        SourceError: the model has none, or it can't be read.
    """
    from tokenizers import Tokenizer

    path = (context.model_dir or Path()) / TOKENIZER_FILE
    if context.model_dir is None or not path.is_file():
        raise SourceError(
            "the model came without a tokenizer.json, which a language task needs",
            hint="take the model from a GGUF file or from a Hugging Face folder that holds tokenizer.json",
            reason=Reason.BAD_CHECKPOINT,
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as cause:
        raise SourceError(f"{path} is not a tokenizer: {cause}", reason=Reason.BAD_CHECKPOINT) from cause


def load_tokens(text: TextOptions, context: TaskContext) -> np.ndarray:
    """All tokens of a text, (N,) int32, without special tokens.

    Raises:
        SourceError: the text can't be had, isn't UTF-8, or is empty.
    """
    from edgec.sources.fetch import fetch

    path = fetch(text.source, text.sha256, recipe_dir=context.recipe_dir, cache=context.cache)
    try:
        content = path.read_text(encoding="utf-8")[text.skip :]
    except UnicodeDecodeError as cause:
        raise SourceError(f"{path} is not UTF-8 text: {cause}", reason=Reason.EMPTY_DATA) from cause
    if not content.strip():
        raise SourceError(
            f"{path} holds no text" + (f" after its first {text.skip} characters" if text.skip else ""),
            reason=Reason.EMPTY_DATA,
        )
    return np.array(load_tokenizer(context).encode(content, add_special_tokens=False).ids, np.int32)


def windows(tokens: np.ndarray, length: int, what: str) -> np.ndarray:
    """Pieces of `length` tokens that don't overlap, (N, length); the rest at the end is left out.

    Raises:
        SourceError: there is not one whole piece.
    """
    count = len(tokens) // length
    if not count:
        raise SourceError(
            f"the {what} text has {len(tokens)} tokens, fewer than one window of {length}",
            hint="give a longer text, or a smaller `context`",
            reason=Reason.EMPTY_DATA,
        )
    return tokens[: count * length].reshape(count, length)
