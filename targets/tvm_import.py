"""ONNX → one Relax module, with weights as parameters and channels last.

TVM's own ONNX importer converts most operations. tvm_operators takes over those where it matters how they are lowered:
convolutions, products, embeddings, writes into KV pools, and quantise → dequantise pairs. A value that exists in NHWC
gets its NCHW form as a transpose, which dead-code elimination removes unless something needs it; the transposes that
are left are what the report counts as layout operations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgec.errors import ConversionError, Reason

if TYPE_CHECKING:
    from edgec.context import Context
    from edgec.model import Program

PARAM_SIZE = 64  # arrays with fewer elements are constants of the library: nothing is gained by storing them apart
FOLD_LIMIT = 1 << 16  # elements: shape arithmetic, masks and small tables are folded, weights never are
TO_NHWC, TO_NCHW = [0, 2, 3, 1], [0, 3, 1, 2]


@dataclass(frozen=True)
class Weight:
    """A constant array and, when it is INT8, its scale: one number, or one for each index of `axis`."""

    values: np.ndarray
    scale: np.ndarray | None = None
    axis: int | None = None

    def transposed(self, order: list[int]) -> Weight:
        axis = None if self.axis is None else order.index(self.axis)
        return Weight(self.values.transpose(order), self.scale, axis)

    def output_scale(self, axis: int) -> np.ndarray | None:
        """The scale as (outputs,), or None when it varies along another axis and so can't leave the sum."""
        outputs = self.values.shape[axis]
        if self.scale is None or self.scale.size == 1:
            return np.full(outputs, 1.0 if self.scale is None else self.scale.reshape(()), np.float32)
        return self.scale if self.axis == axis else None


@dataclass
class Imported:
    """A Relax module, its functions' parameters in order, and the parameters' arrays (each stored once)."""

    module: Any = None
    functions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, array: np.ndarray) -> str:
        """The name of a parameter with these contents; equal arrays have one name."""
        data = np.ascontiguousarray(array)
        digest = hashlib.sha256(f"{data.dtype}{data.shape}".encode() + data.tobytes()).hexdigest()[:16]
        name = f"p_{digest}"
        self.arrays[name] = data
        return name


def import_onnx(paths: dict[str, Path], states: dict[str, frozenset[str]]) -> Imported:
    """Import one ONNX file per function into one module.

    Args:
        paths: ONNX file by function name.
        states: by function name, the inputs that may be updated in place (KV pools).

    Raises:
        ConversionError: an operation has no TVM form; the message names it, its node and its source line.
    """
    from tvm import relax

    builder = relax.BlockBuilder()
    imported = Imported()
    for name, path in paths.items():
        graph = Graph(builder, imported, states.get(name, frozenset()))
        imported.functions[name] = graph.build(name, normalise(path))
    imported.module = relax.transform.DeadCodeElimination()(builder.finalize())
    return imported


def import_program(program: Program, context: Context) -> Imported:
    """A Program's signatures as functions of one module: by way of ONNX, or of ExportedPrograms where that fails.

    Raises:
        ConversionError: neither way takes the program; the error is that of ONNX, which names the node.
    """
    from .tvm_exported import import_exported

    for s in program.signatures:
        if s.dynamic:
            names = ", ".join(f"{name} ({low} to {high})" for name, low, high in s.dynamic)
            context.warn(f"`{s.name}` has dynamic dimensions: {names}; its kernels can't be tiled, and are slower")
    if any(s.dynamic for s in program.signatures):
        return import_exported(program)
    paths = {s.name: program.onnx_path(s.name) for s in program.signatures}
    try:
        return import_onnx(paths, {s.name: s.state_inputs for s in program.signatures})
    except ConversionError as error:
        try:
            imported = import_exported(program)
        except ConversionError:
            raise error from None
        context.warn(f"imported from torch.export, without packed kernels, since {error.message}")
        return imported


def normalise(path: Path) -> Any:
    """Read an ONNX file and fold its shape arithmetic: TVM's importer wants shapes as constants.

    Only constant folding and clean-up: none of onnxscript's rewrite rules, one of which is wrong.
    """
    import onnxscript.optimizer as optimizer
    from onnx_ir.passes import common
    from onnxscript import ir

    model = ir.load(path)
    optimizer.inline(model)
    optimizer.fold_constants(
        model,
        onnx_shape_inference=True,
        input_size_limit=FOLD_LIMIT,
        output_size_limit=FOLD_LIMIT,
        should_fold=lambda node: False if node.op_type in ("DequantizeLinear", "QuantizeLinear") else None,
    )
    common.IdentityEliminationPass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    return ir.to_proto(model)


