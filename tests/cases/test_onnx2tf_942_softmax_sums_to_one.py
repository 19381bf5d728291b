"""onnx2tf#942: a badly calibrated softmax sums to 23."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from edgec.passes.export_check import check_softmax
from onnx import TensorProto, helper

from edgec.errors import ConversionError, Reason

CLASSES = 40


def softmax_with(scale: float, path: Path) -> Path:
    """A softmax whose output is quantised with this scale (1/256 is right), ONNX."""
    nodes = [
        helper.make_node("Softmax", ["x"], ["p"], name="softmax_3", axis=-1),
        helper.make_node("QuantizeLinear", ["p", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    constants = [
        helper.make_tensor("scale", TensorProto.FLOAT, [], [scale]),
        helper.make_tensor("zero", TensorProto.INT8, [], [-128]),
    ]
    shape = [2, CLASSES]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        constants,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


def test_a_softmax_that_does_not_sum_to_one_is_named(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((2, CLASSES)).astype(np.float32)
    with pytest.raises(ConversionError, match=r"`softmax_3` sums to .* and not to 1") as caught:
        check_softmax(softmax_with(0.5, tmp_path / "m.onnx"), {"x": x * 0.1})  # each 1/40 rounds to 0
    assert caught.value.reason is Reason.INVARIANT_BROKEN


def test_a_well_calibrated_one_passes(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((2, CLASSES)).astype(np.float32)
    assert check_softmax(softmax_with(1 / 256, tmp_path / "m.onnx"), {"x": x}) == 1
