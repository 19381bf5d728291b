"""ONNX files. External data is not read: shapes and types of initialisers stand in the file itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgec.inspection.facts import Graph, Inspection, Port, Tally, by_count, damaged, size_of

if TYPE_CHECKING:
    import numpy as np
    import onnx

# op → (input that is the weight, input that is its scale); the activations of these are at the other places.
_WEIGHT_SCALES = {"QLinearConv": (3, 4), "QLinearMatMul": (3, 4), "QGemm": (3, 4)}


def inspect_onnx(path: Path) -> Inspection:
    """Read an ONNX file.

    Raises:
        SourceError: it isn't ONNX, or is truncated.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(str(path), load_external_data=False)
    except DecodeError as cause:
        raise damaged(path, "an ONNX model", cause) from cause
    if not model.HasField("graph") or not model.opset_import or not model.graph.output:
        raise damaged(path, "an ONNX model", "it has no graph, no outputs or no operator set")
    tally = Tally()
    _weights(model.graph, tally)
    _quantized(model.graph, tally)
    graph = Graph(
        model.graph.name or "main",
        tuple(_port(v) for v in model.graph.input if v.name not in {t.name for t in model.graph.initializer}),
        tuple(_port(v) for v in model.graph.output),
        by_count(_kind(n) for n in _nodes(model.graph)),
    )
    metadata = {p.key: p.value for p in model.metadata_props}
    metadata |= {f"opset {o.domain or 'ai.onnx'}": str(o.version) for o in model.opset_import}
    metadata["producer"] = f"{model.producer_name} {model.producer_version}".strip() or "unknown"
    external = sorted({e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"})
    size = size_of(path) + sum(size_of(path.parent / n) for n in external if (path.parent / n).is_file())
    if external:
        absent = [n for n in external if not (path.parent / n).is_file()]
        metadata["external data"] = ", ".join(external) + (f" (missing: {', '.join(absent)})" if absent else "")
    return Inspection(str(path), "onnx", size, (graph,), tally.weights(), tally.quantized_groups(), metadata)


def _kind(node: onnx.NodeProto) -> str:
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """All nodes, those in the bodies of If, Loop and Scan too."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)
            for body in attribute.graphs:
                yield from _nodes(body)


def dtype_name(element: int) -> str:
    """NumPy's name of an ONNX element type ("int4", "bfloat16" and the like where NumPy has none)."""
    import onnx

    name: str = onnx.TensorProto.DataType.Name(element).lower()
    return {"float": "float32", "double": "float64"}.get(name, name)


def _port(value: onnx.ValueInfoProto) -> Port:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        return Port(value.name, (), str(kind or "unknown").removesuffix("_type"))
    tensor = value.type.tensor_type
    shape = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in tensor.shape.dim)
    return Port(value.name, shape, dtype_name(tensor.elem_type))


def _bits(dtype: str) -> int:
    digits = "".join(c for c in dtype.partition("e")[0] if c.isdigit())
    return 8 if dtype in ("bool", "string") or dtype.startswith("float8") else int(digits or 32)


def _weights(graph: onnx.GraphProto, tally: Tally) -> None:
    for tensor in graph.initializer:
        count = math.prod(tensor.dims)
        dtype = dtype_name(tensor.data_type)
        tally.weight(dtype, count, math.ceil(count * _bits(dtype) / 8))


def _quantized(graph: onnx.GraphProto, tally: Tally) -> None:
    """Group what QuantizeLinear, DequantizeLinear, QLinear* and MatMulNBits say about weights and activations."""
    constants = {t.name: t for t in graph.initializer}
    constants |= {
        n.output[0]: a.t for n in graph.node if n.op_type == "Constant" for a in n.attribute if a.name == "value"
    }
    # A weight may be folded (INT8 → DequantizeLinear) or not (float → QuantizeLinear → DequantizeLinear).
    makers = {n.output[0]: n for n in graph.node if n.output}
    for node in graph.node:
        attributes = {a.name: a.i for a in node.attribute}
        if node.op_type == "DequantizeLinear":
            weight, maker = constants.get(node.input[0]), makers.get(node.input[0])
            if weight is None and maker is not None and maker.op_type == "QuantizeLinear":
                weight = constants.get(maker.input[0])
            scale = _numbers(constants.get(node.input[1]))
            block = attributes.get("block_size", 0)
            how = (
                f"per block of {block}"
                if block
                else "per tensor"
                if scale is None or scale.size == 1
                else "per channel"
            )
            zero = constants.get(node.input[2]) if len(node.input) > 2 else None
            source = zero if zero is not None else weight
            dtype = dtype_name(source.data_type) if source is not None else "uint8"
            if weight is not None:
                tally.quantized("weights", dtype, how, math.prod(weight.dims), _range(scale))
            else:
                tally.quantized("activations", dtype, how, 0, _range(scale))
        elif node.op_type in _WEIGHT_SCALES:
            at, scale_at = _WEIGHT_SCALES[node.op_type]
            weight = constants.get(node.input[at])
            if weight is not None:
                scale = _numbers(constants.get(node.input[scale_at]))
                how = "per channel" if scale is not None and scale.size > 1 else "per tensor"
                tally.quantized("weights", dtype_name(weight.data_type), how, math.prod(weight.dims), _range(scale))
        elif node.op_type == "MatMulNBits":
            scale = _numbers(constants.get(node.input[2]))
            count = attributes.get("K", 0) * attributes.get("N", 0)
            how = f"per block of {attributes.get('block_size', 0)}"
            tally.quantized("weights", f"int{attributes.get('bits', 4)}", how, count, _range(scale))
        elif node.op_type in ("MatMulInteger", "ConvInteger", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"):
            weight = constants.get(node.input[1])
            if weight is not None:
                tally.quantized("weights", dtype_name(weight.data_type), "dynamic", math.prod(weight.dims))


def _numbers(tensor: onnx.TensorProto | None) -> np.ndarray[Any, Any] | None:
    """A scale's values; None when they are computed, or lie in external data."""
    from onnx import numpy_helper

    if tensor is None or tensor.external_data:
        return None
    array: np.ndarray[Any, Any] = numpy_helper.to_array(tensor)
    return array


def _range(scale: np.ndarray[Any, Any] | None) -> list[float]:
    return [] if scale is None or not scale.size else [float(scale.min()), float(scale.max())]
