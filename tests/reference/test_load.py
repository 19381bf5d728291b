"""Where the reference's model comes from, and what is said when it can't be had."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from edgec.passes.quantize_weights import quantize_rows
from safetensors.torch import load_file, save_file

from edgec.architectures.draft_head import RecurrentHead
from edgec.architectures.rope import inverse_frequencies
from edgec.errors import EdgecError, SourceError, UsageError
from edgec.recipe import load_recipe
from edgec.reference.backend import ReferenceBackend
from edgec.reference.load import load
from edgec.reference.native_weights import read_native
from edgec.reference.options import ReferenceOptions
from edgec.report.document import StageRecord
from edgec.runtime.sampling import Sampling
from edgec.store import Store
from tests.reference.checkpoints import CONFIG, END, write_huggingface, write_recipe
from tests.tiny_bundle import write_tiny_bundle


class Stages:
    """A listener that keeps which stages really ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def started(self, stage: str) -> None: ...

    def event(self, stage: str, event: dict[str, Any]) -> None: ...

    def finished(self, stage: str, record: StageRecord) -> None:
        self.ran += [] if record.cached else [stage]


def test_a_huggingface_folder_gives_its_model_tokenizer_and_chat(tmp_path: Path) -> None:
    model = write_huggingface(tmp_path / "my-llama")
    loaded = load(tmp_path / "my-llama", store=Store(tmp_path / "store"))
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(loaded.model(ids), model(ids))
    assert (loaded.name, loaded.eos, loaded.context) == ("my-llama", (END,), CONFIG.max_positions)
    assert loaded.quantised == frozenset() and not loaded.model.training
    assert loaded.tokenizer is not None and loaded.tokenizer.chat.available


def test_a_model_without_a_tokenizer_is_loaded_without_one(tmp_path: Path) -> None:
    write_huggingface(tmp_path / "bare", tokenizer=False)
    loaded = load(tmp_path / "bare", store=Store(tmp_path / "store"))
    assert loaded.tokenizer is None and loaded.eos == ()


def test_a_checkpoint_has_no_int8_weights(tmp_path: Path) -> None:
    write_huggingface(tmp_path / "hf")
    with pytest.raises(UsageError, match="is a float checkpoint"):
        load(tmp_path / "hf", weights="int8", store=Store(tmp_path / "store"))


def test_nothing_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="does not exist"):
        load(tmp_path / "absent", store=Store(tmp_path / "store"))
    with pytest.raises(EdgecError, match="can't read the recipe"):
        load(tmp_path / "absent.yaml", store=Store(tmp_path / "store"))


