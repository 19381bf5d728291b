"""Whose line was it: turn a failure of torch.export or of the ONNX translation into an error that names the op, the
user's source line, and what to do.

torch keeps the Python stack of every node in `node.meta["stack_trace"]`; the line shown is the innermost frame that
does not lie inside an installed package, or the innermost one when all do.
"""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from edgec.errors import ConversionError, Reason

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)(?:\n\s+(?P<code>[^\n]+))?')
_PACKAGES = ("site-packages", "dist-packages", "/torch/", "<")


def _is_users(file: str) -> bool:
    return not any(part in file for part in _PACKAGES)


def source_line(node: torch.fx.Node) -> str:
    """`model.py:88: x.grid_sample(...)`, or "" when the node has no stack."""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    if not frames:
        return ""
    frame = next((f for f in reversed(frames) if _is_users(f["file"])), frames[-1])
    code = f": {frame['code'].strip()}" if frame["code"] else ""
    return f"{Path(frame['file']).name}:{frame['line']}{code}"


def module_name(node: torch.fx.Node) -> str:
    """The dotted name of the module that a node came from, "" for the outermost."""
    stack = node.meta.get("nn_module_stack") or {}
    names = [str(path) for path, _ in stack.values()]
    name = names[-1] if names else ""
    return re.sub(r"^L\['self'\]\.?|^L__self___?", "", name)


def error_line(error: BaseException) -> str:
    """The innermost frame of a traceback that is the user's own, as `file.py:line: code`."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_users(frame.filename) and Path(frame.filename).parent != Path(__file__).parent:
            return f"{Path(frame.filename).name}:{frame.lineno}: {(frame.line or '').strip()}"
    return ""


def first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def unsupported_ops(program: ExportedProgram) -> list[tuple[str, str, str]]:
    """`(op, source line, module)` of each node that has no ONNX translation, once per op and line."""
    import torch
    from torch.onnx._internal.exporter import _core, _registration

    registry = _registration.ONNXRegistry.from_torchlib()
    decomposed = _core._prepare_exported_program_for_export(program, registry=registry)
    # What the user called: decomposition has replaced it, but keeps its stack.
    called = {n.meta.get("stack_trace"): str(n.target) for n in program.graph.nodes if n.op == "call_function"}
    found: dict[tuple[str, str], str] = {}
    for node in decomposed.graph.nodes:
        target = node.target if node.op == "call_function" else None
        if isinstance(target, torch._ops.OpOverload) and not registry.is_registered(target):
            op = called.get(node.meta.get("stack_trace"), str(target))
            found.setdefault((op, source_line(node)), module_name(node))
    return [(op, line, module) for (op, line), module in found.items()]


def blame_onnx(program: ExportedProgram, signature: str, error: Exception) -> ConversionError:
    """The error for a failed ONNX translation of `program`."""
    ops = unsupported_ops(program)
    if not ops:
        return ConversionError(
            f"signature `{signature}` could not be translated to ONNX: {first_line(error)}",
            hint="run with --debug for the converter's own traceback",
            reason=Reason.EXPORT_FAILED,
        )
    named = "; ".join(f"{op} at {line or 'an unknown line'}" for op, line, _ in ops)
    return ConversionError(
        f"signature `{signature}`: no ONNX operator for {named}",
        hint="rewrite that line with operations that ONNX has, or keep that part out of the exported module",
        reason=Reason.UNSUPPORTED_OP,
    )


def blame_capture(signature: str, error: Exception) -> ConversionError:
    """The error for a module that torch.export can't capture."""
    user = re.search(r"[Ff]rom user code:\s*\n(?P<frames>(?:.*\n?)+)", str(error))
    frames = list(_FRAME.finditer(user["frames"])) if user else []
    if frames:
        frame = frames[-1]
        line = f"{Path(frame['file']).name}:{frame['line']}: {(frame['code'] or '').strip()}"
    else:
        line = error_line(error)
    where = f" at {line}" if line else ""
    return ConversionError(
        f"signature `{signature}` can't be captured{where}: {first_line(error)}",
        hint="torch.export needs a forward without data-dependent Python control flow: use torch.where or torch.cond, "
        "or declare a size that changes as a dynamic dimension",
        reason=Reason.EXPORT_FAILED,
    )
