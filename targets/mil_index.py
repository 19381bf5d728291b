"""MIL operations that read or write at computed places: gather and scatter.

From iOS 17 on, indices may not be negative, and an index out of bounds is undefined; here it raises IndexError, so
that a program which relies on it is found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .mil_table import Inputs, Value, operation, optional

_MODES: dict[str, Callable[..., Any]] = {
    "add": np.add.at,
    "sub": np.subtract.at,
    "mul": np.multiply.at,
    "div": np.divide.at,
    "max": np.maximum.at,
    "min": np.minimum.at,
}


def _write(data: Value, index: Any, updates: Any, mode: str) -> Value:
    """A copy of `data` with `updates` at `index`: the last one counts for "update", all accumulate otherwise."""
    result = np.array(data)
    if mode == "update":
        result[index] = updates
    else:
        _MODES[mode](result, index, updates)
    return result


@operation("gather")
def gather(a: Inputs) -> Value:
    """x (B…, D…), indices (B…, N…) → x.shape[:axis] + N + x.shape[axis+1:]."""
    x, indices = np.asarray(a["x"]), np.asarray(a["indices"])
    axis, batch = int(optional(a, "axis", 0)), int(optional(a, "batch_dims", 0))
    axis += x.ndim if axis < 0 else 0
    _check(indices, x.shape[axis])
    if batch == 0:
        return np.take(x, indices, axis)
    lead = x.shape[:batch]
    flat_x, flat_i = x.reshape(-1, *x.shape[batch:]), indices.reshape(-1, *indices.shape[batch:])
    rows = [np.take(v, i, axis - batch) for v, i in zip(flat_x, flat_i, strict=True)]
    return np.stack(rows).reshape(*lead, *rows[0].shape)


@operation("gather_along_axis")
def gather_along_axis(a: Inputs) -> Value:
    return np.take_along_axis(a["x"], np.asarray(a["indices"], np.int64), int(optional(a, "axis", 0)))


@operation("gather_nd")
def gather_nd(a: Inputs) -> Value:
    """The last axis of `indices` names the leading axes of x, after `batch_dims` shared ones."""
    x, indices = np.asarray(a["x"]), np.asarray(a["indices"])
    batch = int(optional(a, "batch_dims", 0))
    if batch == 0:
        return x[tuple(np.moveaxis(indices, -1, 0))]
    lead = x.shape[:batch]
    flat_x, flat_i = x.reshape(-1, *x.shape[batch:]), indices.reshape(-1, *indices.shape[batch:])
    rows = [v[tuple(np.moveaxis(i, -1, 0))] for v, i in zip(flat_x, flat_i, strict=True)]
    return np.stack(rows).reshape(*lead, *rows[0].shape)


@operation("scatter")
def scatter(a: Inputs) -> Value:
    data, axis = np.asarray(a["data"]), int(optional(a, "axis", 0))
    axis += data.ndim if axis < 0 else 0
    _check(a["indices"], data.shape[axis])
    index = (slice(None),) * axis + (np.asarray(a["indices"]),)
    return _write(data, index, a["updates"], str(optional(a, "mode", "add")))


@operation("scatter_along_axis")
def scatter_along_axis(a: Inputs) -> Value:
    """Element [.., i, ..] of `updates` goes to [.., indices[.., i, ..], ..]."""
    indices, axis = np.asarray(a["indices"]), int(optional(a, "axis", 0))
    axis += indices.ndim if axis < 0 else 0
    _check(indices, a["data"].shape[axis])
    index = [*np.indices(indices.shape, sparse=True)]
    index[axis] = indices
    return _write(a["data"], tuple(index), a["updates"], str(optional(a, "mode", "add")))


@operation("scatter_nd")
def scatter_nd(a: Inputs) -> Value:
    """The last axis of `indices` names the leading axes of `data`."""
    indices = np.asarray(a["indices"])
    _check(indices, np.array(a["data"].shape[: indices.shape[-1]]))
    return _write(a["data"], tuple(np.moveaxis(indices, -1, 0)), a["updates"], str(optional(a, "mode", "add")))


def _check(indices: Any, size: Any) -> None:
    indices = np.asarray(indices)
    if indices.size and (np.any(indices < 0) or np.any(indices >= size)):
        raise IndexError(f"indices reach from {indices.min()} to {indices.max()}, the axis has {size}")