def test_a_recipe_without_quantize_has_no_int8_weights(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no `quantize` pass"):
        load(write_recipe(tmp_path, passes=""), weights="int8", store=Store(tmp_path / "store"))


@pytest.mark.slow
def test_a_recipe_gives_the_numbers_that_its_passes_fixed(tmp_path: Path) -> None:
    recipe, store = write_recipe(tmp_path), Store(tmp_path / "store")
    stages = Stages()
    plain = load(recipe, store=store, listener=stages)
    assert stages.ran == ["source"]  # what comes after the model in front of `quantize` is no concern
    rounded = load(recipe, weights="int8", store=store, listener=stages)
    assert stages.ran == ["source", "quantize", "export"]
    assert (rounded.name, rounded.eos, rounded.context) == ("tiny-llm", (END,), CONFIG.max_positions)
    assert rounded.tokenizer is not None and rounded.tokenizer.encode("ab") == plain.tokenizer.encode("ab")  # type: ignore[union-attr]

    floats, ints = plain.model.state_dict(), rounded.model.state_dict()
    for name in floats:
        table = quantize_rows(floats[name]) if floats[name].ndim == 2 else None
        wanted = floats[name] if table is None else table.weight.float() * table.scale[:, None]
        assert torch.equal(ints[name], wanted), name
    assert rounded.model.lm_head.weight is rounded.model.embed_tokens.weight
    assert "lm_head" in rounded.quantised and "embed_tokens" not in rounded.quantised
    assert len(rounded.quantised) == 7 * CONFIG.layers + 1

    # A bundle says where it came from; moved away from there, it has its native weights.
    bundle = write_tiny_bundle(tmp_path / "out") / "bundle"
    (bundle / "recipe.json").write_text(json.dumps(load_recipe(recipe).resolved()))
    notes: list[str] = []
    travelled = load(bundle, weights="int8", store=store, note=notes.append)
    assert travelled.name == "tiny" and "bundle's own INT8 weights" in travelled.origin
    assert len(notes) == 1 and "hf does not exist" in notes[0]
    shutil.copytree(tmp_path / "hf", bundle / "hf")
    shutil.copy(tmp_path / "text.txt", bundle)
    stages.ran.clear()
    found = load(tmp_path / "out", weights="int8", store=store, listener=stages)
    assert "the exported program" in found.origin and stages.ran == []
    assert torch.equal(found.model.state_dict()["layers.1.mlp.down_proj.weight"], ints["layers.1.mlp.down_proj.weight"])


def test_a_bundle_without_a_recipe_gives_its_native_weights(tmp_path: Path) -> None:
    folder = write_tiny_bundle(tmp_path / "out")
    notes: list[str] = []
    loaded = load(folder, weights="int8", store=Store(tmp_path / "store"), note=notes.append)
    tensors = load_file(folder / "bundle/native/model.safetensors")
    name = "layers.0.self_attn.q_proj"
    wanted = tensors[f"{name}.weight"].float() * tensors[f"{name}.scale"][:, None]
    assert torch.equal(loaded.model.state_dict()[f"{name}.weight"], wanted)
    assert name in loaded.quantised and "it holds no recipe" in notes[0]
    with pytest.raises(SourceError, match="INT8 weights only"):
        load(folder, weights="float", store=Store(tmp_path / "store"))


def test_a_draft_head_comes_with_the_weights_that_it_was_trained_on(tmp_path: Path) -> None:
    """And the backend that serves them drafts with it."""
    folder = write_tiny_bundle(tmp_path / "out", draft=True)
    loaded = load(folder, weights="int8", store=Store(tmp_path / "store"))
    tensors = load_file(folder / "bundle/native/model.safetensors")
    assert isinstance(loaded.draft, RecurrentHead)
    wanted = tensors["draft.blocks.1.gate_proj.weight"].float() * tensors["draft.blocks.1.gate_proj.scale"][:, None]
    assert torch.equal(loaded.draft.state_dict()["blocks.1.gate_proj.weight"], wanted)
    assert torch.equal(loaded.draft.token_map, tensors["draft.token_map"])
    assert load(write_tiny_bundle(tmp_path / "plain"), weights="int8", store=Store(tmp_path / "store")).draft is None
    engine = ReferenceBackend(loaded, ReferenceOptions(blocks=32, speculation="head", draft_length=2)).engine
    engine.answer([[5, 6, 7]], Sampling(max_tokens=8, ignore_eos=True))
    assert engine.stats().drafted_tokens > 0


@pytest.mark.parametrize(
    ("theta", "scaling"),
    [
        (10000.0, None),
        (500000.0, None),
        (10000.0, {"rope_type": "linear", "factor": 4.0}),
        (
            500000.0,
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
    ],
)
def test_rope_is_read_back_from_its_frequencies(tmp_path: Path, theta: float, scaling: dict[str, Any] | None) -> None:
    native = write_tiny_bundle(tmp_path / "out") / "bundle/native"
    tensors = load_file(native / "model.safetensors")
    wanted, _ = inverse_frequencies(16, theta, scaling)
    save_file(tensors | {"rope.frequencies": wanted}, native / "model.safetensors")
    config = read_native(native).config
    found, factor = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    assert factor == 1.0
    if scaling is None:
        assert config.rope_theta == theta and torch.equal(found, wanted)
    torch.testing.assert_close(found, wanted, rtol=2e-7, atol=0)  # a division and its inverse: two roundings


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m, t: m["architecture"].update(rope_factor=1.2), "scales attention by 1.2"),
        (lambda m, t: m["architecture"].pop("heads"), "can't be read"),
        (lambda m, t: t.pop("norm.weight"), r"has a weight `norm.weight` \(64,\), and the file lacks it"),
        (lambda m, t: t.update({"norm.weight": torch.ones(3)}), r"has the shape \(3,\)"),
    ],
)
def test_a_damaged_bundle_is_one_line(tmp_path: Path, damage: Any, message: str) -> None:
    folder = write_tiny_bundle(tmp_path / "out")
    native = folder / "bundle/native"
    manifest, tensors = json.loads((native / "manifest.json").read_text()), load_file(native / "model.safetensors")
    damage(manifest, tensors)
    (native / "manifest.json").write_text(json.dumps(manifest))
    save_file(tensors, native / "model.safetensors")
    with pytest.raises(SourceError, match=message):
        load(folder, weights="int8", store=Store(tmp_path / "store"))
