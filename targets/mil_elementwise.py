"""MIL operations that work element by element, and reductions.

Definitions follow coremltools' documentation of each operation (converters/mil/mil/ops/defs), defaults included.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .mil_table import OPERATIONS, Inputs, Value, ints, operation, optional

_UNARY: dict[str, Callable[..., Value]] = {
    "abs": np.abs,
    "acos": np.arccos,
    "asin": np.arcsin,
    "atan": np.arctan,
    "atanh": np.arctanh,
    "ceil": np.ceil,
    "cos": np.cos,
    "cosh": np.cosh,
    "exp": np.exp,
    "exp2": np.exp2,
    "floor": np.floor,
    "logical_not": np.logical_not,
    "round": np.round,
    "sign": np.sign,
    "sin": np.sin,
    "sinh": np.sinh,
    "sqrt": np.sqrt,
    "square": np.square,
    "tan": np.tan,
    "tanh": np.tanh,
}
_BINARY: dict[str, Callable[..., Value]] = {
    "add": np.add,
    "equal": np.equal,
    "floor_div": np.floor_divide,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "mod": np.mod,
    "mul": np.multiply,
    "not_equal": np.not_equal,
    "pow": np.power,
    "sub": np.subtract,
}


def _enter(name: str, function: Callable[..., Value], arguments: tuple[str, ...]) -> None:
    OPERATIONS[name] = lambda a: function(*(a[k] for k in arguments))


for _name, _function in _UNARY.items():
    _enter(_name, _function, ("x",))
for _name, _function in _BINARY.items():
    _enter(_name, _function, ("x", "y"))


@operation("identity", "cast")
def cast(a: Inputs) -> Value:
    """The evaluator converts every result to its declared type, which is all a cast does (toward zero to integers)."""
    return np.asarray(a["x"])


@operation("real_div")
def real_div(a: Inputs) -> Value:
    """True division of floats; division of integers rounds toward zero, as Core ML's does."""
    x, y = np.asarray(a["x"]), np.asarray(a["y"])
    if np.issubdtype(x.dtype, np.integer):
        return np.trunc(x / y)
    return np.divide(x, y)


@operation("clip")
def clip(a: Inputs) -> Value:
    return np.clip(a["x"], a["alpha"], a["beta"])


@operation("inverse")
def inverse(a: Inputs) -> Value:
    return 1 / (a["x"] + optional(a, "epsilon", 1e-4))


@operation("log")
def log(a: Inputs) -> Value:
    return np.log(a["x"] + optional(a, "epsilon", 1e-45))


@operation("rsqrt")
def rsqrt(a: Inputs) -> Value:
    return 1 / np.sqrt(a["x"] + optional(a, "epsilon", 1e-12))


@operation("threshold")
def threshold(a: Inputs) -> Value:
    return np.maximum(a["x"], a["alpha"])


@operation("erf")
def erf(a: Inputs) -> Value:
    import torch

    return torch.erf(torch.as_tensor(a["x"])).numpy()


@operation("relu")
def relu(a: Inputs) -> Value:
    return np.maximum(a["x"], 0)


@operation("relu6")
def relu6(a: Inputs) -> Value:
    return np.clip(a["x"], 0, 6)


@operation("clamped_relu")
def clamped_relu(a: Inputs) -> Value:
    """min(beta, x) where x ≥ 0, min(beta, alpha · x) elsewhere."""
    x = a["x"]
    return np.minimum(a["beta"], np.where(x >= 0, x, a["alpha"] * x))


@operation("leaky_relu")
def leaky_relu(a: Inputs) -> Value:
    return np.where(a["x"] >= 0, a["x"], a["alpha"] * a["x"])


@operation("prelu")
def prelu(a: Inputs) -> Value:
    """One slope per channel; x is (N, C, …)."""
    x = a["x"]
    alpha = np.asarray(a["alpha"]).reshape(1, -1, *[1] * (x.ndim - 2))
    return np.where(x >= 0, x, alpha * x)


