"""The table that maps a MIL operation's name to the function that computes it.

Conventions of every function in it:
* it takes one dictionary of the operation's inputs by MIL name (arrays, scalars, strings, or a list for variadic
  inputs) and returns an array, or a tuple of arrays for operations with several outputs;
* **floats are float32 arrays**. A tensor that MIL types as fp16 holds only values that fp16 can hold: the evaluator
  rounds after each operation, so functions compute in float32 and know nothing of precision;
* integers and booleans have the dtype that MIL gives them;
* inputs are never written to.

The modules mil_elementwise, mil_shape, mil_index, mil_neural and mil_quantization fill the table when `load` imports
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Inputs = dict[str, Any]
Value = Any  # an array; the type checker can't see that, since NumPy's and torch's stubs leave most results untyped
Compute = Callable[[Inputs], Any]

OPERATIONS: dict[str, Compute] = {}


def operation(*names: str) -> Callable[[Compute], Compute]:
    """Enter a function under one or more MIL operation names."""

    def wrap(compute: Compute) -> Compute:
        for name in names:
            OPERATIONS[name] = compute
        return compute

    return wrap


def load() -> dict[str, Compute]:
    """The complete table."""
    from . import mil_elementwise, mil_index, mil_neural, mil_quantization, mil_shape  # noqa: F401 (they register)

    return OPERATIONS


def ints(value: Any) -> list[int]:
    """A MIL integer vector (or scalar) as a list."""
    return [int(v) for v in np.asarray(value).reshape(-1)]


def optional(inputs: Inputs, name: str, default: Any) -> Any:
    """An optional input, or MIL's default for it."""
    value = inputs.get(name)
    return default if value is None else value
