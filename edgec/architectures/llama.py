"""The Llama family in plain PyTorch: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Touvron et al., "LLaMA" (2023); Ainslie et al., "GQA" (2023). Parameter names are those of Hugging Face checkpoints
without their `model.` prefix, so that names in recipes are the ones people know.

`Llama.forward` is the dense form, for training and evaluation. `paged.PagedStep` runs the same layers over a paged KV
cache, and is what gets exported. Attention splits into `project` and `output` so that both forms share it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from edgec.architectures.rope import inverse_frequencies, rotate, tables
from edgec.errors import Reason, SourceError


@dataclass(frozen=True)
class LlamaConfig:
    """Everything that fixes the architecture; JSON.

    Attributes:
        rope_scaling: the options of a scaling (`rope_type` and its numbers) as in Hugging Face configurations, or None.
        tied: the output head shares the embedding's weight.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    max_positions: int = 2048
    tied: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise _bad(f"{name} is {getattr(self, name)}, and must be at least 1")
        if self.heads % self.kv_heads:
            raise _bad(f"{self.heads} attention heads can't share {self.kv_heads} key-value heads evenly")
        if self.head_dim % 2:
            raise _bad(f"head_dim is {self.head_dim}, and rotary positions need an even one")
        inverse_frequencies(self.head_dim, self.rope_theta, self.rope_scaling)  # refuses what it can't scale

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> LlamaConfig:
        known = {f.name for f in fields(LlamaConfig)}
        if unknown := sorted(set(data) - known):
            raise _bad(f"unknown keys: {', '.join(unknown)}")
        return LlamaConfig(**data)


def _bad(what: str) -> SourceError:
    return SourceError(f"Llama configuration: {what}", reason=Reason.BAD_CHECKPOINT)


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last axis (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Projections of grouped-query attention; what happens between them is the caller's (dense or paged)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        hidden, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(hidden, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden, bias=bias)

    def project(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (B, T, hidden); cos, sin (…, T, 1, head_dim) → q (B, T, H, D), k and v (B, T, Hkv, D), q and k rotated."""
        batch, length = x.shape[0], x.shape[1]
        q = self.q_proj(x).view(batch, length, self.heads, self.head_dim)
        k = self.k_proj(x).view(batch, length, self.kv_heads, self.head_dim)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_dim)
        return rotate(q, cos, sin), rotate(k, cos, sin), v


class MLP(nn.Module):
    """SwiGLU (Shazeer, 2020)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, width, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, width, bias=bias)
        self.up_proj = nn.Linear(hidden, width, bias=bias)
        self.down_proj = nn.Linear(width, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)


class Llama(nn.Module):
    """A decoder. `forward(ids)` maps (B, T) int to logits (B, T, vocab); positions start at 0 in each row."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.layers)])
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def hidden_states(self, ids: torch.Tensor) -> torch.Tensor:
        """(B, T) → the last hidden states after the final norm, (B, T, hidden)."""
        cos, sin = self.rope(ids.shape[1], ids.device)
        x = self.embed_tokens(ids)
        for layer in self.blocks():
            q, k, v = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H or Hkv, T, D)
            groups = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        out: torch.Tensor = self.norm(x)
        return out

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lm_head(self.hidden_states(ids))
        return out

    def blocks(self) -> list[Layer]:
        return [cast(Layer, layer) for layer in self.layers]

    def rope(self, positions: int, device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of positions 0 …, each (positions, 1, head_dim), ready to broadcast over heads."""
        c = self.config
        cos, sin = tables(positions, c.head_dim, c.rope_theta, c.rope_scaling)
        return cos[:, None, :].to(device), sin[:, None, :].to(device)
