"""Would LiteRT's GPU delegate take a .tflite file whole? TensorFlow's analyzer is asked, after it is itself examined.

The analyzer (`tf.lite.experimental.Analyzer`, which LiteRT's wheel carries too) runs without a GPU. But the builds in
tensorflow-cpu 2.21 and ai-edge-litert 2.3 call *every* file compatible, one with a Flex operator included, which their
documentation shows being refused. So it is shown a file that no GPU delegate takes first. When it passes that, its
word is worth nothing, and the delegate's published rules (tensorflow/lite/tools/versioning/gpu_compatibility.cc) are
applied here instead: which operators it has, and their most common conditions on types and ranks.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgec.errors import ConversionError

from .tflite_schema import buffer_of, dtype, op_name, signature_graphs, write

_WARNING = re.compile(r"GPU COMPATIBILITY WARNING: (?P<what>.+)")
_SUMMARY = re.compile(r"^Subgraph#\d+ has GPU delegate compatibility issues")

# Taken in any form that a converter writes.
_NAMES = """
    ABS ADD ADD_N ATAN2 AVERAGE_POOL_2D BATCH_MATMUL CEIL CONCATENATION CONV_2D COS DENSIFY DEPTHWISE_CONV_2D
    DEPTH_TO_SPACE DIV ELU EMBEDDING_LOOKUP EQUAL EXP FLOOR FLOOR_DIV FLOOR_MOD FULLY_CONNECTED GELU GREATER
    GREATER_EQUAL HARD_SWISH LEAKY_RELU LESS LESS_EQUAL LOG LOGICAL_AND LOGISTIC LSTM MAXIMUM MAX_POOL_2D MINIMUM
    MIRROR_PAD MUL NEG NOT_EQUAL ONE_HOT PACK POW PRELU QUANTIZE RELU RELU6 RELU_N1_TO_1 RESHAPE RESIZE_BILINEAR
    RESIZE_NEAREST_NEIGHBOR RSQRT SIGN SIN SOFTMAX SPACE_TO_DEPTH SPLIT SPLIT_V SQRT SQUARE SQUARED_DIFFERENCE
    STABLEHLO_CLAMP SUB TANH TILE TRANSPOSE TRANSPOSE_CONV
"""
_TAKEN = frozenset(_NAMES.split())
_CASTS = frozenset(
    (("bool", "float32"), ("float32", "bool"), ("float32", "int32"), ("int32", "float32"), ("int32", "int32"))
)


@dataclass(frozen=True)
class GpuReport:
    """`issues` counts each complaint; `source` is "analyzer", or "rules" where the analyzer is blind."""

    issues: dict[str, int]
    source: str

    @property
    def total(self) -> int:
        return sum(self.issues.values())


def analyze(path: Path, model: Any) -> GpuReport:
    """What the GPU delegate would not take of the file at `path`, which holds `model`."""
    if _analyzer_is_blind():
        return GpuReport(check(model), "rules")
    return GpuReport(parse(_run_analyzer(path)), "analyzer")


def _run_analyzer(path: Path) -> str:
    from ai_edge_litert import _pywrap_analyzer_wrapper

    return str(_pywrap_analyzer_wrapper.ModelAnalyzer(str(path), True, True))


def parse(text: str) -> dict[str, int]:
    """Count the complaints in the analyzer's text.

    Raises:
        ConversionError: the text has neither complaints nor the analyzer's all-clear: its wording has changed.
    """
    found = [m["what"].strip() for m in _WARNING.finditer(text)]
    if not found and "looks compatible with GPU delegate" not in text:
        raise ConversionError(
            "tflite: the analyzer's report on the GPU delegate could not be read",
            hint="set `analyze_gpu: false` for this target",
        )
    return dict(sorted(Counter(w for w in found if not _SUMMARY.match(w)).items()))


def _analyzer_is_blind() -> bool:
    """Whether the analyzer calls a Flex operator compatible with the GPU."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "flex.tflite"
        write(_flex_model(), path)
        return not parse(_run_analyzer(path))


