"""Bundles that are wrong on purpose, and cores that are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from edgec.runtime import compile as core

Patch = tuple[str, str, str]
"""A file in src/, a piece of text that must be in it once, and what it becomes."""

OFF_BY_ONE = (
    "decoder.cpp",
    "rotate(positions_[tile.first + r], queries",
    # A query's tables are those of the position after its own.
    "rotate(positions_[tile.first + r] + 1, queries",
)
BIASED = (
    "row_loops.inc",
    "noise_time(own[i]) / static_cast<double>(weight[i])",
    # Tokens with low numbers come too often.
    "noise_time(own[i]) / static_cast<double>(weight[i]) * (1.0 + 8.0 * (at + i) / race->row.count)",
)
OTHER_NUMBERS = (
    "sampler.cpp",
    "race(logits, vocab, params, history, nullptr, noise_key(seed, sequence, position), 1",
    "race(logits, vocab, params, history, nullptr, noise_key(seed, sequence, position + 1), 1",
)


def patched_core(folder: Path, patch: Patch) -> Path:
    """A library compiled from the sources with one line changed."""
    name, old, new = patch
    native = folder / "native"
    shutil.copytree(core.NATIVE, native, ignore=shutil.ignore_patterns("tests", "bindings", "examples"))
    path = native / "src" / name
    text = path.read_text()
    assert text.count(old) == 1, f"{name} has changed: the fault can't be planted in it"
    path.write_text(text.replace(old, new))
    with pytest.MonkeyPatch.context() as patcher:
        patcher.setattr(core, "NATIVE", native)
        return core.build_library(folder)


def put_library(bundle: Path, library: Path) -> None:
    """Into a bundle's `native` folder, for this machine."""
    here = core.host()
    place = bundle / "bundle/native/lib" / here.name
    place.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(library, place / here.library)


def scale_layer(bundle: Path, layer: str, factor: float) -> None:
    """Multiply one layer's scales."""
    from safetensors.numpy import load_file, save_file

    path = bundle / "bundle/native/model.safetensors"
    tensors = load_file(path)
    tensors[f"{layer}.scale"] = (tensors[f"{layer}.scale"] * factor).astype("float32")
    save_file(tensors, path)
