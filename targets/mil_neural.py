"""MIL's neural network operations: convolutions, products, pooling, normalisation, attention.

They run on torch's CPU kernels in float32, which is what keeps a whole model's evaluation to seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .mil_table import Inputs, Value, ints, operation, optional

if TYPE_CHECKING:
    import torch


def _tensor(array: Any) -> torch.Tensor:
    import torch

    return torch.from_numpy(np.ascontiguousarray(array, np.float32))


def _padding(
    a: Inputs, spatial: tuple[int, ...], kernel: list[int], strides: list[int], dilations: list[int]
) -> list[tuple[int, int]]:
    """(before, after) of each spatial dimension, for MIL's pad_type valid, custom, same and same_lower."""
    kind = str(optional(a, "pad_type", "valid"))
    if kind == "valid":
        return [(0, 0)] * len(kernel)
    if kind == "custom":
        given = ints(optional(a, "pad", [0] * (2 * len(kernel))))
        return list(zip(given[::2], given[1::2], strict=True))
    pads = []
    for size, k, s, d in zip(spatial, kernel, strides, dilations, strict=True):
        total = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
        small, large = total // 2, total - total // 2
        pads.append((small, large) if kind == "same" else (large, small))
    return pads


def _pad(x: torch.Tensor, pads: list[tuple[int, int]], value: float = 0.0) -> torch.Tensor:
    import torch.nn.functional as F

    flat = [p for pair in reversed(pads) for p in pair]  # torch names the last dimension first
    return F.pad(x, flat, value=value) if any(flat) else x


def _ones(n: int) -> list[int]:
    return [1] * n


@operation("conv")
def conv(a: Inputs) -> Value:
    """x (N, C, D…), weight (O, C/groups, K…), bias (O)."""
    import torch.nn.functional as F

    x, weight = _tensor(a["x"]), _tensor(a["weight"])
    n = x.dim() - 2
    strides, dilations = ints(optional(a, "strides", _ones(n))), ints(optional(a, "dilations", _ones(n)))
    pads = _padding(a, tuple(x.shape[2:]), list(weight.shape[2:]), strides, dilations)
    bias = None if a.get("bias") is None else _tensor(a["bias"])
    function = (F.conv1d, F.conv2d, F.conv3d)[n - 1]
    groups = int(optional(a, "groups", 1))
    return function(_pad(x, pads), weight, bias, strides, 0, dilations, groups).numpy()


@operation("conv_transpose")
def conv_transpose(a: Inputs) -> Value:
    """x (N, C, D…), weight (C, O/groups, K…); the full result is cut by the padding, or to `output_shape`."""
    import torch.nn.functional as F

    x, weight = _tensor(a["x"]), _tensor(a["weight"])
    n = x.dim() - 2
    strides, dilations = ints(optional(a, "strides", _ones(n))), ints(optional(a, "dilations", _ones(n)))
    bias = None if a.get("bias") is None else _tensor(a["bias"])
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[n - 1]
    full = function(x, weight, bias, strides, 0, 0, int(optional(a, "groups", 1)), dilations).numpy()
    kind = str(optional(a, "pad_type", "valid"))
    pads = _padding(a, tuple(x.shape[2:]), list(weight.shape[2:]), strides, dilations) if kind == "custom" else []
    shape = ints(a["output_shape"])[2:] if a.get("output_shape") is not None else None
    index = [slice(None), slice(None)]
    for i in range(n):
        size = full.shape[2 + i]
        if pads:
            before, after = pads[i]
            end = size - after if shape is None else before + shape[i]
        else:
            wanted = size if kind == "valid" else x.shape[2 + i] * strides[i]
            wanted = shape[i] if shape is not None else wanted
            before = (size - wanted) // 2 if kind == "same" else size - wanted - (size - wanted) // 2
            before = 0 if kind == "valid" else before
            end = before + wanted
        if end > size:  # output padding: positions that no input reaches hold the bias alone
            grow = [(0, 0)] * full.ndim
            grow[2 + i] = (0, end - size)
            full = np.pad(full, grow)
            if bias is not None:
                tail = [slice(None)] * full.ndim
                tail[2 + i] = slice(size, end)
                full[tuple(tail)] += bias.numpy().reshape(1, -1, *_ones(n))
        index.append(slice(before, end))
    return full[tuple(index)]


@operation("linear")
def linear(a: Inputs) -> Value:
    """x (…, I), weight (O, I), bias (O)."""
    import torch.nn.functional as F

    bias = None if a.get("bias") is None else _tensor(a["bias"])
    return F.linear(_tensor(a["x"]), _tensor(a["weight"]), bias).numpy()


@operation("matmul")
def matmul(a: Inputs) -> Value:
    import torch

    x, y = _tensor(a["x"]), _tensor(a["y"])
    x = x.mT if optional(a, "transpose_x", False) else x
    y = y.mT if optional(a, "transpose_y", False) else y
    return torch.matmul(x, y).numpy()


@operation("einsum")
def einsum(a: Inputs) -> Value:
    import torch

    return torch.einsum(str(a["equation"]), *(_tensor(v) for v in a["values"])).numpy()


