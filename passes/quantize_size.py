"""What a quantised model should weigh, and what it does: a quantised file that is larger than predicted is reported."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from edgec.context import Context

SURPRISE = 1.1
"""Ten percent: scales, zero points and biases of a small model are within it."""


def state_bytes(module: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers, tied ones once."""
    seen: dict[int, int] = {}
    for t in [*module.parameters(), *module.buffers()]:
        seen.setdefault(t.data_ptr() or id(t), t.numel() * t.element_size())
    return sum(seen.values())


def predicted_bytes(float_bytes: int, weights: Iterable[tuple[int, ...]]) -> int:
    """From the float model's bytes and the shapes of the weights that become INT8: one byte instead of four for
    each number, and a float scale and a zero point for each output channel."""
    saved = sum(3 * _numel(shape) - (4 + 8) * shape[0] for shape in weights)
    return float_bytes - saved


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def compare_size(float_bytes: int, predicted: int, actual: int, context: Context) -> None:
    """Note both sizes; warn when the result is a surprise, or not smaller than the float model."""
    context.log.facts |= {"float_bytes": float_bytes, "predicted_bytes": predicted, "quantized_bytes": actual}
    context.note(
        f"weights: {float_bytes / 1e6:.2f} MB → {actual / 1e6:.2f} MB ({float_bytes / max(actual, 1):.2f}× smaller, "
        f"predicted {predicted / 1e6:.2f} MB)"
    )
    if actual >= float_bytes:
        context.warn(f"the quantised weights take {actual} bytes, no less than the float ones ({float_bytes})")
    elif actual > SURPRISE * predicted:
        context.warn(f"the quantised weights take {actual} bytes where {predicted} were predicted")
