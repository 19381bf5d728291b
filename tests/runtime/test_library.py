"""The compiled core in the store: what lies under a digest is compiled from the sources that have it."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgec.runtime import compile as core
from edgec.runtime import library


def test_core_is_compiled_again_when_its_sources_change_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"sources": "old", "runs": 0}

    def build(out: Path) -> Path:
        made = out / core.host().library
        state["runs"] += 1
        if state["runs"] == 1:
            state["sources"] = "new"  # edited while the compiler was at it
        made.write_text(str(state["sources"]))
        return made

    monkeypatch.setattr(library, "default_root", lambda: tmp_path)
    monkeypatch.setattr(core, "source_digest", lambda: str(state["sources"]))
    monkeypatch.setattr(core, "build_library", build)
    found = library.compiled()
    assert (found.parent.name, found.read_text(), state["runs"]) == ("new", "new", 2)
    assert not (tmp_path / "runtime" / "old" / found.name).exists()
    assert library.compiled() == found
    assert state["runs"] == 2
