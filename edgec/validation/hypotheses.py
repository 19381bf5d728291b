"""Ways in which an attention can be wrong, each as a small change of the dense model, to try which an engine made.

What an engine got wrong is rarely random: positions off by one, another θ, the other convention of pairing channels,
the wrong key-value head. A reference that is wrong in the same way agrees with it, which names the fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

    from edgec.architectures.llama import Llama
    from edgec.reference.load import Loaded


@dataclass(frozen=True)
class Hypothesis:
    """One way to be wrong. `text` completes "agrees with a reference …"."""

    text: str
    points_to: str
    query_shift: int = 0
    theta: float = 1.0  # times the right one
    interleaved: bool = False
    rotated: bool = True
    scale: float = 1.0  # of the scores
    striped: bool = False  # query head h reads KV head h mod Hkv
    future: int = 0  # positions that a query sees beyond its own
    window: int = 0  # positions that it sees at most; 0: all


RIGHT = Hypothesis("that is right", "nothing")
HYPOTHESES = (
    Hypothesis("whose queries are rotated one position further", "RoPE is off by one", query_shift=1),
    Hypothesis("whose queries are rotated one position less far", "RoPE is off by one", query_shift=-1),
    Hypothesis("that rotates nothing", "RoPE is not applied", rotated=False),
    Hypothesis("that pairs channels (2i, 2i + 1)", "RoPE pairs the wrong channels", interleaved=True),
    Hypothesis("whose RoPE has a tenth of θ", "RoPE's θ is wrong", theta=0.1),
    Hypothesis("whose RoPE has ten times θ", "RoPE's θ is wrong", theta=10.0),
    Hypothesis("whose RoPE has fifty times θ", "RoPE's θ is wrong", theta=50.0),
    Hypothesis("whose query heads take turns among KV heads", "heads are grouped wrongly", striped=True),
    Hypothesis("that does not scale scores by 1/√D", "attention's scale is missing", scale=-1.0),
    Hypothesis("that sees one position ahead", "the causal mask is off by one", future=1),
    Hypothesis("that does not see a token's own position", "the causal mask is off by one", future=-1),
    Hypothesis("that sees the last 16 positions only", "older blocks of keys and values are lost", window=16),
)


def dense(loaded: Loaded, *, rounded: bool) -> Llama:
    """The model; `rounded`: its quantised layers see INT8 activations, as the native engine's do."""
    import torch

    from edgec.reference.model_runner import own_copy
    from edgec.reference.quantised import round_inputs_of

    model = own_copy(loaded.model, torch.device("cpu"), torch.float32)
    if rounded:
        round_inputs_of(model, loaded.quantised)
    return model


def logits_under(model: Llama, tokens: Sequence[int], hypothesis: Hypothesis, *, rounded: bool) -> NDArray[np.float32]:
    """(T, vocab) of the dense model, changed as the hypothesis says.

    Args:
        rounded: keys and values are INT8; activations are where the model's layers have been told so (`dense`).
    """
    import torch
    from torch.nn import functional

    from edgec.reference.quantised import round_to_int8

    ids = torch.tensor([list(tokens)])
    positions = torch.arange(ids.shape[1])
    cos_k, sin_k = _tables(model, positions, hypothesis)
    cos_q, sin_q = _tables(model, positions + hypothesis.query_shift, hypothesis)
    seen = positions[None, :] <= positions[:, None] + hypothesis.future  # (T, S)
    if hypothesis.window:
        seen &= positions[None, :] > positions[:, None] - hypothesis.window
    seen = seen | (positions[None, :] == 0) & ~seen.any(-1, keepdim=True)  # a query that sees nothing has no softmax
    with torch.no_grad():
        x = model.embed_tokens(ids)
        for layer in model.blocks():
            attention = layer.self_attn
            given = layer.input_layernorm(x)
            q = attention.q_proj(given).view(1, -1, attention.heads, attention.head_dim)
            k = attention.k_proj(given).view(1, -1, attention.kv_heads, attention.head_dim)
            v = attention.v_proj(given).view(1, -1, attention.kv_heads, attention.head_dim)
            if hypothesis.rotated:
                q, k = _rotate(q, cos_q, sin_q, hypothesis), _rotate(k, cos_k, sin_k, hypothesis)
            if rounded:
                k, v = round_to_int8(k), round_to_int8(v)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (1, H or Hkv, T, D)
            groups = attention.heads // attention.kv_heads
            k, v = (_spread(t, groups, hypothesis.striped) for t in (k, v))
            scale = 1.0 if hypothesis.scale < 0 else hypothesis.scale * attention.head_dim**-0.5
            out = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
            x = x + attention.o_proj(out.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits = model.lm_head(model.norm(x))[0].float().numpy()
    return cast("NDArray[np.float32]", logits)


def _tables(model: Llama, positions: torch.Tensor, hypothesis: Hypothesis) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, (T, 1, D / 2), without a sign folded in."""
    from edgec.architectures.rope import inverse_frequencies

    c = model.config
    frequencies, factor = inverse_frequencies(c.head_dim, c.rope_theta * hypothesis.theta, c.rope_scaling)
    angles = positions.float()[:, None, None] * frequencies
    return angles.cos() * factor, angles.sin() * factor


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, hypothesis: Hypothesis) -> torch.Tensor:
    """x (1, T, heads, D)."""
    import torch

    if hypothesis.interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _spread(x: torch.Tensor, groups: int, striped: bool) -> torch.Tensor:
    """KV heads to query heads, (1, Hkv, T, D) → (1, H, T, D)."""
    return x.repeat(1, groups, 1, 1) if striped else x.repeat_interleave(groups, 1)
