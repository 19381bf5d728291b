"""Small ONNX graphs for tests, by ONNX's own helpers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def initializer(name: str, value: Any, dtype: str = "float32") -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(value, dtype), name)


def save(path: Path, nodes: list[onnx.NodeProto], constants: list[onnx.TensorProto], **ports: Any) -> Path:
    """`ports`: `inputs` and `outputs`, each name → shape, float32."""

    def infos(shapes: dict[str, list[int | str]]) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()]

    graph = helper.make_graph(nodes, "sample", infos(ports["inputs"]), infos(ports["outputs"]), constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10, producer_name="tests")
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, str(path))
    return path


def chain(path: Path, *, seed: int = 0, batch: int | str = 1, change: dict[str, Any] | None = None) -> Path:
    """conv → relu → conv → relu → mean → gemm, on (batch, 3, 8, 8) → (batch, 5); `change` replaces weights by name."""
    rng = np.random.default_rng(seed)
    weights = {
        "w1": rng.normal(size=(8, 3, 3, 3)),
        "w2": rng.normal(size=(8, 8, 3, 3)) / 8,
        "w3": rng.normal(size=(8, 5)),
    } | (change or {})
    nodes = [
        helper.make_node("Conv", ["image", "w1"], ["conv1"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["conv1"], ["relu1"]),
        helper.make_node("Conv", ["relu1", "w2"], ["conv2"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["conv2"], ["relu2"]),
        helper.make_node("ReduceMean", ["relu2", "axes"], ["mean"], keepdims=0),
        helper.make_node("MatMul", ["mean", "w3"], ["logits"]),
    ]
    constants = [initializer(n, w) for n, w in weights.items()] + [initializer("axes", [2, 3], "int64")]
    return save(path, nodes, constants, inputs={"image": [batch, 3, 8, 8]}, outputs={"logits": [batch, 5]})


def qdq(path: Path) -> Path:
    """x → quantise → dequantise → conv with INT8 weights per channel → quantise → dequantise."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "sx", "zx"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "sx", "zx"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "sw", "zw"], ["wd"], axis=0),
        helper.make_node("Conv", ["xd", "wd"], ["c"], name="the_conv"),
        helper.make_node("QuantizeLinear", ["c", "sy", "zx"], ["cq"]),
        helper.make_node("DequantizeLinear", ["cq", "sy", "zx"], ["y"]),
    ]
    rng = np.random.default_rng(0)
    constants = [
        initializer("sx", 0.05),
        initializer("sy", 0.5),
        initializer("zx", 0, "int8"),
        initializer("w", rng.integers(-127, 128, (4, 2, 1, 1)), "int8"),
        initializer("sw", [0.01, 0.02, 0.03, 0.04]),
        initializer("zw", [0] * 4, "int8"),
    ]
    return save(path, nodes, constants, inputs={"x": [1, 2, 4, 4]}, outputs={"y": [1, 4, 4, 4]})
