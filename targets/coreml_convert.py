"""One signature of a Program → one .mlpackage, through coremltools.

What is ours here: names and dtypes of inputs and outputs, the choice of graph passes, KV pools as states, and errors
that name the operation and the source line.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from edgec.errors import ConversionError, EdgecError, Reason

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

    from edgec.model import Program, Signature, TensorSpec

    from .coreml import CoreMLOptions

# Passes of coremltools that are left out, and why.
SKIPPED_PASSES = {
    # It rescales the inputs of a quantised addition, so that the parameters are no longer those of the Program.
    "common::distributive_quantized_binary_op_scale_normalization",
}


def load_signature(program: Program, signature: Signature) -> ExportedProgram:
    """The signature's graph in core ATen operations, INT8 weights folded; checked to be convertible.

    Raises:
        ConversionError: coremltools has no conversion for some of its operations.
    """
    from .coreml_import import import_coremltools
    from .coreml_ops import register_missing_operations

    import_coremltools()
    register_missing_operations()
    exported: ExportedProgram = program.exported(signature.name, folded=True)
    with quiet():
        exported = exported.run_decompositions({})
    check_operations(exported)
    return exported


def convert_signature(exported: ExportedProgram, signature: Signature, options: CoreMLOptions, form: str) -> Any:
    """A single-function coremltools MLModel. `form` is "inputs", or "state" (KV pools as states; edits `exported`).

    Raises:
        ConversionError: coremltools can't convert it; the message has the operation and its source line.
    """
    import coremltools as ct

    from .coreml_precision import compute_precision
    from .coreml_state import with_states

    inputs, outputs = list(signature.inputs), list(signature.outputs)
    if form == "state" and signature.state:
        exported = with_states(exported, signature)
        inputs = [t for t in inputs if t.name not in signature.state_inputs]
        outputs = [t for t in outputs if t.name not in signature.state_outputs]
    half_state = options.precision == "float16"
    pools = signature.state_inputs | signature.state_outputs
    with quiet(), lean(), _blame(exported):
        return ct.convert(
            exported,
            inputs=[_tensor_type(t, half_state and t.name in pools) for t in inputs],
            outputs=[_tensor_type(t, half_state and t.name in pools) for t in outputs],
            minimum_deployment_target=getattr(ct.target, options.minimum_deployment_target),
            compute_precision=compute_precision(options),
            pass_pipeline=_passes(),
            skip_model_load=True,
        )


def small_scales(model: Any) -> list[str]:
    """A warning of scales that float16 holds with few bits or not at all: they change what was fixed; or nothing."""
    import numpy as np

    limit = float(np.finfo(np.float16).smallest_normal)
    small = []
    for op in model._mil_program.functions["main"].operations:
        scale = op.inputs.get("scale")
        value = getattr(scale, "val", None)
        if value is not None and np.asarray(value).dtype == np.float16 and np.any(np.abs(value) < limit):
            small.append(f"{op.name} ({float(np.min(np.abs(value))):.1e})")
    if not small:
        return []
    return [
        f"coreml: {len(small)} quantisation scales are below {limit:.0e}, where float16 loses precision: "
        f"{', '.join(small[:3])}{' …' if len(small) > 3 else ''}; `precision: float32` keeps them"
    ]


def _tensor_type(spec: TensorSpec, half: bool) -> Any:
    """Names and dtypes as in the Signature: pools in float16 when the program computes so, other floats in float32.

    float32 at the edge costs one cast and spares every caller float16 arrays; pools would be cast whole on each step.
    """
    import coremltools as ct
    import numpy as np

    if spec.dtype.startswith("float"):
        return ct.TensorType(name=spec.name, dtype=np.float16 if half else np.float32)
    return ct.TensorType(name=spec.name, dtype=np.int32)  # Core ML has no other integer at its edge


def _passes() -> Any:
    import coremltools as ct

    pipeline = ct.PassPipeline()
    pipeline.remove_passes(SKIPPED_PASSES)
    return pipeline


def check_operations(exported: ExportedProgram) -> None:
    """Refuse a graph with operations that coremltools can't convert: all of them at once, before any work is done."""
    from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY

    unknown: dict[str, torch.fx.Node] = {}
    for node in exported.graph_module.graph.nodes:
        if node.op == "call_function" and _TORCH_OPS_REGISTRY.get_func(_kind(node)) is None:
            unknown.setdefault(_kind(node), node)
    if unknown:
        what = ", ".join(f"{_torch_name(n)} at {source_line(n)}" for n in unknown.values())
        raise ConversionError(
            f"coreml: conversion failed [unsupported-op]: {what} has no Core ML operation",
            hint="rewrite that part with supported operations, or build the other targets with --target",
            reason=Reason.UNSUPPORTED_OP,
        )


