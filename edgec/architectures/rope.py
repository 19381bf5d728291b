"""Rotary position embeddings: frequencies, with the scalings that checkpoints in the wild use, and the rotation.

Su et al., "RoFormer" (2021) for the rotation; "llama3" after Meta's Llama 3.1 reference code; "yarn" after Peng et al.,
"YaRN" (2023), equations 17 to 23. Channels are paired as (i, i + head_dim / 2), the convention of Hugging Face
checkpoints; llama.cpp pairs (2i, 2i + 1), which the GGUF reader undoes in the weights.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from edgec.errors import Reason, SourceError

SCALINGS = ("default", "linear", "llama3", "yarn", "factors")


def inverse_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> tuple[torch.Tensor, float]:
    """Angle per position of each channel pair, (head_dim / 2,) float32, and the factor on cos and sin.

    Raises:
        SourceError: the scaling is one whose frequencies depend on the length of the input ("dynamic", "longrope"),
            which a graph with fixed tables can't hold, or one that isn't known.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (theta**exponents)
    options = scaling or {}
    kind = options.get("rope_type", options.get("type", "default"))
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / float(options["factor"]), 1.0
    if kind == "llama3":
        return _llama3(plain, options), 1.0
    if kind == "yarn":
        return _yarn(plain, head_dim, theta, options)
    if kind == "factors":  # one divisor per channel pair, as GGUF's `rope_freqs` stores what "llama3" computes
        return plain / torch.tensor(options["factors"], dtype=torch.float32), 1.0
    raise SourceError(
        f"RoPE scaling `{kind}` is not supported",
        hint=f"supported: {', '.join(SCALINGS)}",
        reason=Reason.BAD_CHECKPOINT,
    )


def _llama3(plain: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    factor = float(options["factor"])
    low, high = float(options["low_freq_factor"]), float(options["high_freq_factor"])
    original = float(options["original_max_position_embeddings"])
    wavelength = 2 * math.pi / plain
    blend = ((original / wavelength - low) / (high - low)).clamp(0, 1)  # 0: stretched, 1: kept
    return (1 - blend) * plain / factor + blend * plain


def _yarn(plain: torch.Tensor, head_dim: int, theta: float, options: dict[str, Any]) -> tuple[torch.Tensor, float]:
    factor = float(options["factor"])
    original = float(options["original_max_position_embeddings"])
    fast, slow = float(options.get("beta_fast", 32)), float(options.get("beta_slow", 1))

    def channel(rotations: float) -> float:
        """The channel pair that turns `rotations` times over the original context."""
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = channel(fast), channel(slow)
    if options.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = max(last - first, 1e-3)
    stretch = ((torch.arange(head_dim // 2).float() - first) / width).clamp(0, 1)
    frequencies = plain / factor * stretch + plain * (1 - stretch)
    attention = options.get("attention_factor")
    if attention is None:
        attention = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return frequencies, float(attention)


def tables(
    positions: int, head_dim: int, theta: float, scaling: dict[str, Any] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position, each (positions, head_dim) float32.

    The sign of the rotation is folded into the first half of sin, so that `rotate` is five operations. Tables, rather
    than cos and sin in the graph: an angle of 8,000 radians has no digits left in float16, and libraries differ.
    """
    frequencies, factor = inverse_frequencies(head_dim, theta, scaling)
    angles = torch.arange(positions).float()[:, None] * frequencies[None, :]  # (positions, head_dim / 2)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x (…, heads, head_dim) by tables that broadcast against it (…, 1, head_dim)."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([x[..., half:], x[..., :half]], -1) * sin
