"""MIL's quantize, dequantize and constexpr operations (compressed weights).

quantize:   q = clip(round(x / scale) + zero_point), halves to even
dequantize: x = (q - zero_point) · scale
Both as coremltools' own value inference defines them. The constexpr operations that are not here (palettised and sparse
weights) are materialised by coremltools.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .mil_table import Inputs, Value, operation


def _along(parameter: Any, rank: int, axis: Any) -> Value:
    """A scalar, or a vector shaped to broadcast along `axis`, in float32."""
    value = np.asarray(parameter, np.float32)
    if value.ndim == 0:
        return value
    shape = [1] * rank
    shape[int(axis)] = -1
    return value.reshape(shape)


@operation("quantize")
def quantize(a: Inputs) -> Value:
    x = np.asarray(a["input"], np.float32)
    dtype = np.dtype(str(a["output_dtype"]))
    q = np.round(x / _along(a["scale"], x.ndim, a.get("axis")))
    if a.get("zero_point") is not None:
        q += _along(a["zero_point"], x.ndim, a.get("axis"))
    limits = np.iinfo(dtype)
    return np.clip(q, limits.min, limits.max).astype(dtype)


@operation("dequantize", "constexpr_affine_dequantize")
def dequantize(a: Inputs) -> Value:
    q = a["quantized_data"] if "quantized_data" in a else a["input"]
    x = np.asarray(q, np.float32)
    if a.get("zero_point") is not None:
        x = x - _along(a["zero_point"], x.ndim, a.get("axis"))
    return x * _along(a["scale"], x.ndim, a.get("axis"))


@operation("constexpr_blockwise_shift_scale")
def blockwise_shift_scale(a: Inputs) -> Value:
    """scale and offset have data's rank; each of their elements serves a block of data's."""
    data = np.asarray(a["data"], np.float32)

    def spread(parameter: Any) -> Value:
        value = np.asarray(parameter, np.float32)
        for axis, (full, part) in enumerate(zip(data.shape, value.shape, strict=True)):
            if 1 < part < full:
                value = np.repeat(value, full // part, axis)
        return value

    if a.get("offset") is not None:
        data = data - spread(a["offset"])
    return data * spread(a["scale"])