def _pooling(kind: str) -> Any:
    """max, avg or l2 pooling: they share the window arithmetic."""

    def compute(a: Inputs) -> Value:
        import torch.nn.functional as F

        x, kernel = _tensor(a["x"]), ints(a["kernel_sizes"])
        n = len(kernel)
        strides = ints(optional(a, "strides", _ones(n)))
        pads = _padding(a, tuple(x.shape[2:]), kernel, strides, _ones(n))
        if optional(a, "ceil_mode", False):  # room for the last, partial window
            for i, ((before, after), k, s) in enumerate(zip(pads, kernel, strides, strict=True)):
                size = x.shape[2 + i] + before + after
                out = -(-(size - k) // s) + 1
                if before + after > 0 and (out - 1) * s >= x.shape[2 + i] + before:
                    out -= 1
                pads[i] = (before, after + max((out - 1) * s + k - size, 0))
        if kind == "max":
            greatest: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[n - 1]
            return greatest(_pad(x, pads, float("-inf")), kernel, strides).numpy()
        mean: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[n - 1]
        window = float(np.prod(kernel))
        if kind == "l2":
            return (mean(_pad(x * x, pads), kernel, strides) * window).sqrt().numpy()
        total = mean(_pad(x, pads), kernel, strides)
        if optional(a, "exclude_padding_from_average", False):
            total = total / mean(_pad(x.new_ones(x.shape), pads), kernel, strides)
        return total.numpy()

    return compute


for _kind in ("max", "avg", "l2"):
    operation(f"{_kind}_pool")(_pooling(_kind))


@operation("batch_norm")
def batch_norm(a: Inputs) -> Value:
    """γ (x - mean) / √(variance + ε) + β per channel; x is (N, C, …)."""
    x = a["x"]

    def channel(value: Any) -> Value:
        return np.asarray(value, np.float32).reshape(1, -1, *_ones(x.ndim - 2))

    scale = channel(optional(a, "gamma", 1.0)) / np.sqrt(channel(a["variance"]) + optional(a, "epsilon", 1e-5))
    return (x - channel(a["mean"])) * scale + channel(optional(a, "beta", 0.0))


@operation("layer_norm")
def layer_norm(a: Inputs) -> Value:
    x = a["x"]
    axes = tuple(ints(optional(a, "axes", list(range(x.ndim)))))
    centred = x - x.mean(axes, keepdims=True)
    result = centred / np.sqrt(np.square(centred).mean(axes, keepdims=True) + optional(a, "epsilon", 1e-5))
    shape = [d if i in {ax % x.ndim for ax in axes} else 1 for i, d in enumerate(x.shape)]
    if a.get("gamma") is not None:
        result = result * np.reshape(a["gamma"], shape)
    if a.get("beta") is not None:
        result = result + np.reshape(a["beta"], shape)
    return result


@operation("instance_norm")
def instance_norm(a: Inputs) -> Value:
    """Over the spatial dimensions of each channel; x is (N, C, …)."""
    x = a["x"]
    axes = tuple(range(2, x.ndim))
    centred = x - x.mean(axes, keepdims=True)
    result = centred / np.sqrt(np.square(centred).mean(axes, keepdims=True) + optional(a, "epsilon", 1e-5))
    shape = (1, -1, *_ones(x.ndim - 2))
    return result * np.reshape(optional(a, "gamma", 1.0), shape) + np.reshape(optional(a, "beta", 0.0), shape)


@operation("l2_norm")
def l2_norm(a: Inputs) -> Value:
    """x / √(Σ x² + ε), over all dimensions but the batch's."""
    x = a["x"]
    total = np.square(x).sum(tuple(range(max(x.ndim - 3, 0), x.ndim)), keepdims=True)
    return x / np.sqrt(total + optional(a, "epsilon", 1e-6))


@operation("scaled_dot_product_attention")
def attention(a: Inputs) -> Value:
    """softmax(Q Kᵀ / √E + mask) V; query (B, …, L, E), key (B, …, S, E); a boolean mask says who takes part."""
    import torch
    import torch.nn.functional as F

    mask = a.get("attn_mask")
    if mask is not None:
        mask = torch.from_numpy(np.ascontiguousarray(mask))
    return F.scaled_dot_product_attention(_tensor(a["query"]), _tensor(a["key"]), _tensor(a["value"]), mask).numpy()


@operation("upsample_nearest_neighbor")
def upsample_nearest_neighbor(a: Inputs) -> Value:
    import torch.nn.functional as F

    scale = (float(optional(a, "scale_factor_height", 1)), float(optional(a, "scale_factor_width", 1)))
    return F.interpolate(_tensor(a["x"]), scale_factor=scale, mode="nearest").numpy()


@operation("upsample_bilinear")
def upsample_bilinear(a: Inputs) -> Value:
    import torch.nn.functional as F

    scale = (float(optional(a, "scale_factor_height", 1)), float(optional(a, "scale_factor_width", 1)))
    corners = bool(optional(a, "align_corners", True))
    return F.interpolate(_tensor(a["x"]), scale_factor=scale, mode="bilinear", align_corners=corners).numpy()
