"""What `inspect` says of ONNX files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edgec.errors import Reason, SourceError
from edgec.inspection.facts import Port, Quantized, Weights
from edgec.inspection.onnx import inspect_onnx
from tests.onnx_samples import chain, initializer, qdq, save


def test_ops_ports_and_weights_of_a_float_graph(tmp_path: Path) -> None:
    path = chain(tmp_path / "a.onnx", batch="N")
    found = inspect_onnx(path)
    (graph,) = found.graphs
    assert graph.ops == {"Conv": 2, "Relu": 2, "MatMul": 1, "ReduceMean": 1}
    assert graph.inputs == (Port("image", ("N", 3, 8, 8), "float32"),)
    assert graph.outputs == (Port("logits", ("N", 5), "float32"),)
    assert found.weights == (Weights("float32", 3, 216 + 576 + 40, 4 * 832), Weights("int64", 1, 2, 16))
    assert found.quantized == ()
    assert found.bytes == path.stat().st_size
    assert found.metadata["opset ai.onnx"] == "21"


def test_what_is_quantised_and_how(tmp_path: Path) -> None:
    found = inspect_onnx(qdq(tmp_path / "q.onnx"))
    assert found.quantized == (
        Quantized("activations", "int8", "per tensor", 2, 0, pytest.approx(0.05), pytest.approx(0.5)),
        Quantized("weights", "int8", "per channel", 1, 8, pytest.approx(0.01), pytest.approx(0.04)),
    )


def test_unfolded_weights_count_as_quantised_weights(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["w", "s", "z"], ["wq"]),
        helper.make_node("DequantizeLinear", ["wq", "s", "z"], ["wd"]),
        helper.make_node("MatMul", ["x", "wd"], ["y"]),
    ]
    constants = [initializer("w", np.eye(4)), initializer("s", 0.1), initializer("z", 0, "int8")]
    path = save(tmp_path / "u.onnx", nodes, constants, inputs={"x": [1, 4]}, outputs={"y": [1, 4]})
    (weights,) = inspect_onnx(path).quantized
    assert (weights.what, weights.granularity, weights.parameters) == ("weights", "per tensor", 16)


def test_four_bit_blocks_are_told_apart(tmp_path: Path) -> None:
    node = helper.make_node(
        "MatMulNBits", ["x", "b", "s"], ["y"], domain="com.microsoft", K=64, N=8, bits=4, block_size=32
    )
    constants = [initializer("b", np.zeros((8, 2, 16)), "uint8"), initializer("s", np.full(16, 0.25))]
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [1, 64]), ("y", [1, 8]))]
    graph = helper.make_graph([node], "g", ports[:1], ports[1:], constants)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), str(tmp_path / "n.onnx"))
    found = inspect_onnx(tmp_path / "n.onnx")
    assert found.quantized == (Quantized("weights", "int4", "per block of 32", 1, 512, 0.25, 0.25),)
    assert found.graphs[0].ops == {"com.microsoft.MatMulNBits": 1}


def test_operations_in_the_bodies_of_if_are_counted(tmp_path: Path) -> None:
    def body(name: str, op: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, [2])
        return helper.make_graph([helper.make_node(op, ["x"], [f"{name}_y"])], name, [], [out])

    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])
    flag = helper.make_tensor_value_info("c", TensorProto.BOOL, [])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])
    node = helper.make_node("If", ["c"], ["y"], then_branch=body("t", "Exp"), else_branch=body("e", "Neg"))
    model = helper.make_model(helper.make_graph([node], "g", [x, flag], [y]), ir_version=10)
    onnx.save(model, str(tmp_path / "if.onnx"))
    assert inspect_onnx(tmp_path / "if.onnx").graphs[0].ops == {"Exp": 1, "If": 1, "Neg": 1}


def test_external_data_counts_and_its_absence_is_said(tmp_path: Path) -> None:
    model = onnx.load(str(chain(tmp_path / "a.onnx")))
    onnx.save_model(model, str(tmp_path / "e.onnx"), save_as_external_data=True, location="e.bin", size_threshold=0)
    found = inspect_onnx(tmp_path / "e.onnx")
    assert found.bytes == sum((tmp_path / n).stat().st_size for n in ("e.onnx", "e.bin"))
    assert found.parameters == 834
    (tmp_path / "e.bin").unlink()
    assert "missing: e.bin" in inspect_onnx(tmp_path / "e.onnx").metadata["external data"]


def test_a_truncated_file_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    path = qdq(tmp_path / "q.onnx")
    whole = path.read_bytes()
    for length in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:length])
        with pytest.raises(SourceError) as caught:
            inspect_onnx(path)
        assert caught.value.reason == Reason.BAD_CHECKPOINT, length
