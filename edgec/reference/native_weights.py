"""A native artefact's model.safetensors and manifest, read back into what PyTorch computes with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from edgec.architectures.llama import LlamaConfig
from edgec.architectures.rope import inverse_frequencies
from edgec.draft import Draft
from edgec.errors import Reason, SourceError
from edgec.runtime.locate import MANIFEST, bundle_name

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim")
_FREQUENCIES = "rope.frequencies"


@dataclass(frozen=True)
class NativeWeights:
    """`state` holds `<layer>.weight` int8 (out, in) with `<layer>.scale` (out,) float32, or a float weight alone.

    What of it is the draft head's is `draft`, where the bundle has one.
    """

    config: LlamaConfig
    state: dict[str, torch.Tensor]
    eos: tuple[int, ...]
    name: str
    draft: Draft | None = None


def read_native(folder: Path) -> NativeWeights:
    """Read a bundle's `native` folder.

    Raises:
        SourceError: a file is damaged, or has a RoPE that can't be told from its frequencies alone.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        about = manifest["architecture"]
        state = load_file(folder / "model.safetensors")
        frequencies = state.pop(_FREQUENCIES)
        sizes = {name: int(about[name]) for name in (*_SIZES, "max_positions")}
        if float(about.get("rope_factor", 1.0)) != 1.0:
            raise _bad(folder, f"its RoPE scales attention by {about['rope_factor']}, which only the recipe explains")
        theta, scaling = _rope(sizes["head_dim"], frequencies)
        config = LlamaConfig(
            **sizes,
            norm_eps=float(about["norm_eps"]),
            tied=bool(about["tied"]),
            rope_theta=theta,
            rope_scaling=scaling,
            attention_bias="layers.0.self_attn.q_proj.bias" in state,
            mlp_bias="layers.0.mlp.up_proj.bias" in state,
        )
        head = {name: state.pop(name) for name in list(state) if name.startswith("draft.")}
        draft = Draft(dict(manifest["draft"]), head) if "draft" in manifest else None
        return NativeWeights(config, state, tuple(int(t) for t in manifest["eos"]), bundle_name(folder), draft)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise _bad(folder, f"it can't be read: {error}") from error


def _rope(head_dim: int, frequencies: torch.Tensor) -> tuple[float, dict[str, list[float] | str] | None]:
    """θ and scaling that give these frequencies: a whole θ without scaling if one does, else a divisor per channel."""
    if head_dim > 2:
        theta = float(round(float(frequencies[1]) ** (-head_dim / 2)))
        if theta > 0 and torch.equal(inverse_frequencies(head_dim, theta, None)[0], frequencies):
            return theta, None
    plain, _ = inverse_frequencies(head_dim, 10000.0, None)
    return 10000.0, {"rope_type": "factors", "factors": (plain / frequencies).tolist()}


def _bad(folder: Path, what: str) -> SourceError:
    return SourceError(f"{folder}: {what}", hint="build the bundle again", reason=Reason.BAD_CHECKPOINT)
