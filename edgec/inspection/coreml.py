"""Core ML packages (.mlpackage) and single-file models (.mlmodel), through Apple's protobuf definitions.

`import coremltools` loads every framework that it can convert from, TensorFlow included (some 15 s); the generated
protobuf modules need none of that, so they are imported without running the package's own `__init__`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from edgec.errors import ToolMissing
from edgec.inspection.coreml_weights import WeightCounter
from edgec.inspection.facts import Graph, Inspection, Port, Tally, by_count, damaged, size_of


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
    spec = proto("Model_pb2").Model()
    try:
        spec.ParseFromString(file.read_bytes())
    except DecodeError as cause:
        raise damaged(path, "a Core ML model", cause) from cause
    # A package of several functions describes each of them, and nothing for the whole.
    described = [spec.description, *spec.description.functions]
    if spec.WhichOneof("Type") is None or not any(d.output for d in described):
        raise damaged(path, "a Core ML model", "it has no model type or no outputs")
    return spec


def proto(name: str) -> Any:
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
        counter = WeightCounter(path, tally)
        graphs = tuple(_function(n, f, spec, counter) for n, f in sorted(spec.mlProgram.functions.items()))
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


def _function(name: str, function: Any, spec: Any, counter: WeightCounter) -> Graph:
    operations = list(_operations(function.block_specializations[function.opset]))
    counter.count(operations)
    described = spec.description
    for candidate in described.functions:
        if candidate.name == name:
            described = candidate
    inputs = tuple(_mil_port(i.name, i.type) for i in function.inputs)
    outputs = tuple(_feature(f) for f in described.output)
    return Graph(name, inputs, outputs, by_count(op.type for op in operations if op.type != "const"))


def dtype_name(number: int) -> str:
    name: str = proto("MIL_pb2").DataType.Name(number).lower()
    return name


def _mil_port(name: str, value: Any) -> Port:
    if value.WhichOneof("type") == "stateType":
        return Port(name, *_tensor_type(value.stateType.wrappedType.tensorType, "state "))
    return Port(name, *_tensor_type(value.tensorType, ""))


def _tensor_type(tensor: Any, prefix: str) -> tuple[tuple[int | str, ...], str]:
    shape = tuple(d.constant.size if d.HasField("constant") else "?" for d in tensor.dimensions)
    return shape, prefix + dtype_name(tensor.dataType)


def _shape(value_type: Any) -> list[int]:
    return [int(d.constant.size) for d in value_type.tensorType.dimensions]


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
            bound = [a.value for i in op.inputs.values() for a in i.arguments if a.WhichOneof("binding") == "value"]
            for value in (*op.attributes.values(), *bound):
                if value.WhichOneof("value") == "blobFileValue":
                    name = value.blobFileValue.fileName.removeprefix("@model_path/")
                    file = path / "Data" / "com.apple.CoreML" / name if path.is_dir() else path.parent / name
                    if not file.is_file() or value.blobFileValue.offset >= file.stat().st_size:
                        raise damaged(path, "a Core ML package", f"{name} is missing or too short")
