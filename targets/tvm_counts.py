"""What a compiled Program consists of, for the report: kernels, layout operations, float arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgec.model import Program

if TYPE_CHECKING:
    from .tvm_import import Imported


def count_ops(module: Any, imported: Imported, program: Program) -> dict[str, int]:
    """Counts over all signatures.

    `ops`: kernels that the fused module calls. `layout_ops`: transposes of the imported graph that move data.
    `float_ops`: for an INT8 program, every kernel, as TVM's arithmetic is float. `undelegated_ops`: there is
    no delegate.
    """
    ops = sum(_count(module[s.name], "relax.call_tir") for s in program.signatures)
    layout = sum(_count_moves(imported.module[s.name]) for s in program.signatures)
    return {
        "ops": ops,
        "layout_ops": layout,
        "float_ops": ops if program.quantization is not None else 0,
        "undelegated_ops": 0,
    }


def is_baseline(program: Program) -> bool:
    """Whether this is the float twin inside a quantised Program's folder."""
    return (program.path.parent / "program.json").is_file()


def _calls(function: Any) -> list[Any]:
    from tvm import ir, relax

    found: list[Any] = []
    relax.analysis.post_order_visit(function, lambda e: found.append(e) if isinstance(e, ir.Call) else None)
    return found


def _count(function: Any, prefix: str) -> int:
    return sum(getattr(c.op, "name", "").startswith(prefix) for c in _calls(function))


def _count_moves(function: Any) -> int:
    """permute_dims that change the order of two dimensions that are both longer than one."""
    moves = 0
    for call in _calls(function):
        if getattr(call.op, "name", "") == "relax.permute_dims":
            shape = call.args[0].ty.shape
            order = [int(a) for a in call.attrs.axes] if call.attrs.axes is not None else list(range(len(shape)))[::-1]
            long = [a for a in order if str(shape[a]) != "1"]
            moves += long != sorted(long)
    return moves
