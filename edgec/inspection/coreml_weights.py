"""Weights of an ML program: how many, how large, and how they are compressed.

A weight is a `const` operation, or an operand of a `constexpr_*` operation, whose value stands in the model file
("immediate") or in weight.bin at an offset ("blob"). Functions of one package share blobs: each counts once.
"""

from __future__ import annotations

import hashlib
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from edgec.inspection.facts import Tally

_BYTES = {"float32": 4, "float16": 2, "int8": 1, "uint8": 1, "int32": 4, "int16": 2, "uint16": 2, "float64": 8}
_SUB_BYTE = {"int4": 4, "uint4": 4, "uint6": 6, "uint3": 3, "uint2": 2, "uint1": 1}
_DATA = ("data", "quantized_data", "indices", "nonzero_data")
_SENTINEL = 0xDEADBEEF  # first word of a blob's header: sentinel, type, bytes, offset (MILBlob/Blob/StorageFormat.hpp)
_FLOATS = {1: np.float16, 2: np.float32}


class WeightCounter:
    """Counts into a tally; one for all functions of a package."""

    def __init__(self, package: Path, tally: Tally) -> None:
        folder = package / "Data" / "com.apple.CoreML" if package.is_dir() else package.parent
        self.folder, self.tally = folder, tally
        self.seen: set[str] = set()

    def count(self, operations: list[Any]) -> None:
        """Count the weights of one function, in the order of its operations."""
        makers = {o.name: op for op in operations for o in op.outputs}
        for op in operations:
            if op.type == "const":
                self._weight(op.attributes["val"], op.outputs[0].type)
            elif op.type.startswith("constexpr_"):
                self._compressed(op, makers)
            elif op.type == "quantize":
                scale = self._floats(_operand(op, makers, "scale"))
                how = "per channel" if len(scale) > 1 else "per tensor"
                self.tally.quantized("activations", _dtype(op.outputs[0].type), how, 0, scale)

    def _weight(self, value: Any, kind: Any) -> bool:
        """Count a constant of more than one element, unless it is one that was counted; says whether it did."""
        shape, dtype = _shape(kind), _dtype(kind)
        count = math.prod(shape)
        if count <= 1 or not (dtype in _BYTES or dtype in _SUB_BYTE):
            return False
        key = _identity(value)
        if key in self.seen:
            return False
        self.seen.add(key)
        size = math.ceil(count * _SUB_BYTE[dtype] / 8) if dtype in _SUB_BYTE else count * _BYTES[dtype]
        self.tally.weight(dtype, count, size)
        return True

    def _compressed(self, op: Any, makers: dict[str, Any]) -> None:
        """A `constexpr_*` operation: a weight in a compressed form, its data and what they are expanded by."""
        data = next((v for n in _DATA if (v := _operand(op, makers, n)) is not None), None)
        scale = next((v for n in ("scale", "lut") if (v := _operand(op, makers, n)) is not None), None)
        for name in (*op.inputs, *op.attributes):
            value = _operand(op, makers, name)
            if value is not None and value.type.WhichOneof("type") == "tensorType":
                self._weight(value, value.type)
        key = f"{op.type} {'' if data is None else _identity(data)}"
        if key in self.seen:
            return
        self.seen.add(key)
        count = math.prod(_shape(op.outputs[0].type))
        dtype = "unknown" if data is None else _dtype(data.type)
        if "lut" in op.type or "sparse" in op.type:
            self.tally.quantized("weights", dtype, "palette" if "lut" in op.type else "sparse", count)
        else:
            self.tally.quantized("weights", dtype, _granularity(op, scale), count, self._floats(scale))

    def _floats(self, value: Any) -> list[float]:
        """The numbers of a scale, wherever they stand; empty when they are of no float type."""
        if value is None:
            return []
        if value.WhichOneof("value") == "blobFileValue":
            return self._blob(value.blobFileValue)
        tensor = value.immediateValue.tensor
        kind = tensor.WhichOneof("value")
        if kind == "floats":
            return [float(v) for v in tensor.floats.values]
        if kind == "bytes" and _dtype(value.type) == "float16":
            return [float(v) for v in np.frombuffer(tensor.bytes.values, np.float16)]
        return []

    def _blob(self, blob: Any) -> list[float]:
        file = self.folder / blob.fileName.removeprefix("@model_path/")
        with file.open("rb") as stream:
            stream.seek(blob.offset)
            header = stream.read(24)
            if len(header) < 24:
                return []
            sentinel, kind, size, offset = struct.unpack("<IIQQ", header)
            if sentinel != _SENTINEL or kind not in _FLOATS:
                return []
            stream.seek(offset)
            return [float(v) for v in np.frombuffer(stream.read(size), _FLOATS[kind])]


def _identity(value: Any) -> str:
    """Equal for two uses of one blob, and for equal immediate values."""
    if value.WhichOneof("value") == "blobFileValue":
        return f"{value.blobFileValue.fileName}@{value.blobFileValue.offset}"
    return hashlib.sha256(value.SerializeToString(deterministic=True)).hexdigest()


def _dtype(kind: Any) -> str:
    from edgec.inspection.coreml import dtype_name

    return dtype_name(kind.tensorType.dataType)


def _shape(kind: Any) -> list[int]:
    return [int(d.constant.size) for d in kind.tensorType.dimensions]


def _operand(op: Any, makers: dict[str, Any], name: str) -> Any:
    """An operand's value: an attribute of the operation, an immediate argument, or a constant of its own."""
    if name in op.attributes:
        return op.attributes[name]
    if name not in op.inputs or not op.inputs[name].arguments:
        return None
    argument = op.inputs[name].arguments[0]
    if argument.WhichOneof("binding") == "value":
        return argument.value
    maker = makers.get(argument.name)
    return maker.attributes["val"] if maker is not None and "val" in maker.attributes else None


def _granularity(op: Any, scale: Any) -> str:
    """Per tensor, channel or block, from how the scale's shape divides the weight's."""
    if scale is None:
        return "per tensor"
    weight, steps = _shape(op.outputs[0].type), _shape(scale.type)
    if math.prod(steps) <= 1:
        return "per tensor"
    if len(steps) == len(weight):
        blocked = [w // s for w, s in zip(weight, steps, strict=True) if 1 < s < w]
        if blocked:
            return f"per block of {blocked[-1]}"
    return "per channel"
