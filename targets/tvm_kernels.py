"""Tensor expressions for the heavy operations, over weights packed by output channel.

Every weight is stored as `[o / v][...][v]`: `v` output channels lie side by side, so the inner loop of each kernel is
a vector over output channels and reads the weight once, in order. Convolutions run channels-last (NHWC), which keeps
the channels in vectors for depthwise ones too. INT8 weights are cast in registers and each channel's scale is applied
to the finished sum: the artefact stays INT8 on disk *and* in memory, where decoding a language model is bound by the
bytes it reads. Blocks are named `BLOCK_*`, which is how tvm_schedule finds them again after fusion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tvm.te import Tensor

DENSE = "edgec_dense"
CONV = "edgec_conv"
DEPTHWISE = "edgec_depthwise"
PAD = "edgec_pad"
VECTOR = 16  # the widest pack: 2 AVX2 or 4 NEON registers of float32
FUSABLE = 4  # TVM's kOutEWiseFusable: elementwise consumers may be fused behind this kernel


@dataclass(frozen=True)
class ConvShape:
    """Strides, padding (top, left, bottom, right) and dilation of a 2-D convolution."""

    strides: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]

    def out(self, height: int, width: int, kernel: tuple[int, int]) -> tuple[int, int]:
        top, left, bottom, right = self.padding
        spans = ((height + top + bottom, 0), (width + left + right, 1))
        h, w = ((n - (kernel[i] - 1) * self.dilation[i] - 1) // self.strides[i] + 1 for n, i in spans)
        return h, w


def pack_width(channels: int) -> int:
    """How many output channels lie side by side: the largest power of two, at most 16, that divides them."""
    return next(v for v in (VECTOR, 8, 4, 2, 1) if channels % v == 0)


def pack_dense(weight: np.ndarray) -> np.ndarray:
    """(in, out) → (out / v, in, v)."""
    k, n = weight.shape
    v = pack_width(n)
    return np.ascontiguousarray(weight.reshape(k, n // v, v).transpose(1, 0, 2))


def pack_conv(weight: np.ndarray) -> np.ndarray:
    """(out, in, kh, kw) → (out / v, kh, kw, in, v)."""
    o, i, kh, kw = weight.shape
    v = pack_width(o)
    return np.ascontiguousarray(weight.reshape(o // v, v, i, kh, kw).transpose(0, 3, 4, 2, 1))


def pack_depthwise(weight: np.ndarray) -> np.ndarray:
    """(channels, 1, kh, kw) → (kh, kw, channels)."""
    return np.ascontiguousarray(weight[:, 0].transpose(1, 2, 0))


def dense(x: Tensor, weight: Tensor) -> Tensor:
    """(..., in) × (out / v, in, v) → (..., out), without scale."""
    from tvm import te

    blocks, depth, v = (int(d) for d in weight.shape)
    k = te.reduce_axis((0, depth), "k")

    def compute(*index: Any) -> Any:
        *lead, n = index
        return te.sum(x(*lead, k) * _float(weight[n // v, k, n % v]), axis=k)

    return te.compute((*x.shape[:-1], blocks * v), compute, name=DENSE)


def conv(x: Tensor, weight: Tensor, shape: ConvShape) -> Tensor:
    """(N, H, W, in) × (out / v, kh, kw, in, v) → (N, H', W', out), without scale."""
    from tvm import te

    blocks, kh, kw, depth, v = (int(d) for d in weight.shape)
    batch, height, width, _ = (int(d) for d in x.shape)
    out_h, out_w = shape.out(height, width, (kh, kw))
    padded = _pad(x, shape)
    (sh, sw), (dh, dw) = shape.strides, shape.dilation
    ky, kx, k = te.reduce_axis((0, kh), "ky"), te.reduce_axis((0, kw), "kx"), te.reduce_axis((0, depth), "k")

    def compute(b: Any, h: Any, w: Any, n: Any) -> Any:
        pixel = padded[b, h * sh + ky * dh, w * sw + kx * dw, k]
        return te.sum(pixel * _float(weight[n // v, ky, kx, k, n % v]), axis=[ky, kx, k])

    return te.compute((batch, out_h, out_w, blocks * v), compute, name=CONV)


def depthwise(x: Tensor, weight: Tensor, shape: ConvShape) -> Tensor:
    """(N, H, W, C) × (kh, kw, C) → (N, H', W', C), without scale."""
    from tvm import te

    kh, kw, channels = (int(d) for d in weight.shape)
    batch, height, width, _ = (int(d) for d in x.shape)
    out_h, out_w = shape.out(height, width, (kh, kw))
    padded = _pad(x, shape)
    (sh, sw), (dh, dw) = shape.strides, shape.dilation
    ky, kx = te.reduce_axis((0, kh), "ky"), te.reduce_axis((0, kw), "kx")

    def compute(b: Any, h: Any, w: Any, c: Any) -> Any:
        return te.sum(padded[b, h * sh + ky * dh, w * sw + kx * dw, c] * _float(weight[ky, kx, c]), axis=[ky, kx])

    return te.compute((batch, out_h, out_w, channels), compute, name=DEPTHWISE)


def _float(value: Any) -> Any:
    return value if str(value.dtype) == "float32" else value.astype("float32")


def _pad(x: Tensor, shape: ConvShape) -> Tensor:
    from tvm import te, tirx

    top, left, bottom, right = shape.padding
    if not any(shape.padding):
        return x
    batch, height, width, channels = (int(d) for d in x.shape)

    def compute(b: Any, h: Any, w: Any, c: Any) -> Any:
        inside = tirx.all(h >= top, h < top + height, w >= left, w < left + width)
        return tirx.if_then_else(inside, x[b, h - top, w - left, c], tirx.const(0.0, "float32"))

    return te.compute((batch, height + top + bottom, width + left + right, channels), compute, name=PAD)


def fake_quantize(x: Tensor, scale: float, zero_point: int, low: int, high: int) -> Tensor:
    """Quantise and dequantise at once, in float: the same values as ONNX's QuantizeLinear → DequantizeLinear."""
    from tvm import te, tirx

    def compute(*index: Any) -> Any:
        step = te.round(x(*index) / tirx.const(scale, "float32")) + tirx.const(float(zero_point), "float32")
        inside = te.max(te.min(step, tirx.const(float(high), "float32")), tirx.const(float(low), "float32"))
        return (inside - tirx.const(float(zero_point), "float32")) * tirx.const(scale, "float32")

    return te.compute(x.shape, compute, name="fake_quantize")


