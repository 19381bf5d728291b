"""An ONNX file → a Program, for targets that take ONNX. There is no torch module, so there are no passes.

The graph's inputs and outputs get the task's names (in order), its dynamic dimensions the task's sizes. An INT8 graph
keeps its own scales. The golden is recorded as for every Program: ONNX Runtime at BASIC on the task's inputs.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgec.errors import Reason, RecipeError, SourceError
from edgec.golden import Recording, carrying, replay
from edgec.inspection.facts import damaged
from edgec.inspection.onnx import dtype_name
from edgec.model import LayerScheme, Program, Quantization, Signature
from edgec.sources.fetch import fetch

if TYPE_CHECKING:
    import onnx

    from edgec.context import Context
    from edgec.sources.section import ModelSection
    from edgec.tasks.base import Arrays, Task

LEAST_OPSET = 13  # the first with per-channel QuantizeLinear; every target reads what is newer
_EXTERNAL_OVER = 1_500_000_000
_SCALE_INPUTS = {"QuantizeLinear": (1, 2), "DequantizeLinear": (1, 2)}


def import_program(section: ModelSection, task: Task, context: Context) -> Program:
    """Write the Program of an ONNX file into `context.out`.

    Raises:
        SourceError: the file can't be had or read, is invalid, or holds NaN.
        RecipeError: its inputs or outputs are not those that the task gives and takes.
    """
    assert section.from_ is not None
    path = fetch(section.from_, section.sha256, recipe_dir=context.recipe_dir, cache=context.cache)
    model = _read(path)
    _check_finite(path, model.graph)
    signature = task.signatures(_module(path))[0]
    _adapt(model, signature, path)
    _write(model, signature, context.out, path)
    weights = _weights(model.graph)
    program = Program(
        path=context.out,
        signatures=(signature,),
        quantization=_quantization(model.graph),
        task_kind=task.kind,
        opset=next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx")),
        parameters=sum(math.prod(t.dims) for t in weights),
    )
    _record(program, task, context)
    program.save()
    return program


def _read(path: Path) -> onnx.ModelProto:
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(str(path))
        onnx.checker.check_model(model)
    except (DecodeError, onnx.checker.ValidationError, ValueError, OSError) as cause:
        raise damaged(path, "a valid ONNX model", cause) from cause
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    if opset < LEAST_OPSET:
        raise SourceError(
            f"{path.name} is of opset {opset}, the least that is taken is {LEAST_OPSET}",
            hint="export it again, or convert it with onnx.version_converter and check the result",
            reason=Reason.BAD_CHECKPOINT,
        )
    return model


def _check_finite(path: Path, graph: onnx.GraphProto) -> None:
    from onnx import numpy_helper

    for tensor in graph.initializer:
        if dtype_name(tensor.data_type) in ("float32", "float16", "float64"):
            array = numpy_helper.to_array(tensor)
            bad = int(np.isnan(array).sum())
            if bad:
                raise SourceError(
                    f"{path.name}: {bad:,} of {array.size:,} values of `{tensor.name}` are NaN",
                    hint="this model was saved after its training diverged: take an earlier one",
                    reason=Reason.NOT_FINITE,
                )


def _module(path: Path) -> Any:
    """The graph as a torch module (positional in, positional out): a task may run the model to learn its outputs."""
    import onnxruntime
    import torch

    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as cause:  # ONNX Runtime raises a class of its own for each of its status codes
        raise damaged(path, "an ONNX model that ONNX Runtime can run", cause) from cause

    class Graph(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            names = [i.name for i in session.get_inputs()]
            if len(names) != len(tensors):
                raise RecipeError(
                    f"{path.name} takes {len(names)} inputs ({', '.join(names)}), the task gives {len(tensors)}",
                    hint="`edgec inspect` shows the model's inputs",
                )
            feeds = {n: t.numpy() for n, t in zip(names, tensors, strict=True)}
            try:
                values = session.run(None, feeds)
            except Exception as cause:  # as above
                raise RecipeError(
                    f"{path.name} does not take the task's inputs: {str(cause).splitlines()[0]}",
                    hint="`edgec inspect` shows the model's inputs: their shapes and dtypes must be the task's",
                ) from cause
            return tuple(torch.from_numpy(np.asarray(v)) for v in values)

    return Graph().eval()


def _adapt(model: onnx.ModelProto, signature: Signature, path: Path) -> None:
    """Give the graph the signature's names and sizes, and infer the shapes in between again."""
    import onnx

    graph = model.graph
    constants = {t.name for t in graph.initializer}
    inputs = [v for v in graph.input if v.name not in constants]
    for kind, values, specs in (("inputs", inputs, signature.inputs), ("outputs", graph.output, signature.outputs)):
        if len(values) != len(specs):
            raise RecipeError(
                f"{path.name} has {len(values)} {kind} ({', '.join(v.name for v in values)}), the task {len(specs)}",
                hint="`edgec inspect` shows them; the task `tensors` takes any number",
            )
        for value, spec in zip(values, specs, strict=True):
            tensor = value.type.tensor_type
            shape = [d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim]
            fits = len(shape) == len(spec.shape) and all(
                s is None or s == d for s, d in zip(shape, spec.shape, strict=True)
            )
            if dtype_name(tensor.elem_type) != spec.dtype or (kind == "inputs" and not fits):
                known = ", ".join("?" if s is None else str(s) for s in shape)
                raise RecipeError(
                    f"{path.name}: `{value.name}` is {dtype_name(tensor.elem_type)} [{known}], "
                    f"the task's `{spec.name}` is {spec.dtype} {list(spec.shape)}",
                    hint="the task's shapes and dtypes must be the model's",
                )
    taken = {n for node in graph.node for n in (*node.input, *node.output)} | constants
    for value, spec in zip(inputs, signature.inputs, strict=True):
        _rename(graph, value, spec.name, taken)
        _resize(value, spec.shape)
    for value, spec in zip(graph.output, signature.outputs, strict=True):
        _rename(graph, value, spec.name, taken)
        _resize(value, spec.shape)
    del graph.value_info[:]
    try:
        inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    except onnx.shape_inference.InferenceError as cause:
        raise damaged(path, "a model whose shapes fit together", cause) from cause
    graph.value_info.extend(inferred.graph.value_info)


