"""Extreme constants: −1e38 in a mask or a padding would be the range of the tensor that it enters.

They are found in the captured graph before anything is calibrated, named with their source line, and clipped to
`LIMIT`, which is large enough to stand for infinity in a softmax or a maximum. A tensor that still carries the clipped
value is left in float (see quantize_static), so that it decides no range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgec.blame import source_line
from edgec.errors import ConversionError, Reason

if TYPE_CHECKING:
    import torch
    from torch.fx import Node

LIMIT = 1e4
"""e^-10000 is 0 in float32, and 10000 fits float16 (65504)."""

_FILLS = ("masked_fill", "masked_fill_", "where", "full", "full_like", "fill", "constant_pad_nd")
"""Operators whose integer arguments, too, become elements of a tensor."""

_BOUNDS = ("clamp", "clamp_", "clamp_min", "clamp_max", "hardtanh", "hardtanh_", "relu6")


@dataclass(frozen=True)
class ExtremeConstant:
    """`value` is the largest in magnitude; `where` a source line, or the name of a buffer or weight."""

    name: str
    value: float
    where: str


def find_extreme(module: torch.fx.GraphModule) -> list[ExtremeConstant]:
    """Every constant beyond `LIMIT` that takes part in arithmetic: scalars in the graph, buffers and weights.

    The bounds of a clamp are not among them: no tensor ever has their value.
    """

    found = []
    for node in module.graph.nodes:
        if node.op == "call_function" and not _is_bound(node):
            for value in _scalars(node):
                if abs(value) > LIMIT:
                    found.append(ExtremeConstant(node.name, value, source_line(node)))
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_floating_point() and tensor.numel():
            flat = tensor.detach().flatten()
            value = float(flat[flat.abs().argmax()])
            if abs(value) > LIMIT:
                found.append(ExtremeConstant(name, value, name))
    return found


def clip_extreme(module: torch.fx.GraphModule) -> None:
    """Clip them to ±LIMIT, in place."""
    import torch

    for node in module.graph.nodes:
        if node.op == "call_function" and not _is_bound(node):
            clip = _clip_any if _name(node) in _FILLS else _clip_float
            node.args = torch.fx.node.map_aggregate(node.args, clip)
            node.kwargs = torch.fx.node.map_aggregate(node.kwargs, clip)
    module.recompile()
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                tensor.clamp_(-LIMIT, LIMIT)


def refuse(found: list[ExtremeConstant]) -> None:
    """Raises: ConversionError with reason `extreme-constant`, naming each of them."""
    named = "; ".join(f"{c.value:g} at {c.where or c.name}" for c in found)
    raise ConversionError(
        f"quantize: constants that would destroy an INT8 range: {named}",
        hint=f"make them smaller than {LIMIT:g}, or let `extreme_constants: clip` do it",
        reason=Reason.EXTREME_CONSTANT,
    )


def _name(node: Node) -> str:
    import torch

    return node.target._opname if isinstance(node.target, torch._ops.OpOverload) else ""


def _is_bound(node: Node) -> bool:
    return _name(node) in _BOUNDS


def _scalars(node: Node) -> list[float]:
    import torch

    kinds = (float, int) if _name(node) in _FILLS else (float,)
    values: list[float] = []

    def collect(argument: Any) -> Any:
        if isinstance(argument, kinds):
            values.append(float(argument))
        return argument

    torch.fx.node.map_aggregate((node.args, node.kwargs), collect)
    return values


def _clip_float(argument: Any) -> Any:
    return max(-LIMIT, min(LIMIT, argument)) if isinstance(argument, float) else argument


def _clip_any(argument: Any) -> Any:
    return max(-LIMIT, min(LIMIT, argument)) if isinstance(argument, float | int) else argument