def _flex_model() -> Any:
    """y = FlexCosh(x): TensorFlow's own kernel, which runs on no GPU delegate."""
    from ai_edge_litert import schema_py_generated as schema

    code = schema.OperatorCodeT()
    code.builtinCode = schema.BuiltinOperator.CUSTOM
    code.deprecatedBuiltinCode = schema.BuiltinOperator.CUSTOM
    code.customCode = "FlexCosh"
    op = schema.OperatorT()
    op.inputs, op.outputs = [0], [1]
    graph = schema.SubGraphT()
    graph.tensors = []
    for name in ("x", "y"):
        tensor = schema.TensorT()
        tensor.name, tensor.shape, tensor.type, tensor.buffer = name, [4], schema.TensorType.FLOAT32, 0
        graph.tensors.append(tensor)
    graph.inputs, graph.outputs, graph.operators = [0], [1], [op]
    model = schema.ModelT()
    model.version, model.operatorCodes, model.subgraphs, model.buffers = 3, [code], [graph], [schema.BufferT()]
    return model


def check(model: Any) -> dict[str, int]:
    """Complaints by text, over all signatures, from the delegate's published rules."""
    issues: Counter[str] = Counter()
    for graph in signature_graphs(model).values():
        for op in graph.operators:
            name = op_name(model, op)
            condition = _CONDITIONS.get(name)
            if condition is not None:
                complaint = condition(model, graph, op)
            else:
                complaint = "" if name in _TAKEN else "not supported"
            if complaint:
                issues[f"{name}: {complaint}"] += 1
    return dict(sorted(issues.items()))


def _tensor(graph: Any, op: Any, position: int) -> Any:
    return graph.tensors[int(op.inputs[position])]


def _cast(_: Any, graph: Any, op: Any) -> str:
    pair = (dtype(_tensor(graph, op, 0)), dtype(graph.tensors[int(op.outputs[0])]))
    return "" if pair in _CASTS else f"from {pair[0]} to {pair[1]}"


def _cumsum(_: Any, graph: Any, op: Any) -> str:
    return "" if dtype(_tensor(graph, op, 0)).startswith("float") else "of integers"


def _dequantize(_: Any, graph: Any, op: Any) -> str:
    return "of int16" if dtype(_tensor(graph, op, 0)) == "int16" else ""


def _dynamic_update_slice(_: Any, graph: Any, op: Any) -> str:
    shape = _tensor(graph, op, 0).shape
    return "of a batch larger than 1" if len(shape) == 4 and shape[0] != 1 else ""


def _gather(_: Any, graph: Any, op: Any) -> str:
    if dtype(_tensor(graph, op, 0)) == "int32":
        return "from int32 values"
    indices = _tensor(graph, op, 1)
    return "" if len(indices.shape) == 1 and dtype(indices) == "int32" else "with indices that aren't one row of int32"


def _pad(_: Any, graph: Any, op: Any) -> str:
    shape = [int(n) for n in _tensor(graph, op, 1).shape]
    return "" if shape in ([3, 2], [4, 2]) else "of other than 3 or 4 dimensions"


def _reduce(model: Any, graph: Any, op: Any) -> str:
    axes = _tensor(graph, op, 1)
    return "" if buffer_of(model, axes) is not None and dtype(axes) == "int32" else "over computed axes"


def _select(_: Any, graph: Any, op: Any) -> str:
    values = [dtype(_tensor(graph, op, i)) for i in (1, 2)]
    return "" if all(t in ("float32", "float16") for t in values) else "between integers"


def _slice(_: Any, graph: Any, op: Any) -> str:
    return "" if len(_tensor(graph, op, 0).shape) in (3, 4) else "of other than 3 or 4 dimensions"


_CONDITIONS: dict[str, Callable[[Any, Any, Any], str]] = {
    "CAST": _cast,
    "CUMSUM": _cumsum,
    "DEQUANTIZE": _dequantize,
    "DYNAMIC_UPDATE_SLICE": _dynamic_update_slice,
    "GATHER": _gather,
    "MEAN": _reduce,
    "PAD": _pad,
    "PADV2": _pad,
    "REDUCE_MAX": _reduce,
    "REDUCE_MIN": _reduce,
    "REDUCE_PROD": _reduce,
    "SELECT": _select,
    "SELECT_V2": _select,
    "SLICE": _slice,
    "STRIDED_SLICE": _slice,
    "SUM": _reduce,
}
