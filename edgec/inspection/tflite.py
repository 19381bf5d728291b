"""TFLite files, through LiteRT's flatbuffer schema; no interpreter and no TensorFlow."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

from edgec.errors import ToolMissing
from edgec.inspection.facts import Graph, Inspection, Port, Tally, by_count, damaged, size_of

# flatbuffers' Python reader does not verify: a damaged offset surfaces as whatever the access happens to raise.
_DAMAGED = (struct.error, IndexError, ValueError, TypeError, AttributeError, OverflowError, KeyError)


def open_tflite(path: Path) -> Any:
    """The root `Model` of a TFLite file.

    Raises:
        SourceError: it isn't TFLite.
        ToolMissing: LiteRT's schema isn't here.
    """
    try:
        from ai_edge_litert import schema_py_generated as schema
    except ImportError as cause:
        raise ToolMissing("reading TFLite needs ai-edge-litert", hint="pip install ai-edge-litert") from cause
    data = path.read_bytes()
    if len(data) < 16 or data[4:8] != b"TFL3":
        raise damaged(path, "a TFLite model", "its identifier TFL3 is missing")
    return schema.Model.GetRootAs(data, 0)


def inspect_tflite(path: Path) -> Inspection:
    """Read a TFLite file.

    Raises:
        SourceError: it isn't TFLite, or is truncated.
    """
    try:
        return _inspect(path, open_tflite(path))
    except _DAMAGED as cause:
        raise damaged(path, "a TFLite model", f"its tables point outside of it ({cause})") from cause


def _inspect(path: Path, model: Any) -> Inspection:
    if model.SubgraphsLength() == 0:
        raise ValueError("no subgraph")
    tally = Tally()
    codes = [operator_name(model.OperatorCodes(i)) for i in range(model.OperatorCodesLength())]
    size = size_of(path)
    stored = [_stored(model.Buffers(i), size) for i in range(model.BuffersLength())]
    seen: set[int] = set()
    graphs = []
    signatures = {
        model.SignatureDefs(i).SubgraphIndex(): model.SignatureDefs(i) for i in range(model.SignatureDefsLength())
    }
    for i in range(model.SubgraphsLength()):
        graph = model.Subgraphs(i)
        for t in range(graph.TensorsLength()):
            _count(graph.Tensors(t), stored, seen, tally)
        ops = by_count(codes[graph.Operators(o).OpcodeIndex()] for o in range(graph.OperatorsLength()))
        graphs.append(_graph(graph, signatures.get(i), i, ops))
    metadata = {"schema version": str(model.Version()), "description": _text(model.Description())}
    for i in range(model.MetadataLength()):
        entry = model.Metadata(i)
        content = model.Buffers(entry.Buffer()).DataAsNumpy()
        raw = b"" if isinstance(content, int) else content.tobytes()
        text = raw.rstrip(b"\0")
        shown = text.decode() if text and text.isascii() and len(text) < 80 and text.decode().isprintable() else ""
        metadata[_text(entry.Name())] = shown or f"{len(raw)} bytes"
    return Inspection(str(path), "tflite", size, tuple(graphs), tally.weights(), tally.quantized_groups(), metadata)


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace")


def _names(cls: Any) -> dict[int, str]:
    return {v: k for k, v in vars(cls).items() if isinstance(v, int) and not k.startswith("_")}


def operator_name(code: Any) -> str:
    from ai_edge_litert import schema_py_generated as schema

    # Codes over 127 are in the newer field only; files from before it have the older one only.
    number = max(code.BuiltinCode(), code.DeprecatedBuiltinCode())
    name = _names(schema.BuiltinOperator)[number]
    return f"custom:{_text(code.CustomCode())}" if name == "CUSTOM" else name


def _type(tensor: Any) -> str:
    from ai_edge_litert import schema_py_generated as schema

    return _names(schema.TensorType)[tensor.Type()]


def _stored(buffer: Any, size: int) -> int:
    """Bytes that a buffer holds, inside the flatbuffer or behind it (files over 2 GB)."""
    if buffer.Size() > 1:
        if buffer.Offset() + buffer.Size() > size:
            raise ValueError("a buffer ends behind the file")
        return int(buffer.Size())
    content = buffer.DataAsNumpy()  # a view; raises when it would end behind the file
    return 0 if isinstance(content, int) else len(content)


def _count(tensor: Any, stored: list[int], seen: set[int], tally: Tally) -> None:
    """Put one tensor into the tally. Signatures share buffers: a buffer's bytes count once."""
    buffer, dtype = tensor.Buffer(), _type(tensor).lower()
    shape = [tensor.Shape(d) for d in range(tensor.ShapeLength())]
    count = math.prod(shape)
    constant = stored[buffer] > 0
    if constant and buffer in seen:
        return
    if constant:
        seen.add(buffer)
        tally.weight(dtype, count, stored[buffer])
    quantization = tensor.Quantization()
    if quantization is None or not quantization.ScaleLength():
        if quantization is not None and quantization.DetailsType():
            tally.quantized("weights" if constant else "activations", dtype, "per block", count if constant else 0)
        return
    scales = [quantization.Scale(s) for s in range(quantization.ScaleLength())]
    how = "per channel" if len(scales) > 1 else "per tensor"
    # An INT32 constant is a bias: its scale is the input's times the weight's.
    what = ("biases" if dtype == "int32" else "weights") if constant else "activations"
    tally.quantized(what, dtype, how, count if constant else 0, (min(scales), max(scales)))


def _graph(graph: Any, signature: Any, index: int, ops: dict[str, int]) -> Graph:
    names: dict[int, str] = {}
    if signature is not None:
        for kind in ("Inputs", "Outputs"):
            for i in range(getattr(signature, f"{kind}Length")()):
                entry = getattr(signature, kind)(i)
                names[entry.TensorIndex()] = _text(entry.Name())

    def ports(kind: str) -> tuple[Port, ...]:
        indices = [int(getattr(graph, kind)(i)) for i in range(getattr(graph, f"{kind}Length")())]
        return tuple(_port(graph.Tensors(i), names.get(i)) for i in indices)

    label = _text(signature.SignatureKey()) if signature is not None else _text(graph.Name())
    return Graph(label or f"subgraph {index}", ports("Inputs"), ports("Outputs"), ops)


def _port(tensor: Any, name: str | None) -> Port:
    form = "ShapeSignature" if tensor.ShapeSignatureLength() else "Shape"
    sizes = [int(getattr(tensor, form)(d)) for d in range(getattr(tensor, f"{form}Length")())]
    shape = tuple(s if s >= 0 else "?" for s in sizes)
    q = tensor.Quantization()
    scaled = q is not None and q.ScaleLength() == 1
    return Port(
        name or _text(tensor.Name()),
        shape,
        _type(tensor).lower(),
        float(q.Scale(0)) if scaled else None,
        int(q.ZeroPoint(0)) if scaled and q.ZeroPointLength() else None,
    )
