"""Core ML packages (.mlpackage) and single-file models (.mlmodel), through Apple's protobuf definitions.

`import coremltools` loads every framework that it can convert from, TensorFlow included (some 15 s); the generated
protobuf modules need none of that, so they are imported without running the package's own `__init__`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import sys
import types
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from edgec.errors import ToolMissing
from edgec.inspection.facts import Graph, Inspection, Port, Tally, by_count, damaged, size_of

_PARAMETER = {"float32": 4, "float16": 2, "int8": 1, "uint8": 1, "int32": 4, "int16": 2, "uint16": 2, "float64": 8}
_SUB_BYTE = {"int4": 4, "uint4": 4, "uint6": 6, "uint3": 3, "uint2": 2, "uint1": 1}


def load_spec(path: Path) -> Any:
    """The `Model` message of an .mlpackage or .mlmodel.

    Raises:
        SourceError: it isn't Core ML, or is truncated.
        ToolMissing: coremltools isn't here.
    """
    from google.protobuf.message import DecodeError

    file = path
    if path.is_dir():
        try:
            manifest = json.loads((path / "Manifest.json").read_text())
            root = manifest["itemInfoEntries"][manifest["rootModelIdentifier"]]["path"]
            file = path / "Data" / root
            if ".." in PurePosixPath(root).parts or not file.is_file():
                raise ValueError(f"its manifest names {root!r}, which isn't there")
        except (OSError, ValueError, KeyError, TypeError) as cause:
            raise damaged(path, "a Core ML package", cause) from cause
    spec = _proto("Model_pb2").Model()
    try:
        spec.ParseFromString(file.read_bytes())
    except DecodeError as cause:
        raise damaged(path, "a Core ML model", cause) from cause
    if spec.WhichOneof("Type") is None or not spec.description.output:
        raise damaged(path, "a Core ML model", "it has no model type or no outputs")
    return spec


def _proto(name: str) -> Any:
    if "coremltools" in sys.modules:
        return importlib.import_module(f"coremltools.proto.{name}")
    found = importlib.util.find_spec("coremltools")
    if found is None or found.submodule_search_locations is None:
        raise ToolMissing("reading Core ML needs coremltools", hint="pip install coremltools")
    shell = types.ModuleType("coremltools")
    shell.__path__ = list(found.submodule_search_locations)
    sys.modules["coremltools"] = shell
    try:
        return importlib.import_module(f"coremltools.proto.{name}")
    finally:
        # Whoever imports coremltools later must get the real one.
        for loaded in [m for m in sys.modules if m == "coremltools" or m.startswith("coremltools.")]:
            del sys.modules[loaded]


def inspect_coreml(path: Path) -> Inspection:
    """Read a Core ML package or model. Raises as `load_spec` does."""
    spec = load_spec(path)
    tally = Tally()
    kind = str(spec.WhichOneof("Type"))
    if kind == "mlProgram":
        graphs = tuple(_function(n, f, spec, tally) for n, f in sorted(spec.mlProgram.functions.items()))
        _check_weights(path, spec)
    else:
        graphs = (_network(spec, kind),)
    meta = spec.description.metadata
    metadata = {"type": kind, "specification version": str(spec.specificationVersion)}
    metadata |= {
        k: v for k, v in (("author", meta.author), ("license", meta.license), ("version", meta.versionString)) if v
    }
    metadata |= dict(sorted(meta.userDefined.items()))
    return Inspection(str(path), "coreml", size_of(path), graphs, tally.weights(), tally.quantized_groups(), metadata)


def _operations(block: Any) -> Iterator[Any]:
    for op in block.operations:
        yield op
        for inner in op.blocks:
            yield from _operations(inner)


def _function(name: str, function: Any, spec: Any, tally: Tally) -> Graph:
    block = function.block_specializations[function.opset]
    operations = list(_operations(block))
    makers = {o.name: op for op in operations for o in op.outputs}
    for op in operations:
        if op.type == "const":
            _constant(op, tally)
        elif op.type.startswith("constexpr_"):
            _compressed(op, makers, tally)
        elif op.type == "quantize":
            scale = _floats(makers.get(_argument(op, "scale")))
            dtype = _dtype(op.outputs[0].type.tensorType.dataType)
            tally.quantized("activations", dtype, "per channel" if len(scale) > 1 else "per tensor", 0, scale)
    described = spec.description
    for candidate in described.functions:
        if candidate.name == name:
            described = candidate
    inputs = tuple(_mil_port(i.name, i.type) for i in function.inputs)
    outputs = tuple(_feature(f) for f in described.output)
    return Graph(name, inputs, outputs, by_count(op.type for op in operations if op.type != "const"))


def _argument(op: Any, name: str) -> str:
    bound = op.inputs[name].arguments if name in op.inputs else []
    return str(bound[0].name) if bound else ""


def _dtype(number: int) -> str:
    name: str = _proto("MIL_pb2").DataType.Name(number).lower()
    return name


def _mil_port(name: str, value: Any) -> Port:
    if value.WhichOneof("type") == "stateType":
        return Port(name, *_tensor_type(value.stateType.wrappedType.tensorType, "state "))
    return Port(name, *_tensor_type(value.tensorType, ""))


def _tensor_type(tensor: Any, prefix: str) -> tuple[tuple[int | str, ...], str]:
    shape = tuple(d.constant.size if d.HasField("constant") else "?" for d in tensor.dimensions)
    return shape, prefix + _dtype(tensor.dataType)


def _shape(value_type: Any) -> list[int]:
    return [int(d.constant.size) for d in value_type.tensorType.dimensions]


def _constant(op: Any, tally: Tally) -> None:
    """A constant with more than one element is a weight; scalars and strings are parameters of operations."""
    kind = op.outputs[0].type
    count = math.prod(_shape(kind))
    dtype = _dtype(kind.tensorType.dataType)
    if count > 1 and (dtype in _PARAMETER or dtype in _SUB_BYTE):
        tally.weight(dtype, count, _bytes(dtype, count))


def _bytes(dtype: str, count: int) -> int:
    return math.ceil(count * _SUB_BYTE[dtype] / 8) if dtype in _SUB_BYTE else count * _PARAMETER.get(dtype, 4)


def _value(op: Any, makers: dict[str, Any], name: str) -> Any:
    """A constexpr's operand: an attribute of the operation, an immediate argument, or a constant of its own."""
    if name in op.attributes:
        return op.attributes[name]
    if name not in op.inputs or not op.inputs[name].arguments:
        return None
    argument = op.inputs[name].arguments[0]
    if argument.WhichOneof("binding") == "value":
        return argument.value
    maker = makers.get(argument.name)
    return None if maker is None else maker.attributes.get("val")


