"""ExportedProgram → one Relax module: the way in for dynamic shapes, which TVM's ONNX importer mostly can't take.

The graph is TVM's own translation, without the packed kernels and in-place pools of the ONNX way: correct, and slower.
"""

from __future__ import annotations

from typing import Any

from edgec.errors import ConversionError, Reason
from edgec.model import Program

from .tvm_import import Imported

HINT = "replace the operation in the model, fix the dynamic dimension, or build the other targets with --target"


def import_exported(program: Program) -> Imported:
    """A Program's signatures as functions of one module, by way of their ExportedPrograms.

    Raises:
        ConversionError: an operation has no TVM form, or two signatures' helper functions have the same name.
    """
    import tvm
    from tvm import relax
    from tvm.relax.frontend.torch import from_exported_program

    imported = Imported()
    functions: dict[str, Any] = {}
    for signature in program.signatures:
        exported = program.exported(signature.name, folded=True)
        try:
            module = from_exported_program(exported, keep_params_as_input=True)
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise ConversionError(
                f"TVM can't take signature `{signature.name}`: {lines[-1] if lines else type(error).__name__}",
                hint=HINT,
                reason=Reason.UNSUPPORTED_OP,
            ) from error
        module, parameters = relax.frontend.detach_params(module)
        arrays = [p.numpy() for p in parameters.get("main", [])]
        imported.functions[signature.name] = tuple(imported.add(a) for a in arrays)
        for variable, function in module.functions_items():
            name = signature.name if variable.name_hint == "main" else variable.name_hint
            if name in functions:
                raise ConversionError(f"TVM gave two functions the name `{name}`", hint=HINT)
            functions[name] = function.with_attr("global_symbol", name) if name == signature.name else function
    imported.module = tvm.IRModule(functions)
    return imported
