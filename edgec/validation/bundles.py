"""A bundle as `edgec validate` sees it: which engines are in it, its tokenizer, and the text of its recipe."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from edgec.errors import Reason, SourceError, UsageError
from edgec.reference.tokenizer import ReferenceTokenizer
from edgec.registry import suggest
from edgec.runtime.locate import MANIFEST, bundle_name
from edgec.store import Store, default_root
from edgec.tasks.text import TextOptions
from edgec.validation.material import read_file, read_text
from edgec.validation.subjects import Subject

ENGINES = ("native", "onnxruntime", "tflite", "tvm")
_HINT = "give the output folder of `edgec build`, or the bundle in it"


@dataclass(frozen=True)
class OpenBundle:
    """`folder` is the bundle, `engines` those of its targets that can be validated."""

    folder: Path
    name: str
    engines: tuple[str, ...]
    store: Store

    def chosen(self, given: Sequence[str]) -> list[str]:
        """The targets that the command line asks for; by default native where there is one.

        Raises:
            UsageError: the bundle doesn't have one.
        """
        if not given:
            return ["native"] if "native" in self.engines else list(self.engines[:1])
        if "all" in given:
            return list(self.engines)
        for name in given:
            if name not in self.engines:
                raise UsageError(
                    f"--target {name}: {self.folder} has no such engine{suggest(name, self.engines)}",
                    hint=f"it has: {', '.join(self.engines)}",
                )
        return list(dict.fromkeys(given))

    def opener(self, target: str, *, threads: int = 0, kernel: str | None = None) -> Callable[[], Subject]:
        """What opens an engine."""
        if target == "native":
            from edgec.validation.native_subject import NativeSubject

            return lambda: NativeSubject(self.folder, threads=threads, kernel=kernel)
        from edgec.validation.graph_subject import GraphSubject

        return lambda: GraphSubject(self.folder / target)

    @cached_property
    def tokenizer(self) -> ReferenceTokenizer:
        """The model's.

        Raises:
            SourceError: the bundle has none.
        """
        for folder in (self.folder, self.folder / "native"):
            if (found := ReferenceTokenizer.open(folder)) is not None:
                return found
        raise SourceError(f"{self.folder} has no tokenizer.json", hint="build it again", reason=Reason.BAD_CHECKPOINT)

    def read_text(self, given: Path | None) -> tuple[list[int], str]:
        """Tokens of `given`, else of the text that the recipe evaluates on; and where it is from.

        Raises:
            SourceError, UsageError: there is none, or it can't be had.
        """
        if given is not None:
            return read_file(given, self.tokenizer), str(given)
        try:
            recipe: dict[str, Any] = json.loads((self.folder / "recipe.json").read_bytes())
            text = TextOptions.model_validate(recipe["task"]["causal-lm"]["evaluation"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{self.folder} doesn't say which text its model is evaluated on", hint="give one with --text"
            ) from error
        tokens = read_text(text, self.tokenizer, recipe_dir=Path.cwd(), cache=self.store.root)
        return tokens, text.source


def open_bundle(given: Path) -> OpenBundle:
    """Look into a bundle.

    Raises:
        UsageError: there is none, or no engine in it that can be validated.
    """
    if not given.exists():
        raise UsageError(f"there is no bundle at {given}", hint=_HINT, reason=Reason.SOURCE_NOT_FOUND)
    folder = next((f for f in (given, given / "bundle") if (f / "bundle.json").is_file()), None)
    if folder is None and (given / MANIFEST).is_file() and (given.parent / "bundle.json").is_file():
        folder = given.parent
    if folder is None:
        raise UsageError(f"{given} is no bundle: it has no bundle.json", hint=_HINT)
    there = sorted(p.name for p in folder.iterdir() if p.is_dir())
    engines = tuple(name for name in ENGINES if name in there)
    if not engines:
        raise UsageError(
            f"{folder} has no engine that can be validated here: it was built for {', '.join(there) or 'no target'}",
            hint=f"these can be: {', '.join(ENGINES)}",
            reason=Reason.UNSUPPORTED_MODEL,
        )
    name = bundle_name(folder / "native") if "native" in engines else _name(folder)
    return OpenBundle(folder, name, engines, Store(default_root()))


def _name(folder: Path) -> str:
    try:
        return str(json.loads((folder / "bundle.json").read_bytes())["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return folder.name