def take_packed(weight: Tensor, rows: Tensor) -> Tensor:
    """Rows of an embedding stored as the dense weight that it is tied to: (out / v, in, v) → (*rows, in)."""
    from tvm import te

    blocks, depth, v = (int(d) for d in weight.shape)

    def compute(*index: Any) -> Any:
        *lead, k = index
        row = te.max(te.min(rows(*lead), blocks * v - 1), 0)
        return weight[row // v, k, row % v]

    return te.compute((*rows.shape, depth), compute, name="take_packed")


def scatter_rows(slots: int, heads: int, width: int, count: int) -> Any:
    """A PrimFunc that writes rows into a pool in place: pool[index[i]] = rows[i].

    Shapes: pool (slots, heads, width), index (count,) int64, rows (count, heads, width). The pool is the call's first
    argument and its only output; TVM's own scatter copies the whole pool first.
    """
    from tvm.script import tirx as T

    @T.prim_func(private=True, s_tir=True)  # type: ignore[untyped-decorator]
    def scatter_rows(pool_handle: T.handle, index_handle: T.handle, rows_handle: T.handle) -> None:
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True})
        pool = T.match_buffer(pool_handle, (slots, heads, width), "float32")
        index = T.match_buffer(index_handle, (count,), "int64")
        rows = T.match_buffer(rows_handle, (count, heads, width), "float32")
        for i, h, j in T.grid(count, heads, width):
            with T.sblock("scatter"):
                vi, vh, vj = T.axis.remap("SSS", [i, h, j])
                T.reads(index[vi], rows[vi, vh, vj])
                T.writes(pool[0:slots, 0:heads, 0:width])
                row = T.Select(index[vi] < T.int64(0), index[vi] + T.int64(slots), index[vi])
                if row >= T.int64(0) and row < T.int64(slots):  # never outside the pool, whatever the caller says
                    pool[row, vh, vj] = rows[vi, vh, vj]

    return scatter_rows
