"""ONNX files of the onnxruntime target: checks, small repairs, weights shared between signatures, operator counts."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from edgec.errors import ConversionError, Reason

if TYPE_CHECKING:
    import onnx

    from edgec.model import Quantization

WEIGHTS = "weights.bin"
EXTERNAL_OVER = 1_500_000_000  # bytes; protobuf ends at 2 GB, and tools fail well before
_LARGE = 1024  # bytes: smaller constants stay in the model, where tools look for scales and shapes
_ALIGN = 4096  # so that the file can be mapped into memory
PER_CHANNEL_OPSET = 13  # the first in which QuantizeLinear and DequantizeLinear have an axis

LAYOUT_OPS = frozenset(("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "DepthToSpace", "SpaceToDepth"))
LAYOUT_OPS |= {"ReorderInput", "ReorderOutput"}
_CONVERSION_OPS = frozenset(("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"))
_WEIGHTED = frozenset(("Conv", "ConvTranspose", "MatMul", "Gemm", "FusedConv", "FusedMatMul", "FusedGemm"))
_FLOATS = frozenset((1, 10, 11, 16))  # float32, float16, float64, bfloat16


def check_opset(model: onnx.ModelProto, name: str, quantization: Quantization | None) -> None:
    """Refuse per-channel INT8 in an opset that can't say it: its reader would take one scale for all channels.

    Raises:
        ConversionError: the opset is below 13 and a layer is quantised per channel.
    """
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    channels = [layer.name for layer in quantization.layers if layer.axis is not None] if quantization else []
    if opset < PER_CHANNEL_OPSET and channels:
        raise ConversionError(
            f"onnxruntime: {name}.onnx is opset {opset}, where DequantizeLinear has no axis, but `{channels[0]}`"
            f"{f' and {len(channels) - 1} more layers' if channels[1:] else ''} are quantised per channel",
            hint=f"set `export: {{opset: 21}}` ({PER_CHANNEL_OPSET} is the first that holds per-channel scales)",
            reason=Reason.UNSUPPORTED_SCHEME,
        )


def unshare_parameters(model: onnx.ModelProto) -> None:
    """Give each QuantizeLinear and DequantizeLinear scales and zero points of its own.

    ONNX Runtime 1.32's `session.x64quantprecision` rewrites a zero point once per node, and fails on a shared one.
    """
    import onnx

    initializers = {t.name: t for t in model.graph.initializer}
    taken: set[str] = set()
    for node in model.graph.node:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            continue
        for position in range(1, len(node.input)):
            name = node.input[position]
            if name in taken and name in initializers:
                own = onnx.TensorProto()
                own.CopyFrom(initializers[name])
                own.name = f"{name}/{node.name}/{position}"
                model.graph.initializer.append(own)
                node.input[position] = own.name
            taken.add(name)


@dataclass
class SharedWeights:
    """The external data of all models in `folder`; equal tensors are written once."""

    folder: Path
    offsets: dict[bytes, int] = field(default_factory=dict)

    def move(self, model: onnx.ModelProto) -> None:
        """Take the large constants out of `model`, which refers to them from then on."""
        from onnx import TensorProto

        with (self.folder / WEIGHTS).open("ab") as file:
            for tensor in model.graph.initializer:
                data = tensor.raw_data
                if len(data) < _LARGE:
                    continue
                key = hashlib.sha256(data).digest()
                if key not in self.offsets:
                    file.write(b"\0" * (-file.tell() % _ALIGN))
                    self.offsets[key] = file.tell()
                    file.write(data)
                place = {"location": WEIGHTS, "offset": str(self.offsets[key]), "length": str(len(data))}
                tensor.ClearField("raw_data")
                tensor.data_location = TensorProto.EXTERNAL
                for k, v in place.items():
                    tensor.external_data.add(key=k, value=v)


def save(models: dict[str, onnx.ModelProto], folder: Path) -> list[str]:
    """Write `<name>.onnx` for each model; gives the names of the files.

    Weights go to one weights.bin beside them when there are several models, which share most, or too many bytes.
    """
    weights = SharedWeights(folder)
    size = sum(len(t.raw_data) for m in models.values() for t in m.graph.initializer)
    files = [f"{name}.onnx" for name in models]
    external = size > EXTERNAL_OVER or (len(models) > 1 and any(_big(m) for m in models.values()))
    for file, model in zip(files, models.values(), strict=True):
        if external:
            weights.move(model)
        (folder / file).write_bytes(model.SerializeToString(deterministic=True))
    return [*files, WEIGHTS] if external else files


def _big(model: onnx.ModelProto) -> bool:
    return any(len(t.raw_data) >= _LARGE for t in model.graph.initializer)


def count_ops(
    models: dict[str, onnx.ModelProto], quantization: Quantization | None
) -> tuple[dict[str, int], dict[str, int]]:
    """`(counts, ops by name)` of optimised models: ops, layout_ops, and float_ops when the model is INT8.

    A float op of a static INT8 model computes in float (conversions at the edge of a float part aren't counted); of a
    weight-only model, where activations are float by definition, it is a product whose constant weight is float.
    """
    ops: Counter[str] = Counter()
    floats = 0
    for model in models.values():
        ops.update(n.op_type for n in model.graph.node)
        if quantization is not None:
            floats += _float_ops(model, static=quantization.scheme == "static")
    counts = {"ops": sum(ops.values()), "layout_ops": sum(n for name, n in ops.items() if name in LAYOUT_OPS)}
    if quantization is not None:
        counts["float_ops"] = floats
    return counts, dict(sorted(ops.items()))


def _float_ops(model: onnx.ModelProto, *, static: bool) -> int:
    graph = model.graph
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.input, *graph.output)}
    constants = {t.name: t.data_type for t in graph.initializer}
    if not static:
        return sum(
            n.op_type in _WEIGHTED and any(constants.get(name) in _FLOATS for name in n.input) for n in graph.node
        )
    return sum(
        n.op_type not in _CONVERSION_OPS and any(types.get(o) in _FLOATS for o in (*n.input, *n.output) if o)
        for n in graph.node
    )


def in_place_state(model: onnx.ModelProto, state: tuple[tuple[str, str], ...]) -> list[str]:
    """State inputs whose memory may also be the output's: one node reads them, a scatter that gives that output."""
    result = []
    for given, made in state:
        readers = [n for n in model.graph.node if given in n.input]
        if len(readers) == 1 and readers[0].op_type in ("ScatterND", "ScatterElements"):
            scatter = readers[0]
            if list(scatter.input).count(given) == 1 and scatter.input[0] == given and made in scatter.output:
                result.append(given)
    return result
