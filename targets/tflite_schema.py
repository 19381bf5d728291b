"""A .tflite file as objects: read, write, names of operators, which tensors are constant.

The objects are those that flatc generated from LiteRT's schema (`ModelT`, `SubGraphT`, `TensorT`, …). Buffers are NumPy
views into the file's bytes, so reading costs no copy of the weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from edgec.errors import ConversionError, Reason

# A flatbuffer's offsets are 32-bit and signed in places: no file can be larger.
FILE_LIMIT = 2**31 - 1

# Operators that move values without computing. RESHAPE and its kin copy memory on most engines.
LAYOUT_OPS = frozenset(
    ("TRANSPOSE", "RESHAPE", "SQUEEZE", "EXPAND_DIMS", "SPACE_TO_DEPTH", "DEPTH_TO_SPACE", "REVERSE_V2")
)
# Operators with a constant weight, and which of their inputs it is.
WEIGHT_INPUT = {
    "CONV_2D": 1,
    "CONV_3D": 1,
    "DEPTHWISE_CONV_2D": 1,
    "TRANSPOSE_CONV": 1,
    "FULLY_CONNECTED": 1,
    "BATCH_MATMUL": 1,
    "EMBEDDING_LOOKUP": 1,
}
CONVERSION_OPS = frozenset(("QUANTIZE", "DEQUANTIZE"))


def read(content: bytes) -> Any:
    """The `ModelT` of a file's bytes."""
    from ai_edge_litert import schema_py_generated as schema

    return schema.ModelT.InitFromPackedBuf(content, 0)


def write(model: Any, path: Path) -> None:
    """Write a `ModelT`; the same model gives the same bytes.

    Raises:
        ConversionError: the weights don't fit into one flatbuffer.
    """
    import flatbuffers

    size = sum(len(b.data) for b in model.buffers if b.data is not None)
    if size > FILE_LIMIT - 2**24:
        raise ConversionError(
            f"tflite: {size / 1e9:.1f} GB of weights do not fit into a .tflite file, whose limit is 2 GB",
            hint="quantize the weights to INT8, prune the model, or build the other targets",
            reason=Reason.UNSUPPORTED_SCHEME,
        )
    builder = flatbuffers.Builder(size + 2**20)
    builder.Finish(model.Pack(builder), b"TFL3")
    path.write_bytes(builder.Output())


@cache
def _builtin_names() -> dict[int, str]:
    from ai_edge_litert import schema_py_generated as schema

    table = vars(schema.BuiltinOperator)
    return {code: name for name, code in table.items() if isinstance(code, int)}


@cache
def _dtype_names() -> dict[int, str]:
    from ai_edge_litert import schema_py_generated as schema

    return {code: name.lower() for name, code in vars(schema.TensorType).items() if isinstance(code, int)}


def dtype(tensor: Any) -> str:
    """A tensor's type as NumPy names it (`int8`, `float32`; `bool`, `string` likewise)."""
    return _dtype_names()[tensor.type]


def code_name(code: Any) -> str:
    """The name of an operator code: a builtin's, or `CUSTOM:<name>`."""
    number = max(code.builtinCode, code.deprecatedBuiltinCode)
    name = _builtin_names()[number]
    return f"CUSTOM:{_text(code.customCode)}" if name == "CUSTOM" else name


def op_name(model: Any, op: Any) -> str:
    return code_name(model.operatorCodes[op.opcodeIndex])


def tensor_name(tensor: Any) -> str:
    return _text(tensor.name)


def _text(raw: bytes | str | None) -> str:
    return raw.decode(errors="replace") if isinstance(raw, bytes) else raw or ""


def buffer_of(model: Any, tensor: Any) -> np.ndarray | None:
    """The bytes of a constant tensor, None for one that is computed or given."""
    data = model.buffers[tensor.buffer].data if tensor.buffer else None
    return None if data is None or len(data) == 0 else np.asarray(data)


def share_buffers(model: Any) -> None:
    """Keep one copy of equal constants: an INT8 table that an embedding and the head read, for one."""
    first: dict[bytes, int] = {}
    same: dict[int, int] = {}
    for index, buffer in enumerate(model.buffers):
        if buffer.data is not None and len(buffer.data) >= 1024:
            key = hashlib.sha256(np.ascontiguousarray(buffer.data).data).digest()
            same[index] = first.setdefault(key, index)
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            tensor.buffer = same.get(tensor.buffer, tensor.buffer)
    for index, kept in same.items():
        if index != kept:
            model.buffers[index].data = None


def signature_graphs(model: Any) -> dict[str, Any]:
    """Signature name → its subgraph. Other subgraphs are bodies of operators (a scatter's combiner)."""
    return {_text(s.signatureKey): model.subgraphs[s.subgraphIndex] for s in model.signatureDefs}


def custom_ops(model: Any) -> list[str]:
    """Names of the operators that only a runtime with extra code can run; TensorFlow's own begin with `Flex`."""
    names = [code_name(c) for c in model.operatorCodes]
    return sorted(n.removeprefix("CUSTOM:") for n in names if n.startswith("CUSTOM:"))


def weighted_ops(model: Any, graph: Any) -> Iterator[tuple[Any, str, Any]]:
    """`(operator, its name, its weight tensor)` of each operator of a subgraph with a constant weight.

    A weight that goes through DEQUANTIZE first counts as the float weight that the kernel then computes with.
    """
    dequantized = {
        o: op for op in graph.operators if op_name(model, op) == "DEQUANTIZE" for o in (int(i) for i in op.outputs)
    }
    for op in graph.operators:
        name = op_name(model, op)
        position = WEIGHT_INPUT.get(name)
        if position is None or len(op.inputs) <= position:
            continue
        index = int(op.inputs[position])
        tensor = graph.tensors[index]
        source = graph.tensors[int(dequantized[index].inputs[0])] if index in dequantized else tensor
        if buffer_of(model, source) is not None:
            yield op, name, tensor


def name_signature(model: Any, position: int, name: str, inputs: list[str], outputs: list[str]) -> None:
    """Give a signature and its tensors the Program's names; litert-torch's are `args_<i>` and `output_<i>`.

    Raises:
        ConversionError: the converter dropped or added an input or an output.
    """
    definition = model.signatureDefs[position]
    for maps, names, prefix in ((definition.inputs, inputs, "args_"), (definition.outputs, outputs, "output_")):
        given = {_text(m.name): m for m in maps}
        expected = [f"{prefix}{i}" for i in range(len(names))]
        if sorted(given) != sorted(expected):
            raise ConversionError(
                f"tflite: signature `{name}` came back with {sorted(given)}, not with {', '.join(names)}",
                hint="an input that no operation reads can't be kept: remove it from the task's signature",
            )
        for old, new in zip(expected, names, strict=True):
            given[old].name = new
    definition.signatureKey = name