def _kind(node: torch.fx.Node) -> str:
    """An operation's name as coremltools looks it up."""
    from coremltools.converters.mil.frontend.torch.utils import sanitize_op_kind

    target: Any = node.target
    name = target.name() if hasattr(target, "name") and callable(target.name) else getattr(target, "__name__", target)
    return str(sanitize_op_kind(str(name)))


def _torch_name(node: torch.fx.Node) -> str:
    target = str(node.target)
    return target.removesuffix(".default") if target.startswith("aten.") else target


def source_line(node: torch.fx.Node) -> str:
    """`file:line` of the user's code that a node came from: the innermost frame outside torch itself."""
    frames = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if "File " in line]
    for frame in reversed(frames):
        file, _, rest = frame.removeprefix('File "').partition('", line ')
        if "/torch/" not in file and "site-packages" not in file:
            return f"{file}:{rest.split(',')[0]}"
    return f"an unknown line (node {node.name})"


@contextmanager
def _blame(exported: ExportedProgram) -> Iterator[None]:
    """Turn whatever coremltools raises into an error that names the node it was converting, and its source line."""
    from coremltools.converters.mil.frontend.torch import ops

    original, current = ops.convert_single_node, [""]

    def recorded(context: Any, node: Any) -> None:
        current[0] = node.name
        original(context, node)
        current[0] = ""

    ops.convert_single_node = recorded
    try:
        yield
    except EdgecError:
        raise
    except MemoryError:
        raise
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        node = next((n for n in exported.graph_module.graph.nodes if n.name == current[0]), None)
        where = f"{_torch_name(node)} at {source_line(node)}" if node is not None else "a graph pass of coremltools"
        raise ConversionError(
            f"coreml: conversion failed in {where}: {reason}",
            hint="rewrite that part, leave it in float with the quantise pass's `exclude`, or build the other targets "
            "with --target; --debug shows coremltools' traceback",
        ) from error
    finally:
        ops.convert_single_node = original


@contextmanager
def lean() -> Iterator[None]:
    """coremltools without the work that it does for its developers only.

    Between its hundred graph passes it validates the whole program and formats it for a debug log that nobody reads:
    40 % of the time for a 30-layer decoder. Here it is validated once, by `validate` below, when it is finished.
    """
    from coremltools.converters.mil.mil import Program as MilProgram

    validate, text = MilProgram.validate, MilProgram.__str__
    MilProgram.validate = lambda self, check_essential_scope=False: None
    MilProgram.__str__ = lambda self: "MIL program"
    try:
        yield
    finally:
        MilProgram.validate, MilProgram.__str__ = validate, text


@contextmanager
def quiet() -> Iterator[None]:
    """coremltools draws progress bars on stderr, which belongs to edgec, and NumPy warns of fp16 overflow in it."""
    import numpy as np
    import tqdm  # type: ignore[import-untyped]

    init = tqdm.tqdm.__init__

    def silent(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "disable": True})

    tqdm.tqdm.__init__ = silent
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            yield
    finally:
        tqdm.tqdm.__init__ = init
