"""What a .tflite file consists of: operators, what was left in float, what XNNPACK does not take."""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgec.errors import ConversionError, Reason

from .tflite_schema import (
    CONVERSION_OPS,
    LAYOUT_OPS,
    dtype,
    op_name,
    signature_graphs,
    tensor_name,
    weighted_ops,
)

if TYPE_CHECKING:
    from edgec.model import Quantization


def count_ops(model: Any, quantization: Quantization | None) -> tuple[dict[str, int], dict[str, int]]:
    """`(counts, ops by name)` over all signatures: ops, layout_ops, and float_ops when the model is INT8.

    A float op of a static INT8 model is one that computes in float (QUANTIZE and DEQUANTIZE at a float part's edge are
    not counted); of a weight-only model, where activations are float by definition, one whose weight is float.
    """
    ops: Counter[str] = Counter()
    floats = 0
    for graph in signature_graphs(model).values():
        names = [op_name(model, op) for op in graph.operators]
        ops.update(names)
        if quantization is None:
            continue
        if quantization.scheme == "static":
            floats += sum(
                name not in CONVERSION_OPS and _is_float(graph, op)
                for name, op in zip(names, graph.operators, strict=True)
            )
        else:
            floats += sum(dtype(weight).startswith("float") for _, _, weight in _products(model, graph))
    counts = {"ops": sum(ops.values()), "layout_ops": sum(n for name, n in ops.items() if name in LAYOUT_OPS)}
    if quantization is not None:
        counts["float_ops"] = floats
    return counts, dict(sorted(ops.items()))


def _is_float(graph: Any, op: Any) -> bool:
    tensors = [graph.tensors[int(i)] for i in (*op.inputs, *op.outputs) if int(i) >= 0]
    return any(dtype(t) in ("float32", "float16") for t in tensors)


def _products(model: Any, graph: Any) -> list[tuple[Any, str, Any]]:
    """Operators that multiply by a weight: a table that is only looked up (rotary angles, scales) is none."""
    return [found for found in weighted_ops(model, graph) if found[1] != "EMBEDDING_LOOKUP"]


def check_int8(model: Any, quantization: Quantization) -> None:
    """Hold the file against what the quantise pass fixed.

    Raises:
        ConversionError: a layer that should be INT8 came out in float, which converters do without a word.
    """
    # Layers without a weight (an addition whose inputs are quantised) have no axis.
    int8 = [layer for layer in quantization.layers if layer.dtype == "int8" and layer.axis is not None]
    wanted = sum("embedding" not in layer.op.lower() for layer in int8)
    allowed = sum(layer.dtype != "int8" for layer in quantization.layers)
    for name, graph in signature_graphs(model).items():
        weights = _products(model, graph)
        floats = [(op, kind) for op, kind, weight in weights if dtype(weight).startswith("float")]
        if len(weights) - len(floats) < max(wanted, 1) and len(floats) > allowed:
            where = "; ".join(
                f"{kind} {tensor_name(graph.tensors[int(op.outputs[0])])[-80:]}" for op, kind in floats[:3]
            )
            raise ConversionError(
                f"tflite: signature `{name}` should have {wanted} INT8 layers and at most {allowed} in float, "
                f"but {len(floats)} of {len(weights)} came out in float: {where}",
                hint="TFLite has no INT8 kernel for that scheme: leave those layers in float in the quantize pass",
                reason=Reason.UNSUPPORTED_SCHEME,
            )


def undelegated(model: Any, path: Path) -> dict[str, int]:
    """Operators by name that LiteRT's own kernels run because XNNPACK does not take them, over all signatures.

    LiteRT doesn't say which nodes a delegate took, but shows each DELEGATE node's inputs and outputs: what lies between
    them is taken. It shows nodes of the first subgraph only, so each signature's is moved to the front in turn.
    """
    content = path.read_bytes()
    left: Counter[str] = Counter()
    for definition in model.signatureDefs:
        left.update(_undelegated_first(_subgraph_first(content, definition.subgraphIndex)))
    return dict(sorted(left.items()))


def _undelegated_first(content: bytes) -> Counter[str]:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_content=content)
    interpreter.allocate_tensors()
    nodes = interpreter._get_ops_details()
    ordinary = [n for n in nodes if n["op_name"] != "DELEGATE"]
    producer = {int(t): i for i, n in enumerate(ordinary) for t in n["outputs"]}
    taken: set[int] = set()
    for delegate in (n for n in nodes if n["op_name"] == "DELEGATE"):
        given = {int(t) for t in delegate["inputs"]}
        todo = [int(t) for t in delegate["outputs"]]
        while todo:
            tensor = todo.pop()
            node = producer.get(tensor)
            if tensor in given or node is None or node in taken:
                continue
            taken.add(node)
            todo.extend(int(t) for t in ordinary[node]["inputs"])
    return Counter(n["op_name"] for i, n in enumerate(ordinary) if i not in taken)


def _subgraph_first(content: bytes, index: int) -> bytes:
    """The file with subgraphs 0 and `index` swapped: only two offsets of the subgraph vector change."""
    if index == 0:
        return content
    swapped = bytearray(content)

    def u32(at: int) -> int:
        return int(struct.unpack_from("<I", swapped, at)[0])

    root = u32(0)
    vtable = root - struct.unpack_from("<i", swapped, root)[0]
    # Model's fields in the schema: version, operator_codes, subgraphs; two 16-bit sizes precede them in the vtable.
    field = root + struct.unpack_from("<H", swapped, vtable + 4 + 2 * 2)[0]
    first = field + u32(field) + 4  # behind the vector's length
    other = first + 4 * index
    first_at, other_at = first + u32(first), other + u32(other)  # offsets are relative to where they stand
    struct.pack_into("<I", swapped, first, other_at - first)
    if first_at <= other:
        raise ConversionError("tflite: the file's subgraphs lie before their vector", hint="report this file")
    struct.pack_into("<I", swapped, other, first_at - other)
    return bytes(swapped)
