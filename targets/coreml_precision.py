"""Which operations of a float16 program stay in float32.

float16 ends at 65,504. The residual stream of a language model stays below that (24,600 in SmolLM2-135M), but its
square, which every RMSNorm takes, does not (6 · 10⁸): the mean becomes infinite, its reciprocal root zero, and the
output a constant. So the chain square → mean → + ε → root of a norm is computed in float32, and only that; what goes in
and what comes out are float16. This is what Apple's own model conversions do, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .coreml import CoreMLOptions

_MEANS = ("reduce_mean", "reduce_sum")
_ROOTS = ("rsqrt", "sqrt")


def compute_precision(options: CoreMLOptions) -> Any:
    """The options' precision as coremltools takes it."""
    import coremltools as ct

    if options.precision == "float32":
        return ct.precision.FLOAT32
    kept = set(options.float32_operations)

    def in_float16(op: Any) -> bool:
        return not (op.op_type in kept or op.name in kept or is_norms_root_mean_square(op))

    return ct.transform.FP16ComputePrecision(op_selector=in_float16)


def is_norms_root_mean_square(op: Any) -> bool:
    """Whether a MIL operation is part of square → mean → + ε → root."""
    if _is_square(op):
        return any(_maker_is(user, _is_square, op) and user.op_type in _MEANS for user in op.outputs[0].child_ops)
    return _is_mean_square(op) or _is_shifted(op) or _is_root(op)


def _is_square(op: Any) -> bool:
    if op.op_type == "square":
        return True
    if op.op_type == "mul":
        return op.inputs["x"] is op.inputs["y"]
    return bool(op.op_type == "pow" and op.inputs["y"].val is not None and (op.inputs["y"].val == 2).all())


def _is_mean_square(op: Any) -> bool:
    return op.op_type in _MEANS and _maker_is(op, _is_square)


def _is_shifted(op: Any) -> bool:
    return op.op_type == "add" and _maker_is(op, _is_mean_square)


def _is_root(op: Any) -> bool:
    return op.op_type in _ROOTS and (_maker_is(op, _is_shifted) or _maker_is(op, _is_mean_square))


def _maker_is(op: Any, test: Any, maker: Any = None) -> bool:
    """Whether one of the operation's inputs comes from an operation that passes the test (and is `maker`)."""
    makers = [v.op for v in (op.inputs.get("x"), op.inputs.get("y")) if v is not None and v.op is not None]
    return any(test(m) and (maker is None or m is maker) for m in makers)
