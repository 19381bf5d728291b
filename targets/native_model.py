"""The native artefact's files: weights under their Hugging Face names, and the manifest.

    model.safetensors   `<layer>.weight` INT8 (out, in) with `<layer>.scale` (out) float32, or float32 where the recipe
                        left a layer in float; `<norm>.weight`; `rope.frequencies` (head_dim / 2), radians a position
                        `draft.…` of a model with a draft head: names and shapes in architectures/draft_head.py
    manifest.json       ABI, architecture, defaults, end-of-answer tokens, the draft head's sizes, a SHA-256 each file

The runtime computes cos and sin itself from the frequencies, so every RoPE scaling is in them already.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgec.decoder import Decoder
from edgec.draft import DRAFT_FILE, Draft
from edgec.errors import ConversionError, Reason
from edgec.model import ArtifactFile, Program

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from .native import NativeOptions

MODEL_FILE = "model.safetensors"
FORMAT = 1
ACTIVATION_GROUP = 32  # kGroup of kernels.h
MEGABYTE = 2**20


def read_draft(program: Program) -> Draft | None:
    """The draft head that came with the program.

    Raises:
        ConversionError: its design is not one that the engine runs.
    """
    path = program.companion(DRAFT_FILE)
    draft = None if path is None else Draft.load(path)
    if draft is not None and draft.shape["design"] != "recurrent":
        raise ConversionError(
            f"native: the engine runs draft heads of the design `recurrent`, and this one is `{draft.shape['design']}`",
            hint="train it with `draft_head: {design: recurrent}`",
            reason=Reason.UNSUPPORTED_SCHEME,
        )
    return draft


def write_model(state: Mapping[str, torch.Tensor], decoder: Decoder, draft: Draft | None, out: Path) -> dict[str, int]:
    """Write model.safetensors; gives how many linear layers and embeddings are INT8 and float.

    Args:
        state: the weights, as `program_state` gives them or a quantised Llama's `state_dict`.

    Raises:
        ConversionError: the state lacks a weight that the architecture needs.
    """
    import torch
    from safetensors.torch import save_file

    from edgec.architectures.llama import LlamaConfig
    from edgec.architectures.rope import inverse_frequencies

    config = LlamaConfig.from_dict(decoder.architecture)
    tensors: dict[str, torch.Tensor] = {}
    counts = {"ops": 0, "layout_ops": 0, "float_ops": 0, "undelegated_ops": 0}
    for name in _layers(config):
        weight = _take(state, f"{name}.weight")
        counts["ops"] += 1
        if weight.dtype == torch.int8:
            tensors[f"{name}.scale"] = _take(state, f"{name}.scale").float()
        else:
            weight = weight.float()
            counts["float_ops"] += 1
        tensors[f"{name}.weight"] = weight
        if (bias := state.get(f"{name}.bias")) is not None:
            tensors[f"{name}.bias"] = bias.float()
    for name in _norms(config):
        tensors[f"{name}.weight"] = _take(state, f"{name}.weight").float()
    frequencies, _ = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    tensors["rope.frequencies"] = frequencies
    if draft is not None:
        tensors |= draft.tensors
        counts["ops"] += sum(t.dim() == 2 for t in draft.tensors.values())
    save_file({name: t.contiguous().clone() for name, t in tensors.items()}, out / MODEL_FILE)
    return counts


def _layers(config: Any) -> list[str]:
    parts = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    names = [f"layers.{i}.{part}" for i in range(config.layers) for part in parts]
    return ["embed_tokens", *names, *([] if config.tied else ["lm_head"])]


def _norms(config: Any) -> list[str]:
    parts = ("input_layernorm", "post_attention_layernorm")
    return [*(f"layers.{i}.{part}" for i in range(config.layers) for part in parts), "norm"]


def _take(state: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in state:
        raise ConversionError(
            f"native: the program has no weight `{name}`",
            hint="the engine runs the Llama family as edgec/architectures/llama.py builds it",
            reason=Reason.UNSUPPORTED_OP,
        )
    return state[name]


def write_manifest(
    out: Path, decoder: Decoder, draft: Draft | None, options: NativeOptions, files: list[ArtifactFile]
) -> None:
    """Write manifest.json over the files that are there already."""
    from edgec.architectures.llama import LlamaConfig
    from edgec.architectures.rope import inverse_frequencies
    from edgec.runtime.abi import ABI_VERSION

    config = LlamaConfig.from_dict(decoder.architecture)
    _, factor = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    names = ("vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim", "norm_eps")
    architecture = {name: getattr(config, name) for name in (*names, "max_positions", "tied")} | {"rope_factor": factor}
    context = min(options.context, config.max_positions)
    model_bytes = (out / MODEL_FILE).stat().st_size
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "abi": ABI_VERSION,
        "architecture": architecture,
        "activation_group": ACTIVATION_GROUP,
        "eos": list(decoder.eos),
        "defaults": {
            "context": context,
            "block_size": options.block_size,
            "max_batch": options.max_batch,
            "step_tokens": max(options.step_tokens, options.max_batch),
            "kv": options.kv,
            "memory_budget": options.memory or _budget(config, options, context, model_bytes),
        },
        "files": {
            path.relative_to(out).as_posix(): {
                "bytes": path.stat().st_size,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
            for file in files
            for path in ([out / file.name] if (out / file.name).is_file() else sorted((out / file.name).rglob("*")))
            if path.is_file()
        },
    }
    if draft is not None:
        manifest["draft"] = draft.shape
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")


def _budget(config: Any, options: NativeOptions, context: int, model_bytes: int) -> int:
    """Weights and what surrounds them, and keys and values of two sequences of full length; whole megabytes."""
    per_value = {"int8": 1.0, "fp16": 2.0, "fp32": 4.0}[options.kv]
    scales = 4 / config.head_dim if options.kv == "int8" else 0.0
    token = 2 * config.layers * config.kv_heads * config.head_dim * (per_value + scales)
    rows = max(options.step_tokens, options.max_batch)
    scratch = 4 * rows * (6 * config.hidden_size + 4 * config.intermediate_size) + 4 * 16 * config.vocab_size
    scratch += 8 * context * (config.head_dim + 64 * config.heads // config.kv_heads)
    total = 1.06 * model_bytes + 48 * MEGABYTE + scratch + 2 * context * token
    return (int(total) // MEGABYTE + 1) * MEGABYTE
