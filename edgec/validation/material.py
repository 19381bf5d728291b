"""What a validation is made on: a text's tokens, cut into windows that are scored and prompts that are answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edgec.errors import Reason, SourceError
from edgec.sources.fetch import fetch
from edgec.tasks.text import TextOptions
from edgec.validation.options import ValidateOptions

_PROMPTS = range(24, 97, 12)  # their lengths, in turns: some below a block or a chunk, some beyond


class Encodes(Protocol):
    """A tokenizer."""

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class Material:
    """`windows` overlap by a token, so that every token but the first is scored once; `text` says where it is from."""

    windows: tuple[tuple[int, ...], ...]
    prompts: tuple[tuple[int, ...], ...]
    text: str

    @property
    def scored(self) -> int:
        return sum(len(w) - 1 for w in self.windows)

    @property
    def positions(self) -> int:
        """That the longest window needs."""
        return max(len(w) for w in self.windows)


def read_file(path: Path, tokenizer: Encodes, skip: int = 0) -> list[int]:
    """A text's tokens.

    Raises:
        SourceError: it can't be read, is no UTF-8, or holds fewer than two tokens.
    """
    try:
        content = path.read_text(encoding="utf-8")[skip:]
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not UTF-8 text: {error}", reason=Reason.EMPTY_DATA) from error
    except OSError as error:
        raise SourceError(f"{path}: can't read the text: {error.strerror}", hint="give another with --text") from error
    tokens = tokenizer.encode(content)
    if len(tokens) < 2:
        raise SourceError(f"{path} has {len(tokens)} tokens, and a text to score needs two", reason=Reason.EMPTY_DATA)
    return tokens


def read_text(text: TextOptions, tokenizer: Encodes, *, recipe_dir: Path, cache: Path) -> list[int]:
    """The tokens of a text that a recipe names; fetched when it isn't at hand."""
    return read_file(fetch(text.source, text.sha256, recipe_dir=recipe_dir, cache=cache), tokenizer, text.skip)


def cut(tokens: Sequence[int], options: ValidateOptions, context: int, text: str) -> Material:
    """Windows of what `context` holds, over as many tokens as are asked for; prompts from all over the text."""
    window = min(options.window, context)
    wanted = min(options.tokens, len(tokens) - 1)
    windows = []
    for start in range(0, wanted, window - 1):
        windows.append(tuple(tokens[start : start + window]))
    if len(windows) > 1 and len(windows[-1]) < 2:
        windows.pop()
    prompts = []
    longest = max(2, context - options.answer - 1)
    for i in range(options.prompts):
        length = min(_PROMPTS[i % len(_PROMPTS)], longest, len(tokens))
        start = (len(tokens) - length) * i // options.prompts
        prompts.append(tuple(tokens[start : start + length]))
    return Material(tuple(windows), tuple(prompts), text)


def positions_needed(options: ValidateOptions) -> int:
    """Positions that a reference must hold for every check."""
    return max(options.window, max(_PROMPTS) + options.answer + 1)
