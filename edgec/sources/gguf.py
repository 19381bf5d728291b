"""GGUF checkpoints of the Llama family → our Llama with float32 weights, its tokenizer, its chat template.

Follows the GGUF specification (ggml/docs/gguf.md) and llama.cpp's converter, whose two conventions are undone here: the
rows of q and k are permuted so that rotary pairs are neighbours, and Llama 3's frequency scaling is a tensor.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgec.errors import Reason, SourceError
from edgec.sources.checkpoints import load_into
from edgec.sources.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from edgec.sources.gguf_tokenizer import build_tokenizer, tokenizer_settings

if TYPE_CHECKING:
    import torch

    from edgec.architectures.llama import LlamaConfig
    from edgec.sources.models import Loaded

_LAYER = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"


def load_gguf(path: Path) -> Loaded:
    """Load a whole checkpoint. Quantised weights are dequantised to float32.

    Raises:
        SourceError: BAD_CHECKPOINT for a file that isn't GGUF, is truncated, is of an architecture other than Llama, or
            whose tensors don't fit its metadata; NOT_FINITE for NaN weights (checked by the caller for every format).
    """
    import torch

    from edgec.architectures.llama import Llama
    from edgec.sources.models import Loaded

    header = read_gguf_header(path)
    config = gguf_config(header, path)
    with torch.device("meta"):  # random initial weights of a large model take longer than its real ones
        shapes = {k: v.shape for k, v in Llama(config).state_dict().items()}
    state = _state(header, config, path)
    _check_shapes(state, shapes, path)
    if config.tied:
        state["lm_head.weight"] = state["embed_tokens.weight"]
    module = Llama(config)
    load_into(module, state, path)
    extra: dict[str, Path | bytes] = {}
    if "tokenizer.ggml.tokens" in header.metadata:
        extra["tokenizer.json"] = build_tokenizer(header.metadata, path).to_str().encode()
        settings = tokenizer_settings(header.metadata, config.max_positions)
        extra["tokenizer_config.json"] = json.dumps(settings, indent=1, sort_keys=True).encode()
    return Loaded(module.eval(), {"kind": "llama", "config": config.to_dict()}, extra)


def gguf_config(header: GgufHeader, path: Path) -> LlamaConfig:
    """Read the architecture off the metadata.

    Raises:
        SourceError: it isn't Llama, a number is missing, or it uses something our Llama doesn't have.
    """
    from edgec.architectures.llama import LlamaConfig

    meta = header.metadata
    name = meta.get("general.architecture")
    if name != "llama":
        raise _bad(path, f"its architecture is {name!r}", "edgec reads GGUF files of the architecture `llama`")
    if meta.get("llama.expert_count"):
        raise _bad(path, "it is a mixture of experts", "edgec builds dense Llama models only")
    names = {t.name for t in header.tensors}
    try:
        hidden, heads = int(meta["llama.embedding_length"]), int(meta["llama.attention.head_count"])
        head_dim = int(meta.get("llama.attention.key_length", hidden // heads))
        if int(meta.get("llama.rope.dimension_count", head_dim)) != head_dim:
            raise _bad(path, "only part of each head is rotated", "edgec's Llama rotates whole heads")
        return LlamaConfig(
            vocab_size=int(meta.get("llama.vocab_size") or len(meta["tokenizer.ggml.tokens"])),
            hidden_size=hidden,
            intermediate_size=int(meta["llama.feed_forward_length"]),
            layers=int(meta["llama.block_count"]),
            heads=heads,
            kv_heads=int(meta.get("llama.attention.head_count_kv", heads)),
            head_dim=head_dim,
            # Stored as float32: 9.99999975e-06 is 1e-5.
            norm_eps=float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
            rope_theta=float(meta.get("llama.rope.freq_base", 10000.0)),
            rope_scaling=_scaling(header, path),
            max_positions=int(meta["llama.context_length"]),
            tied="output.weight" not in names,
            attention_bias="blk.0.attn_q.bias" in names,
            mlp_bias="blk.0.ffn_up.bias" in names,
        )
    except KeyError as cause:
        raise _bad(path, f"its metadata has no {cause}") from cause
    except (TypeError, ValueError, ZeroDivisionError) as cause:
        raise _bad(path, f"its metadata is damaged: {cause}") from cause


def _scaling(header: GgufHeader, path: Path) -> dict[str, Any] | None:
    factors = next((t for t in header.tensors if t.name == _ROPE_FACTORS), None)
    if factors is not None:
        return {"rope_type": "factors", "factors": [float(v) for v in _dequantize(factors, path)]}
    kind = header.metadata.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": float(header.metadata["llama.rope.scaling.factor"])}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = int(header.metadata["llama.rope.scaling.original_context_length"])
    return scaling


def _state(header: GgufHeader, config: LlamaConfig, path: Path) -> dict[str, torch.Tensor]:
    """All weights by our names, float32."""
    import torch

    state: dict[str, torch.Tensor] = {}
    for tensor in header.tensors:
        if tensor.name == _ROPE_FACTORS:
            continue
        layer = _LAYER.fullmatch(tensor.name)
        if tensor.name in _OUTSIDE:
            name = _OUTSIDE[tensor.name]
        elif layer and layer[2] in _IN_LAYER:
            name = f"layers.{layer[1]}.{_IN_LAYER[layer[2]]}.{layer[3]}"
        else:
            raise _bad(path, f"a Llama has no tensor `{tensor.name}`", "is this a variant that edgec doesn't know?")
        weight = _dequantize(tensor, path)
        if layer and layer[2] in ("attn_q", "attn_k"):
            heads = config.heads if layer[2] == "attn_q" else config.kv_heads
            if weight.shape[0] != heads * config.head_dim:
                raise _bad(path, f"`{tensor.name}` has {weight.shape[0]} rows, not {heads} heads of {config.head_dim}")
            weight = _unpermute(weight, heads)
        state[name] = torch.from_numpy(np.ascontiguousarray(weight))
    return state


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows (heads, D/2, 2, …), pairs as neighbours → (heads, 2, D/2, …), pairs half a head apart."""
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _dequantize(tensor: GgufTensor, path: Path) -> np.ndarray:
    """One tensor in float32, in PyTorch's order of dimensions."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    if tensor.shape and tensor.bytes == 0:
        raise _bad(path, f"`{tensor.name}` is empty")
    data = np.fromfile(path, np.uint8, tensor.bytes, offset=tensor.offset)
    kind = GGMLQuantizationType[tensor.type]
    try:
        if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            weight = data.view(np.float32 if kind == GGMLQuantizationType.F32 else np.float16).astype(np.float32)
        else:
            weight = dequantize(data.reshape(*tensor.shape[:-1], -1), kind)
    except (NotImplementedError, ValueError) as cause:
        raise _bad(path, f"`{tensor.name}` is stored as {tensor.type}, which can't be read: {cause}") from cause
    return weight.reshape(tensor.shape)


def _check_shapes(state: dict[str, torch.Tensor], shapes: dict[str, torch.Size], path: Path) -> None:
    """Refuse tensors that don't fit the metadata before the (large) module is made."""
    for name, weight in state.items():
        if name in shapes and weight.shape != shapes[name]:
            raise _bad(path, f"`{name}` is {list(weight.shape)}, and its metadata says {list(shapes[name])}")


def _bad(path: Path, what: str, hint: str = "") -> SourceError:
    return SourceError(f"{path.name}: {what}", hint=hint, reason=Reason.BAD_CHECKPOINT)
