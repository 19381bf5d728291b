"""A bundle for the real core with random weights: two layers, byte tokens, a chat template; made in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from edgec.runtime.abi import ABI_VERSION
from tests.fake_engine import SPECIAL, TEMPLATE

VOCABULARY, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD = 300, 64, 96, 2, 4, 2, 16
END = 257  # <|im_end|>


DRAFT_WIDTHS, DRAFT_VOCABULARY = (96, 64), 160


def write_tiny_bundle(
    folder: Path, *, context: int = 512, seed: int = 0, memory: int = 64 << 20, draft: bool = False
) -> Path:
    """What `edgec build` leaves for the target `native`, without the libraries; gives the output folder.

    Args:
        draft: with a random recurrent draft head, which the model doesn't need to agree with.
    """
    from safetensors.numpy import save_file

    native = folder / "bundle/native"
    native.mkdir(parents=True)
    model = native / "model.safetensors"
    save_file(_tensors(seed) | (_draft(seed) if draft else {}), model)
    _tokenizer(native / "tokenizer.json")
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (native / "tokenizer_config.json").write_text(json.dumps(settings))
    architecture = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "layers": LAYERS,
        "heads": HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": HEAD,
        "norm_eps": 1e-5,
        "max_positions": context,
        "tied": True,
        "rope_factor": 1.0,
    }
    defaults = {"context": context, "block_size": 16, "max_batch": 8, "step_tokens": 64, "kv": "int8"}
    manifest = {
        "format": 1,
        "abi": ABI_VERSION,
        "name": "tiny",
        "architecture": architecture,
        "activation_group": 32,
        "eos": [END],
        "defaults": {**defaults, "memory_budget": memory},
        "files": {model.name: {"bytes": model.stat().st_size}},
    }
    if draft:
        manifest["draft"] = {"design": "recurrent", "widths": list(DRAFT_WIDTHS), "vocab": DRAFT_VOCABULARY}
    (native / "manifest.json").write_text(json.dumps(manifest))
    (native.parent / "bundle.json").write_text(json.dumps({"name": "tiny"}))
    return folder


def _tensors(seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    tensors: dict[str, Any] = {}

    def linear(name: str, outputs: int, inputs: int) -> None:
        tensors.update(_linear(random, name, outputs, inputs))

    linear("embed_tokens", VOCABULARY, HIDDEN)
    for layer in (f"layers.{i}" for i in range(LAYERS)):
        linear(f"{layer}.self_attn.q_proj", HEADS * HEAD, HIDDEN)
        linear(f"{layer}.self_attn.k_proj", KV_HEADS * HEAD, HIDDEN)
        linear(f"{layer}.self_attn.v_proj", KV_HEADS * HEAD, HIDDEN)
        linear(f"{layer}.self_attn.o_proj", HIDDEN, HEADS * HEAD)
        linear(f"{layer}.mlp.gate_proj", INNER, HIDDEN)
        linear(f"{layer}.mlp.up_proj", INNER, HIDDEN)
        linear(f"{layer}.mlp.down_proj", HIDDEN, INNER)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{norm}.weight"] = np.ones(HIDDEN, np.float32)
    tensors["norm.weight"] = np.ones(HIDDEN, np.float32)
    tensors["rope.frequencies"] = (10000.0 ** -(np.arange(0, HEAD, 2) / HEAD)).astype(np.float32)
    return tensors


def _draft(seed: int) -> dict[str, Any]:
    """Every weight is random, so that a mistake in any of them changes what is drafted."""
    random = np.random.default_rng((seed, 1))
    tensors: dict[str, Any] = {}
    for index, width in enumerate(DRAFT_WIDTHS):
        inputs = 2 * HIDDEN if index == 0 else HIDDEN
        tensors |= _linear(random, f"draft.blocks.{index}.gate_proj", width, inputs)
        tensors |= _linear(random, f"draft.blocks.{index}.up_proj", width, inputs)
        tensors |= _linear(random, f"draft.blocks.{index}.down_proj", HIDDEN, width)
        tensors[f"draft.blocks.{index}.norm.weight"] = random.uniform(0.5, 1.5, HIDDEN).astype(np.float32)
    tensors |= _linear(random, "draft.head", DRAFT_VOCABULARY, HIDDEN)
    for name in ("embed_norm", "norm"):
        tensors[f"draft.{name}.weight"] = random.uniform(0.5, 1.5, HIDDEN).astype(np.float32)
    chosen = random.choice(VOCABULARY, DRAFT_VOCABULARY, replace=False)
    tensors["draft.token_map"] = np.sort(chosen).astype(np.int32)
    return tensors


def _linear(random: np.random.Generator, name: str, outputs: int, inputs: int) -> dict[str, Any]:
    weight = random.standard_normal((outputs, inputs)) / np.sqrt(inputs)
    scale = np.abs(weight).max(1) / 127
    quantised = np.round(weight / scale[:, None]).astype(np.int8)
    return {f"{name}.weight": quantised, f"{name}.scale": scale.astype(np.float32)}


def _tokenizer(path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.save(str(path))
