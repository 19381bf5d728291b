"""MIL operations that move elements without computing on them: reshapes, slices, joins and pads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .mil_table import Inputs, Value, ints, operation, optional


@operation("reshape")
def reshape(a: Inputs) -> Value:
    """0 keeps the dimension (only where the rank stays), -1 is whatever is left."""
    x, shape = np.asarray(a["x"]), ints(a["shape"])
    if len(shape) == x.ndim:
        shape = [x.shape[i] if d == 0 else d for i, d in enumerate(shape)]
    return x.reshape(shape)


@operation("reshape_like")
def reshape_like(a: Inputs) -> Value:
    """The dimensions `begins[i]:ends[i]` of each reference, one after the other."""
    shape: list[int] = []
    masks = zip(a["ref_tensors"], ints(a["begins"]), ints(a["ends"]), a["begin_masks"], a["end_masks"], strict=True)
    for reference, begin, end, begin_mask, end_mask in masks:
        shape += reference.shape[None if begin_mask else begin : None if end_mask else end]
    return np.asarray(a["x"]).reshape(shape)


@operation("expand_dims")
def expand_dims(a: Inputs) -> Value:
    return np.expand_dims(a["x"], tuple(ints(a["axes"])))


@operation("squeeze")
def squeeze(a: Inputs) -> Value:
    axes = a.get("axes")
    return np.squeeze(a["x"], None if axes is None else tuple(ints(axes)))


@operation("flatten2d")
def flatten2d(a: Inputs) -> Value:
    x, axis = a["x"], int(optional(a, "axis", 1))
    return x.reshape(math.prod(x.shape[:axis]), -1)


@operation("transpose")
def transpose(a: Inputs) -> Value:
    return np.transpose(a["x"], ints(a["perm"]))


@operation("reverse")
def reverse(a: Inputs) -> Value:
    axes = a.get("axes")
    return np.flip(a["x"], None if axes is None else tuple(ints(axes)))


@operation("shape")
def shape(a: Inputs) -> Value:
    return np.array(np.shape(a["x"]), np.int32)


def slices(a: Inputs, shape: tuple[int, ...]) -> tuple[slice | int, ...]:
    """The NumPy index that MIL's begin, end, stride and masks mean."""
    rank = len(shape)
    begin, end = ints(a["begin"]), ints(a["end"])
    stride = ints(optional(a, "stride", [1] * rank))
    no = [False] * rank
    begin_mask, end_mask = optional(a, "begin_mask", no), optional(a, "end_mask", no)
    squeeze_mask = optional(a, "squeeze_mask", no)
    index: list[slice | int] = []
    for i in range(rank):
        first = None if begin_mask[i] else begin[i]
        if squeeze_mask[i]:
            index.append(first or 0)
        else:
            index.append(slice(first, None if end_mask[i] else end[i], stride[i]))
    return tuple(index)


@operation("slice_by_index")
def slice_by_index(a: Inputs) -> Value:
    x = np.asarray(a["x"])
    return x[slices(a, x.shape)]


@operation("slice_update")
def slice_update(a: Inputs) -> Value:
    x = np.array(a["x"])
    x[slices(a, x.shape)] = a["update"]
    return x


@operation("slice_by_size")
def slice_by_size(a: Inputs) -> Value:
    """`size` -1 reaches to the end."""
    x = np.asarray(a["x"])
    bounds = zip(x.shape, ints(a["begin"]), ints(a["size"]), strict=True)
    return x[tuple(slice(b, d if s == -1 else b + s) for d, b, s in bounds)]


@operation("concat")
def concat(a: Inputs) -> Value:
    axis, values = int(a["axis"]), [np.asarray(v) for v in a["values"]]
    if not optional(a, "interleave", False):
        return np.concatenate([v.reshape(1) if v.ndim == 0 else v for v in values], axis)
    stacked = np.stack(values, axis + 1 if axis >= 0 else axis)  # a0 b0 a1 b1 …
    shape = list(values[0].shape)
    shape[axis] *= len(values)
    return stacked.reshape(shape)


@operation("stack")
def stack(a: Inputs) -> Value:
    return np.stack([np.asarray(v) for v in a["values"]], int(a["axis"]))


@operation("split")
def split(a: Inputs) -> tuple[Value, ...]:
    x, axis = np.asarray(a["x"]), int(a["axis"])
    sizes = a.get("split_sizes")
    if sizes is None:
        return tuple(np.split(x, int(a["num_splits"]), axis))
    return tuple(np.split(x, np.cumsum(ints(sizes))[:-1], axis))


@operation("tile")
def tile(a: Inputs) -> Value:
    return np.tile(a["x"], ints(a["reps"]))


@operation("pad")
def pad(a: Inputs) -> Value:
    """`pad` names the last N dimensions, (before, after) each."""
    x, widths = np.asarray(a["x"]), np.asarray(a["pad"]).reshape(-1, 2)
    full = [(0, 0)] * (x.ndim - len(widths)) + [(int(b), int(e)) for b, e in widths]
    mode = str(optional(a, "mode", "constant"))
    if mode == "constant":
        return np.pad(x, full, constant_values=optional(a, "constant_val", 0))
    kinds: dict[str, Any] = {"reflect": "reflect", "replicate": "edge"}
    return np.pad(x, full, mode=kinds[mode])


@operation("fill")
def fill(a: Inputs) -> Value:
    value = np.asarray(optional(a, "value", np.float32(0)))
    return np.full(ints(a["shape"]), value, value.dtype)


@operation("fill_like")
def fill_like(a: Inputs) -> Value:
    value = np.asarray(optional(a, "value", np.float32(0)))
    return np.full(np.shape(a["ref_tensor"]), value, value.dtype)


@operation("range_1d")
def range_1d(a: Inputs) -> Value:
    return np.arange(a["start"], a["end"], a["step"])


@operation("one_hot")
def one_hot(a: Inputs) -> Value:
    """A new axis of length `one_hot_vector_size`, `on_value` at the index."""
    size, axis = int(a["one_hot_vector_size"]), int(optional(a, "axis", -1))
    hot = np.asarray(a["indices"])[..., None] == np.arange(size)
    return np.moveaxis(np.where(hot, optional(a, "on_value", 1), optional(a, "off_value", 0)), -1, axis)


@operation("depth_to_space", "pixel_shuffle")
def pixel_shuffle(a: Inputs) -> Value:
    """(N, C·r², H, W) → (N, C, H·r, W·r). depth_to_space takes its blocks from the outermost part of the channels."""
    x = a["x"]
    n, c, h, w = x.shape
    if a.get("upscale_factor") is not None:
        r = int(a["upscale_factor"])
        parts = x.reshape(n, c // r**2, r, r, h, w).transpose(0, 1, 4, 2, 5, 3)
    else:
        r = int(a["block_size"])
        parts = x.reshape(n, r, r, c // r**2, h, w).transpose(0, 3, 4, 1, 5, 2)
    return parts.reshape(n, c // r**2, h * r, w * r)