def _rename(graph: onnx.GraphProto, value: onnx.ValueInfoProto, name: str, taken: set[str]) -> None:
    """Rename a graph input or output everywhere; an inner tensor that has the name already makes room."""
    if value.name == name:
        return
    if name in taken:
        _replace(graph, name, f"{name}__inner")
    _replace(graph, value.name, name)
    value.name = name


def _replace(graph: onnx.GraphProto, old: str, new: str) -> None:
    for tensor in graph.initializer:
        if tensor.name == old:
            tensor.name = new
    for node in graph.node:
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                if name == old:
                    names[i] = new
        for attribute in node.attribute:  # bodies of If, Loop and Scan see the tensors around them
            if attribute.HasField("g"):
                _replace(attribute.g, old, new)
            for body in attribute.graphs:
                _replace(body, old, new)
    for value in (*graph.input, *graph.output):
        if value.name == old:
            value.name = new


def _resize(value: onnx.ValueInfoProto, shape: tuple[int | str, ...]) -> None:
    dims = value.type.tensor_type.shape
    del dims.dim[:]
    for size in shape:
        dim = dims.dim.add()
        if isinstance(size, int):
            dim.dim_value = size
        else:
            dim.dim_param = size


def _write(model: onnx.ModelProto, signature: Signature, out: Path, path: Path) -> None:
    import onnx

    out.mkdir(parents=True, exist_ok=True)
    weights = sum(len(t.raw_data) for t in model.graph.initializer)
    onnx.save_model(
        model,
        str(out / f"{signature.name}.onnx"),
        save_as_external_data=weights > _EXTERNAL_OVER,
        location="weights.bin",
    )


def _weights(graph: onnx.GraphProto) -> list[onnx.TensorProto]:
    """Initialisers that are weights: not scales and zero points, not shapes and indices."""
    other = {node.input[i] for node in graph.node for i in _SCALE_INPUTS.get(node.op_type, ()) if i < len(node.input)}
    return [t for t in graph.initializer if t.name not in other and dtype_name(t.data_type) not in ("int64", "bool")]


def _quantization(graph: onnx.GraphProto) -> Quantization | None:
    """What the graph's QuantizeLinear and DequantizeLinear nodes say, as the quantise pass would have said it."""
    from onnx import numpy_helper

    constants = {t.name: t for t in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    users = {name: node for node in graph.node for name in node.input}
    layers: list[LayerScheme] = []
    for node in graph.node:
        if node.op_type != "DequantizeLinear" or node.input[0] not in constants:
            continue
        scale = constants.get(node.input[1])
        axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
        per_tensor = scale is None or math.prod(scale.dims) == 1
        dtype = dtype_name(constants[node.input[0]].data_type)
        if dtype in ("int8", "uint8"):
            user = users.get(node.output[0])
            name = (user.name or user.output[0]) if user is not None else node.input[0]
            layers.append(LayerScheme(name, user.op_type if user else "", dtype, None if per_tensor else axis))
    static = any(n.op_type == "QuantizeLinear" for n in graph.node)
    if not layers and not static:
        return None
    steps = []
    for output in graph.output:
        maker = makers.get(output.name)
        if maker is not None and maker.op_type == "DequantizeLinear" and maker.input[1] in constants:
            value = numpy_helper.to_array(constants[maker.input[1]])
            if value.size == 1:
                steps.append((output.name, float(value.reshape(()))))
    return Quantization("static" if static else "weight-only", tuple(layers), tuple(steps))


def _record(program: Program, task: Task, context: Context) -> None:
    """Run the golden on the task's inputs, and keep what later evaluations compare with."""
    from safetensors.numpy import save_file

    from edgec.golden import OnnxRunner

    steps = task.record()
    if not steps:
        raise RecipeError(
            "the task gives no inputs to record", hint="give it evaluation data", reason=Reason.EMPTY_DATA
        )
    runner = OnnxRunner({s.name: program.onnx_path(s.name) for s in program.signatures}, threads=context.threads)
    for step, outputs in zip(steps, replay(runner, program.signatures, steps), strict=True):
        step.outputs = outputs
        for name, array in outputs.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise SourceError(
                    f"output `{name}` of the ONNX model is NaN or infinite on the task's inputs",
                    hint="check the task's preprocessing, and the model on inputs of your own",
                    reason=Reason.NOT_FINITE,
                )
    Recording(steps).save(program.path / "recording.safetensors")
    reference: Arrays = task.reference(carrying(runner, program.signatures))
    if reference:
        save_file(reference, program.path / "reference.safetensors")
