"""vllm#7252: the draft's vocabulary does not match the model's, which is found out while it answers, or never.

Right behaviour: checked when the bundle is loaded, in one line that says what is wrong; in the reference, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgec.errors import EdgecError
from edgec.reference.load import head_of
from edgec.reference.native_weights import read_native
from edgec.runtime.failures import EngineError
from edgec.runtime.sampling import Sampling
from tests.drafting import HEAD, ask, open_engine, prompts
from tests.tiny_bundle import DRAFT_VOCABULARY, VOCABULARY, write_tiny_bundle

pytestmark = pytest.mark.slow  # the core has to be compiled

Tensors = dict[str, Any]
Spoil = Callable[[Tensors, dict[str, Any]], None]


def outside(tensors: Tensors, _: dict[str, Any]) -> None:
    tensors["draft.token_map"][-1] = VOCABULARY


def negative(tensors: Tensors, _: dict[str, Any]) -> None:
    tensors["draft.token_map"][0] = -1


def twice(tensors: Tensors, _: dict[str, Any]) -> None:
    tensors["draft.token_map"][5] = tensors["draft.token_map"][4]


def short(tensors: Tensors, _: dict[str, Any]) -> None:
    tensors["draft.token_map"] = tensors["draft.token_map"][:-32].copy()


def other_size(_: Tensors, manifest: dict[str, Any]) -> None:
    manifest["draft"]["vocab"] = DRAFT_VOCABULARY - 32


def other_width(_: Tensors, manifest: dict[str, Any]) -> None:
    manifest["draft"]["widths"][0] += 32


def other_design(_: Tensors, manifest: dict[str, Any]) -> None:
    manifest["draft"]["design"] = "medusa"


def lost(tensors: Tensors, _: dict[str, Any]) -> None:
    del tensors["draft.head.weight"]


SPOILT: list[Spoil] = [outside, negative, twice, short, other_size, other_width, other_design, lost]


def spoilt(folder: Path, spoil: Spoil) -> Path:
    native = write_tiny_bundle(folder, draft=True) / "bundle/native"
    tensors = {name: np.array(t) for name, t in load_file(native / "model.safetensors").items()}
    manifest = json.loads((native / "manifest.json").read_text())
    spoil(tensors, manifest)
    save_file(tensors, native / "model.safetensors")
    manifest["files"]["model.safetensors"]["bytes"] = (native / "model.safetensors").stat().st_size
    (native / "manifest.json").write_text(json.dumps(manifest))
    return native


@pytest.mark.parametrize("spoil", SPOILT)
def test_the_engine_refuses_it_at_load(tmp_path: Path, spoil: Spoil) -> None:
    with pytest.raises(EngineError, match="draft"):
        open_engine(spoilt(tmp_path, spoil), HEAD)


@pytest.mark.parametrize("spoil", SPOILT)
def test_the_reference_refuses_it_at_load(tmp_path: Path, spoil: Spoil) -> None:
    with pytest.raises(EdgecError, match="draft"):
        found = read_native(spoilt(tmp_path, spoil))
        assert found.draft is not None
        head_of(found.config, found.draft)


def test_as_it_was_it_is_taken(tmp_path: Path) -> None:
    with open_engine(spoilt(tmp_path, lambda *_: None), HEAD, 3) as engine:
        ask(engine, prompts(), Sampling(max_tokens=10, ignore_eos=True))
        assert engine.stats().drafted_tokens > 0
