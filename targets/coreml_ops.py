"""Conversions of torch operations that coremltools 9 lacks, entered in its registry.

Each is the plain definition in MIL. They are entered once per process, and never over one that coremltools has.
"""

from __future__ import annotations

from typing import Any


def register_missing_operations() -> None:
    """Make coremltools' torch frontend complete enough for the graphs that edgec exports."""
    from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY

    for names, convert in _MISSING:
        for name in names:
            if _TORCH_OPS_REGISTRY.get_func(name) is None:
                _TORCH_OPS_REGISTRY.set_func_by_name(convert, name)


def _where_scalar(context: Any, node: Any) -> None:
    """aten.where with a number on one or both sides: the number takes the other side's dtype."""
    from coremltools.converters.mil.frontend.torch.ops import _get_inputs, promote_input_dtypes
    from coremltools.converters.mil.mil import Builder

    condition, a, b = _get_inputs(context, node, expected=3)
    a, b = promote_input_dtypes([a, b])
    context.add(Builder.select(cond=condition, a=a, b=b, name=node.name))


_MISSING = [
    (("where.scalarother", "where.scalarself"), _where_scalar),
]