@operation("elu")
def elu(a: Inputs) -> Value:
    x = a["x"]
    return np.where(x >= 0, x, a["alpha"] * np.expm1(np.minimum(x, 0)))


@operation("linear_activation")
def linear_activation(a: Inputs) -> Value:
    return a["alpha"] * a["x"] + a["beta"]


@operation("sigmoid")
def sigmoid(a: Inputs) -> Value:
    import torch

    return torch.sigmoid(torch.as_tensor(a["x"])).numpy()


@operation("sigmoid_hard")
def sigmoid_hard(a: Inputs) -> Value:
    return np.clip(a["alpha"] * a["x"] + a["beta"], 0, 1)


@operation("silu")
def silu(a: Inputs) -> Value:
    return a["x"] * sigmoid(a)


@operation("gelu")
def gelu(a: Inputs) -> Value:
    """MIL's three forms: EXACT (erf), TANH_APPROXIMATION, SIGMOID_APPROXIMATION."""
    x, mode = a["x"], str(optional(a, "mode", "EXACT"))
    if mode == "TANH_APPROXIMATION":
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    if mode == "SIGMOID_APPROXIMATION":
        return x * sigmoid({"x": 1.702 * x})
    return 0.5 * x * (1 + erf({"x": x / np.float32(np.sqrt(2))}))


@operation("softplus")
def softplus(a: Inputs) -> Value:
    return np.logaddexp(0, a["x"])


@operation("softsign")
def softsign(a: Inputs) -> Value:
    return a["x"] / (1 + np.abs(a["x"]))


@operation("softmax")
def softmax(a: Inputs) -> Value:
    axis = int(optional(a, "axis", -1))
    x = np.asarray(a["x"], np.float32)
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


@operation("select")
def select(a: Inputs) -> Value:
    return np.where(a["cond"], a["a"], a["b"])


@operation("cumsum")
def cumsum(a: Inputs) -> Value:
    """Along `axis`; `exclusive` leaves the element itself out, `reverse` sums from the end."""
    x, axis = a["x"], int(optional(a, "axis", 0))
    if optional(a, "reverse", False):
        x = np.flip(x, axis)
    total = np.cumsum(x, axis)
    if optional(a, "exclusive", False):
        total = total - x
    return np.flip(total, axis) if optional(a, "reverse", False) else total


def _axes(a: Inputs) -> tuple[int, ...] | None:
    axes = a.get("axes")
    return None if axes is None else tuple(ints(axes))


def _reduction(name: str, function: Callable[..., Value]) -> None:
    OPERATIONS[name] = lambda a: function(a["x"], axis=_axes(a), keepdims=bool(optional(a, "keep_dims", False)))


_REDUCTIONS: dict[str, Callable[..., Value]] = {
    "reduce_sum": np.sum,
    "reduce_mean": np.mean,
    "reduce_max": np.max,
    "reduce_min": np.min,
    "reduce_prod": np.prod,
    "reduce_l1_norm": lambda x, **k: np.sum(np.abs(x), **k),
    "reduce_l2_norm": lambda x, **k: np.sqrt(np.sum(np.square(x), **k)),
    "reduce_sum_square": lambda x, **k: np.sum(np.square(x), **k),
    "reduce_log_sum": lambda x, **k: np.log(np.sum(x, **k)),
    "reduce_log_sum_exp": lambda x, **k: np.log(np.sum(np.exp(x), **k)),
}
for _name, _reduce in _REDUCTIONS.items():
    _reduction(_name, _reduce)


def _arg(function: Callable[..., Value]) -> Callable[[Inputs], Value]:
    def compute(a: Inputs) -> Value:
        return function(a["x"], axis=int(optional(a, "axis", -1)), keepdims=bool(optional(a, "keep_dims", False)))

    return compute


operation("reduce_argmax")(_arg(np.argmax))
operation("reduce_argmin")(_arg(np.argmin))