class Graph:
    """One ONNX graph on its way into a Relax function. Values are found by their ONNX names.

    Attributes:
        weights: constant arrays, INT8 ones with their scale; they become Relax values only where they are used.
        channels_last: the NHWC form of 4-D values.
        quantised: outputs of QuantizeLinear: (input, scale, zero point, least, greatest step).
    """

    def __init__(self, builder: Any, imported: Imported, states: frozenset[str]) -> None:
        from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter

        self.builder = builder
        self.imported = imported
        self.states = states
        self.weights: dict[str, Weight] = {}
        self.channels_last: dict[str, Any] = {}
        self.quantised: dict[str, tuple[str, float, int, int, int]] = {}
        self.parameters: dict[str, Any] = {}
        self.cache: dict[Any, Any] = {}  # values that several operations share
        self.aliases: dict[str, str] = {}
        self.readers: dict[str, int] = {}  # how many nodes and outputs read a value
        self._tvm = ONNXGraphImporter({}, "float32", sanitize=False)
        self._tvm.bb = builder
        self.values: dict[str, Any] = self._tvm._nodes

    def build(self, name: str, model: Any) -> tuple[str, ...]:
        """Emit the function; gives its parameters' names, which follow the model's inputs."""
        from tvm import relax
        from tvm.relax.frontend.onnx.onnx_frontend import get_numpy

        graph = model.graph
        self._tvm.opset = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
        for tensor in graph.initializer:
            self.weights[tensor.name] = Weight(get_numpy(tensor).reshape(tuple(tensor.dims)))
        for used in [n for node in graph.node for n in node.input] + [o.name for o in graph.output]:
            self.readers[used] = self.readers.get(used, 0) + 1
        with self.builder.function(name):
            with self.builder.dataflow():
                self._tvm._parse_graph_input(graph)
                for node in graph.node:
                    self._convert(node)
                outputs = self.builder.emit_output(relax.Tuple([self.value(o.name) for o in graph.output]))
            inputs = [self._tvm._inputs[i.name] for i in graph.input]
            self.builder.emit_func_output(outputs, params=[*inputs, *self.parameters.values()])
        return tuple(self.parameters)

    def value(self, name: str) -> Any:
        """The Relax value of an ONNX name; a weight becomes a parameter, dequantised there and then."""
        from tvm import relax

        if name in self.values:
            return self.values[name]
        weight = self.weights[name]
        value = self.constant(weight.values)
        if weight.scale is not None:
            zero = relax.const(0, str(weight.values.dtype))
            scale = self.constant(weight.scale if weight.axis is not None else weight.scale.reshape(()))
            call = relax.op.dequantize(value, scale, zero, axis=weight.axis or 0, out_dtype="float32")
            value = self.builder.emit(call)
        self.values[name] = value
        return value

    def constant(self, array: np.ndarray) -> Any:
        """A small array as a constant, a larger one as a parameter of the function."""
        from tvm import relax

        if array.size < PARAM_SIZE:
            return relax.const(array, str(array.dtype))
        name = self.imported.add(array)
        if name not in self.parameters:
            self.parameters[name] = relax.Var(name, relax.TensorType(array.shape, str(array.dtype)))
        return self.parameters[name]

    def alias(self, name: str, source: str) -> None:
        """`name` is another name of `source`."""
        self.values[name] = self.value(source)
        self.aliases[name] = source

    def origin(self, name: str) -> tuple[str, bool]:
        """The value that a name stands for in the end, and whether nobody else reads it on the way there."""
        alone = self.readers.get(name, 0) == 1
        while name in self.aliases:
            name = self.aliases[name]
            alone = alone and self.readers.get(name, 0) == 1
        return name, alone

    def emit(self, name: str, expression: Any) -> Any:
        """Bind a Relax expression to an ONNX value."""
        self.values[name] = self.builder.emit(expression)
        return self.values[name]

    def emit_channels_last(self, name: str, expression: Any) -> None:
        """Bind the NHWC form of an ONNX value, and its NCHW form for those who need it."""
        from tvm import relax

        self.channels_last[name] = self.builder.emit(expression)
        self.emit(name, relax.op.permute_dims(self.channels_last[name], TO_NCHW))

    def as_channels_last(self, name: str) -> Any:
        from tvm import relax

        if name not in self.channels_last:
            self.channels_last[name] = self.builder.emit(relax.op.permute_dims(self.value(name), TO_NHWC))
        return self.channels_last[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """The static shape of a value.

        Raises:
            ConversionError: a dimension isn't known.
        """
        if name in self.weights:
            return tuple(self.weights[name].values.shape)
        return tuple(int(d) for d in self.values[name].ty.shape)

    def convert_with_tvm(self, node: Any, inputs: list[Any]) -> Any:
        """What TVM's importer makes of a node, given its inputs as Relax values."""
        from tvm.relax.frontend.onnx.onnx_frontend import onnx_input

        attributes = self.attributes(node)
        attributes["tvm_custom"] = {"name": node.name, "num_outputs": len(node.output)}
        values = onnx_input()
        values.extend(inputs)
        return self._tvm._convert_operator(node.op_type, values, attributes, self._tvm.opset)

    def attributes(self, node: Any) -> dict[str, Any]:
        found: dict[str, Any] = self._tvm._parse_attr(node.attribute)
        return found

    def _convert(self, node: Any) -> None:
        from tvm import relax

        from .tvm_operators import HANDLERS

        handler: Callable[[Graph, Any], bool] | None = HANDLERS.get(node.op_type)
        try:
            if handler is not None and handler(self, node):
                return
            result = self.convert_with_tvm(node, [self.value(n) if n else None for n in node.input])
        except Exception as error:
            raise unsupported(node, error) from error
        fields = result if isinstance(result, relax.Tuple) else self.builder.emit(result)
        if not isinstance(fields.ty, relax.TupleType):
            self.values[node.output[0]] = fields
            return
        for i, name in enumerate(node.output):
            if name:
                self.emit(name, fields[i])


def unsupported(node: Any, error: Exception) -> ConversionError:
    """The error for a node that TVM's importer refuses, with the source line that torch.onnx recorded."""
    trace = {p.key: p.value for p in node.metadata_props}.get("pkg.torch.onnx.stack_trace", "")
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    where = f" at {lines[-1]}" if lines else ""
    cause = str(error).strip().splitlines()
    return ConversionError(
        f"TVM can't take {node.op_type} (node `{node.name}`){where}: {cause[-1] if cause else type(error).__name__}",
        hint="replace the operation in the model, or build the other targets with --target",
        reason=Reason.UNSUPPORTED_OP,
    )
