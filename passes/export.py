"""Export a model: an ExportedProgram and an ONNX file per signature, and the golden recording they are held to.

Everything that a target reads is made here, and checked here before any target runs: weights and outputs are finite,
ONNX Runtime computes what PyTorch computes on real inputs, at every size that was declared, and softmaxes sum to 1.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, field_validator, model_validator

from edgec.draft import DRAFT_FILE
from edgec.errors import ConversionError, Reason
from edgec.golden import OnnxRunner, Recording, TorchRunner, replay, zero_state
from edgec.graphs import load_exported, save_exported
from edgec.model import Program, Signature, TensorSpec
from edgec.registry import Options, suggest

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

    from edgec.context import Context
    from edgec.model import Model
    from edgec.tasks.base import Task

__all__ = ["DynamicDim", "ExportOptions", "export_program", "load_exported"]

LEAST_OPSET = 21


class DynamicDim(Options):
    """A size that may differ from run to run."""

    axes: dict[str, int] = Field(description="input name → axis that has this size", min_length=1)
    least: int = Field(1, ge=1, description="the least size that will be asked for")
    greatest: int = Field(ge=1, description="the greatest size that will be asked for")

    @model_validator(mode="after")
    def _in_order(self) -> DynamicDim:
        if self.least >= self.greatest:
            raise ValueError(f"least ({self.least}) must be smaller than greatest ({self.greatest})")
        return self


class ExportOptions(Options):
    """How the graphs are written."""

    opset: int = Field(LEAST_OPSET, le=23, description="ONNX operator set; 21 is the first with every INT8 form used")
    dynamic: dict[str, DynamicDim] = Field(
        default_factory=dict,
        description="dynamic dimensions of the first signature by name, besides those that the task declares",
    )
    external_data_over: int = Field(
        1_500_000_000,
        ge=0,
        description="bytes of weights from which on they lie in program.weights",
    )

    @field_validator("opset")
    @classmethod
    def _holds_per_channel(cls, opset: int) -> int:
        if opset < LEAST_OPSET:
            raise ValueError(
                f"opset {opset} loses per-channel INT8 weights in some converters: use {LEAST_OPSET} or later"
            )
        return opset


def export_program(model: Model, options: ExportOptions, context: Context, *, baseline: Model | None) -> Program:
    """Write the program of `model` into `context.out`, that of `baseline` (the float model) into `context.out/float`.

    Raises:
        ConversionError: an op is not supported, numbers are not finite, or an invariant is broken.
        ParityError: the ONNX model does not compute what the module computes.
    """
    total = len(model.task.signatures(model.module)) * (2 if baseline else 1)
    program = _export(model, options, context, context.out, done=0, total=total)
    if baseline is not None:
        twin = _export(baseline, options, context, context.out / "float", done=total // 2, total=total)
        _compare_sizes(program, twin, context)
    return program


def _export(model: Model, options: ExportOptions, context: Context, folder: Path, *, done: int, total: int) -> Program:
    from edgec.graphs import capture, fold, register_quantized_ops

    from .export_check import check_finite_weights
    from .export_onnx import ExternalWeights, write_onnx

    register_quantized_ops()
    folder.mkdir(parents=True, exist_ok=True)
    check_finite_weights(model)
    if not _is_graph(model.module):
        model.module.eval()
    task = model.task
    signatures = task.signatures(model.module)
    weights = ExternalWeights(folder)
    programs: dict[str, ExportedProgram] = {}
    final: list[Signature] = []
    for i, signature in enumerate(signatures):
        if i == 0:
            signature = with_dynamic(signature, options)
        context.progress(done + i, total, f"export {signature.name}")
        started = time.perf_counter()
        exported = capture(task.bind(model.module, signature), task.example(signature), signature)
        signature = _named_outputs(signature, exported)
        captured = time.perf_counter()
        save_exported(exported, folder / f"{signature.name}.pt2")
        write_onnx(
            fold(exported),
            signature,
            folder / f"{signature.name}.onnx",
            opset=options.opset,
            external_over=options.external_data_over,
            weights=weights,
        )
        written = time.perf_counter()
        context.log.facts[f"seconds {folder.name}/{signature.name}"] = {
            "capture": round(captured - started, 1),
            "onnx": round(written - captured, 1),
        }
        programs[signature.name] = exported
        final.append(signature)
    program = Program(folder, tuple(final), model.quantization, task.kind, options.opset, model.parameters)
    for name, content in task.companions(model.module).items():
        (folder / "companions").mkdir(exist_ok=True)
        (folder / "companions" / name).write_bytes(content)
    if model.draft is not None:
        (folder / "companions").mkdir(exist_ok=True)
        model.draft.save(folder / "companions" / DRAFT_FILE)
    _record_and_check(program, task, programs, context)
    program.save()
    return program


def _compare_sizes(program: Program, twin: Program, context: Context) -> None:
    """Warn when the quantised files are no smaller than the float ones."""
    from .export_onnx import WEIGHTS

    def size(p: Program) -> int:
        files = [*(p.onnx_path(s.name) for s in p.signatures), p.path / WEIGHTS]
        return sum(f.stat().st_size for f in files if f.exists())

    ours, theirs = size(program), size(twin)
    if program.quantization is not None and ours >= theirs:
        context.warn(f"the quantised ONNX files take {ours} bytes, the float ones {theirs}")


def _is_graph(module: torch.nn.Module) -> bool:
    """Captured graphs are in evaluation mode for good, and their `eval()` raises."""
    import torch

    return isinstance(module, torch.fx.GraphModule)


def with_dynamic(signature: Signature, options: ExportOptions) -> Signature:
    """The signature with the dimensions of the recipe made dynamic in its inputs; outputs follow after capture.

    Raises:
        ConversionError: an input or an axis does not exist.
    """
    inputs = {t.name: t for t in signature.inputs}
    dynamic = list(signature.dynamic)
    for name, dim in options.dynamic.items():
        for input_name, axis in dim.axes.items():
            spec = inputs.get(input_name)
            if spec is None or not 0 <= axis < len(spec.shape):
                raise ConversionError(
                    f"export: dynamic `{name}`: no axis {axis} of input `{input_name}`{suggest(input_name, inputs)}",
                    hint="inputs: " + ", ".join(f"{t.name} {list(t.shape)}" for t in signature.inputs),
                    reason=Reason.BAD_OPTION,
                )
            inputs[input_name] = replace(spec, shape=(*spec.shape[:axis], name, *spec.shape[axis + 1 :]))
        dynamic.append((name, dim.least, dim.greatest))
    return replace(signature, inputs=tuple(inputs.values()), dynamic=tuple(dynamic))


def _named_outputs(signature: Signature, program: ExportedProgram) -> Signature:
    """The signature with its outputs' shapes as captured: sizes, or names of the inputs' dynamic dimensions.

    Raises:
        ConversionError: the number of outputs differs, or an output's size is a formula of dynamic dimensions.
    """
    import torch

    nodes = {n.name: n for n in program.graph.nodes}
    names: dict[str, str] = {}
    for spec, node_name in zip(signature.inputs, program.graph_signature.user_inputs, strict=True):
        for want, got in zip(spec.shape, nodes[str(node_name)].meta["val"].shape, strict=True):
            if isinstance(want, str) and isinstance(got, torch.SymInt):
                names[str(got.node.expr)] = want
    values = [nodes[str(n)].meta["val"] for n in program.graph_signature.user_outputs]
    if len(values) != len(signature.outputs):
        raise ConversionError(
            f"signature `{signature.name}` declares {len(signature.outputs)} outputs, its module returns {len(values)}",
            hint="correct the task's signatures",
            reason=Reason.EXPORT_FAILED,
        )
    outputs: list[TensorSpec] = []
    for spec, value in zip(signature.outputs, values, strict=True):
        shape: list[int | str] = []
        for size in value.shape:
            if isinstance(size, torch.SymInt) and str(size.node.expr) not in names:
                raise ConversionError(
                    f"signature `{signature.name}`: output `{spec.name}` has the dynamic size {size.node.expr}",
                    hint="give that output a size that is an input's, or make the dimension fixed",
                    reason=Reason.EXPORT_FAILED,
                )
            shape.append(names[str(size.node.expr)] if isinstance(size, torch.SymInt) else int(size))
        outputs.append(replace(spec, shape=tuple(shape)))
    return replace(signature, outputs=tuple(outputs))


def _record_and_check(program: Program, task: Task, exported: dict[str, ExportedProgram], context: Context) -> None:
    """Record the golden, and hold it against PyTorch."""
    from . import export_check as checks

    steps = task.record()
    if not steps:
        raise ConversionError(
            "the task gives no inputs to record", hint="give it evaluation data", reason=Reason.EMPTY_DATA
        )
    golden = OnnxRunner({s.name: program.onnx_path(s.name) for s in program.signatures}, threads=context.threads)
    pytorch = TorchRunner({name: p.module() for name, p in exported.items()}, program.signatures)
    outputs = replay(golden, program.signatures, steps)
    expected = replay(pytorch, program.signatures, steps)
    worst = 0.0
    for i, (step, want, got) in enumerate(zip(steps, expected, outputs, strict=True)):
        where = f"signature `{step.signature}`, step {i}"
        checks.check_finite_outputs(got, where)
        worst = max(worst, checks.check_parity(want, got, program.quantization, where))
        step.outputs = got
    if all(float(v.std()) == 0 for out in outputs for v in out.values()):
        context.warn("the recorded inputs leave every output constant: parity on them proves little")
    for signature in program.signatures:
        if signature.dynamic:
            count = checks.check_sizes(pytorch, golden, signature, task.example(signature), program.quantization)
            context.note(f"{signature.name}: ONNX equals PyTorch at {count} sizes of its dynamic dimensions")
        first = next((s for s in steps if s.signature == signature.name), None)
        # Without quantised activations a softmax can't but sum to 1; looking at it would load the model once more.
        if first is not None and program.quantization is not None and program.quantization.scheme == "static":
            feeds = {**zero_state(signature), **first.inputs} if signature.state else first.inputs
            checks.check_softmax(program.onnx_path(signature.name), checks.golden_feeds(golden, signature.name, feeds))
    context.note(f"{len(steps)} recorded steps: ONNX differs from PyTorch by {worst:.1e} of the outputs' scale")
    Recording(steps).save(program.path / "recording.safetensors")