def _compressed(op: Any, makers: dict[str, Any], tally: Tally) -> None:
    """Count a `constexpr_*` operation: a weight that is stored compressed."""
    count = math.prod(_shape(op.outputs[0].type))
    data, scale = (
        next((v for n in names if (v := _value(op, makers, n)) is not None), None)
        for names in (("data", "quantized_data", "indices", "nonzero_data"), ("scale", "lut"))
    )
    dtype = "unknown" if data is None else _dtype(data.type.tensorType.dataType)
    if data is not None and (op.attributes or "val" not in data.DESCRIPTOR.fields_by_name) and op.type in _OLD:
        tally.weight(dtype, count, _bytes(dtype, count))  # iOS 16 form: the data is no constant of its own
    if "lut" in op.type:
        tally.quantized("weights", dtype, "palette", count)
        return
    if "sparse" in op.type:
        tally.quantized("weights", dtype, "sparse", count)
        return
    scales = _scale_values(scale)
    tally.quantized("weights", dtype, _granularity(op, scale), count, scales)


_OLD = ("constexpr_affine_dequantize", "constexpr_lut_to_dense", "constexpr_sparse_to_dense")


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


def _scale_values(value: Any) -> list[float]:
    """The scales that stand in the model file itself; those in weight.bin are not read."""
    if value is None or value.WhichOneof("value") != "immediateValue":
        return []
    tensor = value.immediateValue.tensor
    kind = tensor.WhichOneof("value")
    if kind == "floats":
        return [float(v) for v in tensor.floats.values]
    if kind == "bytes":  # float16
        import numpy as np

        return [float(v) for v in np.frombuffer(tensor.bytes.values, np.float16)]
    return []


def _floats(maker: Any) -> list[float]:
    return [] if maker is None or "val" not in maker.attributes else _scale_values(maker.attributes["val"])


def _feature(feature: Any) -> Port:
    kind = feature.type.WhichOneof("Type")
    if kind == "multiArrayType":
        array = feature.type.multiArrayType
        dtype = type(array).ArrayDataType.keys()[type(array).ArrayDataType.values().index(array.dataType)]
        return Port(feature.name, tuple(int(n) for n in array.shape), dtype.lower())
    if kind == "imageType":
        image = feature.type.imageType
        return Port(feature.name, (int(image.height), int(image.width)), "image")
    return Port(feature.name, (), str(kind or "unknown").removesuffix("Type"))


def _network(spec: Any, kind: str) -> Graph:
    """The older neural network form: layers in a list."""
    body = getattr(spec, kind)
    layers = [layer.WhichOneof("layer") or "unknown" for layer in getattr(body, "layers", [])]
    inputs, outputs = (tuple(_feature(f) for f in fs) for fs in (spec.description.input, spec.description.output))
    return Graph(kind, inputs, outputs, by_count(layers))


def _check_weights(path: Path, spec: Any) -> None:
    """Raise when a constant points behind the end of the weight file, as in a package copied by halves."""
    for function in spec.mlProgram.functions.values():
        for op in _operations(function.block_specializations[function.opset]):
            for value in op.attributes.values():
                if value.WhichOneof("value") == "blobFileValue":
                    name = value.blobFileValue.fileName.removeprefix("@model_path/")
                    file = path / "Data" / "com.apple.CoreML" / name if path.is_dir() else path.parent / name
                    if not file.is_file() or value.blobFileValue.offset >= file.stat().st_size:
                        raise damaged(path, "a Core ML package", f"{name} is missing or too short")
