"""INT8 weights with our own scales in a .tflite file, for programs whose activations stay float.

litert-torch would choose scales of its own, so it is given the *float* value of each weight, `q · scale`, and the
resulting constant is found in the file again, by its bytes, and replaced by `q` with its per-channel parameters.
FULLY_CONNECTED then runs LiteRT's hybrid kernel (activations quantised per row, INT8 products), EMBEDDING_LOOKUP
dequantises the rows that it reads. Any other reader of such a weight gets a DEQUANTIZE in front of it.
"""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from edgec.errors import ConversionError, Reason

from .tflite_schema import code_name, op_name

if TYPE_CHECKING:
    import torch

# Least operator versions that read INT8 weights with a scale per channel beside float activations.
_VERSIONS = {"FULLY_CONNECTED": 12, "EMBEDDING_LOOKUP": 3, "DEQUANTIZE": 5}


@dataclass(frozen=True)
class Int8Weight:
    """One quantised weight: `values` int8, `scale` float32 along `axis`; zero points are 0."""

    name: str
    values: np.ndarray
    scale: np.ndarray
    axis: int


def to_float_weights(modules: list[torch.fx.GraphModule]) -> dict[bytes, Int8Weight]:
    """Replace each `dequantize(weight)` of the graphs by a float constant, in place.

    Returns the weights by the SHA-256 of the float constant's bytes.

    Raises:
        ConversionError: a weight's zero point isn't 0, which no hybrid kernel takes.
    """
    import torch

    dequantize = torch.ops.quantized_decomposed.dequantize_per_channel.default
    weights: dict[bytes, Int8Weight] = {}
    floats: dict[int, tuple[torch.Tensor, Int8Weight]] = {}  # by address of the INT8 tensor: signatures share them
    for module in modules:
        graph = module.graph
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target != dequantize:
                continue
            source, scale, zero_point = (_constant(module, a) for a in node.args[:3])
            if zero_point is not None and bool(zero_point.any()):
                raise ConversionError(
                    f"tflite: weight `{node.args[0]}` has zero points other than 0",
                    hint="quantize the weights symmetrically",
                    reason=Reason.UNSUPPORTED_SCHEME,
                )
            found = floats.get(source.data_ptr())
            if found is None:
                value = dequantize(source, scale, zero_point, *node.args[3:])
                key = _digest(value.numpy())
                found = floats[source.data_ptr()] = (
                    value,
                    Int8Weight(str(node.args[0].target), source.numpy(), scale.float().numpy(), int(node.args[3])),
                )
                weights[key] = found[1]
            name = f"float_{node.name}"
            module.register_buffer(name, found[0])
            with graph.inserting_before(node):
                constant = graph.get_attr(name)
            constant.meta = dict(node.meta)
            node.replace_all_uses_with(constant)
            graph.erase_node(node)
        graph.eliminate_dead_code()
        module.recompile()
    return weights


def _constant(module: torch.fx.GraphModule, node: Any) -> Any:
    if node is None:
        return None
    owner, _, leaf = str(node.target).rpartition(".")
    return getattr(module.get_submodule(owner), leaf).detach()


def _digest(array: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data).digest()


def stamp(model: Any, weights: dict[bytes, Int8Weight]) -> int:
    """Put INT8 values and parameters in the place of the float constants; gives the number of tensors changed.

    Raises:
        ConversionError: a weight isn't in the file as it was given to the converter.
    """
    matches: dict[int, Int8Weight] = {}
    found: set[bytes] = set()
    for index, buffer in enumerate(model.buffers):
        if buffer.data is not None and len(buffer.data) > 0:
            key = _digest(np.asarray(buffer.data))
            if key in weights:
                matches[index] = weights[key]
                found.add(key)
    missing = [w.name for key, w in weights.items() if key not in found]
    if missing:
        raise ConversionError(
            f"tflite: the converter rewrote {len(missing)} weights, which can't be INT8 then: {', '.join(missing[:5])}",
            hint="keep arithmetic on weights out of the module (scale the activations instead), or leave them in float",
            reason=Reason.UNSUPPORTED_SCHEME,
        )
    changed = 0
    for graph in model.subgraphs:
        for index, tensor in enumerate(list(graph.tensors)):
            if tensor.buffer in matches:
                weight = matches[tensor.buffer]
                if tuple(tensor.shape) != weight.values.shape:
                    raise ConversionError(
                        f"tflite: the converter reshaped weight `{weight.name}` to {tuple(tensor.shape)}",
                        hint="leave that layer in float",
                        reason=Reason.UNSUPPORTED_SCHEME,
                    )
                _stamp_tensor(tensor, weight)
                _dequantize_for_others(model, graph, index, weight)
                changed += 1
    for index, weight in matches.items():
        model.buffers[index].data = np.ascontiguousarray(weight.values).view(np.uint8).reshape(-1)
    for code in model.operatorCodes:
        if code_name(code) in _VERSIONS:
            code.version = max(code.version, _VERSIONS[code_name(code)])
    return changed


def _stamp_tensor(tensor: Any, weight: Int8Weight) -> None:
    from ai_edge_litert import schema_py_generated as schema

    tensor.type = schema.TensorType.INT8
    tensor.quantization = schema.QuantizationParametersT()
    tensor.quantization.scale = weight.scale
    tensor.quantization.zeroPoint = np.zeros(len(weight.scale), np.int64)
    tensor.quantization.quantizedDimension = weight.axis


def _dequantize_for_others(model: Any, graph: Any, index: int, weight: Int8Weight) -> None:
    """Readers of tensor `index` without a hybrid kernel read a dequantised copy instead."""
    from ai_edge_litert import schema_py_generated as schema

    others = []
    for op in graph.operators:
        for position, source in enumerate(op.inputs):
            if int(source) != index:
                continue
            name = op_name(model, op)
            hybrid = name in ("FULLY_CONNECTED", "EMBEDDING_LOOKUP") and position == 1 and weight.axis == 0
            if not hybrid:
                others.append((op, position))
            elif name == "FULLY_CONNECTED":
                # A zero point for each row of activations: what XNNPACK's kernel uses, and half the rounding error.
                op.builtinOptions.asymmetricQuantizeInputs = True
    if not others:
        return
    tensor = copy.copy(graph.tensors[index])
    tensor.name = f"{weight.name}/dequantized"
    tensor.type = schema.TensorType.FLOAT32
    tensor.quantization = None
    tensor.buffer = 0
    graph.tensors.append(tensor)
    for op, position in others:
        op.inputs[position] = len(graph.tensors) - 1
    op = schema.OperatorT()
    op.opcodeIndex = _code(model, schema.BuiltinOperator.DEQUANTIZE)
    op.inputs, op.outputs = [index], [len(graph.tensors) - 1]
    graph.operators.insert(0, op)


def _code(model: Any, builtin: int) -> int:
    from ai_edge_litert import schema_py_generated as schema

    for index, code in enumerate(model.operatorCodes):
        if max(code.builtinCode, code.deprecatedBuiltinCode) == builtin:
            return index
    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = builtin
    model.operatorCodes.append(code)
    return len(model.operatorCodes) - 1
