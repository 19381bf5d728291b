"""Where the references' models come from: through `edgec.reference.load`, or out of a build's own results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgec.errors import UsageError
from edgec.reference.load import Loaded, load
from edgec.store import Store


class LoadedModels:
    """Of a bundle, a recipe, or whatever else `edgec reference` takes."""

    def __init__(self, what: str | Path, store: Store, note: Callable[[str], None] = lambda _: None) -> None:
        self.what, self.store, self.note = what, store, note

    def same(self) -> Loaded:
        """INT8 weights; float ones where the recipe doesn't quantise."""
        try:
            return load(self.what, weights="int8", store=self.store, note=self.note)
        except UsageError as error:
            self.note(f"{error.message}; the bundle is held against float weights")
            return load(self.what, weights="float", store=self.store, note=self.note)

    def float(self) -> Loaded:
        return load(self.what, weights="float", store=self.store, note=self.note)
