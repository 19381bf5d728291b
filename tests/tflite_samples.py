"""A small INT8 .tflite file written through LiteRT's flatbuffer schema: no converter, milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema


def _tensor(name: str, shape: list[int], dtype: int, buffer: int, scales: list[float], zero: int = 0) -> Any:
    tensor = schema.TensorT()
    tensor.name, tensor.shape, tensor.type, tensor.buffer = name, shape, dtype, buffer
    tensor.quantization = schema.QuantizationParametersT()
    tensor.quantization.scale, tensor.quantization.zeroPoint = scales, [zero] * len(scales)
    return tensor


def _map(name: str, index: int) -> Any:
    entry = schema.TensorMapT()
    entry.name, entry.tensorIndex = name, index
    return entry


def fully_connected(path: Path, *, scale: float = 0.25) -> Path:
    """(1, 4) INT8 → FULLY_CONNECTED, weights (3, 4) per channel → RELU → (1, 3) INT8; one signature, `serve`."""
    kind = schema.TensorType
    model = schema.ModelT()
    model.version, model.description = 3, "written by a test"
    weights = np.arange(-6, 6, dtype=np.int8).reshape(3, 4)
    bias = np.array([1, 2, 3], np.int32)
    contents = [b"", weights.tobytes(), bias.tobytes(), b"1.14.0\0\0"]
    model.buffers = []
    for content in contents:
        buffer = schema.BufferT()
        buffer.data = np.frombuffer(content, np.uint8) if content else None
        model.buffers.append(buffer)
    graph = schema.SubGraphT()
    graph.name = "main"
    graph.tensors = [
        _tensor("x:0", [1, 4], kind.INT8, 0, [0.5], -3),
        _tensor("w", [3, 4], kind.INT8, 1, [0.1, 0.2, 0.3]),
        _tensor("b", [3], kind.INT32, 2, [0.05, 0.1, 0.15]),
        _tensor("fc", [1, 3], kind.INT8, 0, [scale], 7),
        _tensor("y:0", [1, 3], kind.INT8, 0, [scale], 7),
    ]
    graph.tensors[0].shapeSignature = [-1, 4]
    graph.inputs, graph.outputs = [0], [4]
    model.operatorCodes = []
    for name in ("FULLY_CONNECTED", "RELU"):
        code = schema.OperatorCodeT()
        code.builtinCode = code.deprecatedBuiltinCode = getattr(schema.BuiltinOperator, name)
        code.version = 4 if name == "FULLY_CONNECTED" else 2
        model.operatorCodes.append(code)
    graph.operators = []
    for index, inputs, output in ((0, [0, 1, 2], 3), (1, [3], 4)):
        op = schema.OperatorT()
        op.opcodeIndex, op.inputs, op.outputs = index, inputs, [output]
        if index == 0:
            op.builtinOptionsType, op.builtinOptions = (
                schema.BuiltinOptions.FullyConnectedOptions,
                schema.FullyConnectedOptionsT(),
            )
        graph.operators.append(op)
    model.subgraphs = [graph]
    signature = schema.SignatureDefT()
    signature.signatureKey, signature.subgraphIndex = "serve", 0
    signature.inputs, signature.outputs = [_map("image", 0)], [_map("logits", 4)]
    model.signatureDefs = [signature]
    entry = schema.MetadataT()
    entry.name, entry.buffer = "min_runtime_version", 3
    model.metadata = [entry]
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    path.write_bytes(builder.Output())
    return path
