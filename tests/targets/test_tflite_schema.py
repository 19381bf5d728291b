"""The .tflite file as objects, and the checks that need no converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgec.targets import tflite_counts, tflite_gpu, tflite_schema, tflite_weights

from edgec.errors import ConversionError, Reason
from edgec.model import LayerScheme, Quantization

schema = pytest.importorskip("ai_edge_litert.schema_py_generated")


def fully_connected(weight: np.ndarray, kind: int = 0, *, reader: str = "FULLY_CONNECTED") -> Any:
    """A model of one operator with one constant weight, as bytes would give it; `kind` is the weight's TensorType."""
    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = getattr(schema.BuiltinOperator, reader)
    model = schema.ModelT()
    model.version, model.operatorCodes = 3, [code]
    constant = schema.BufferT()
    constant.data = np.ascontiguousarray(weight).view(np.uint8).reshape(-1)
    model.buffers = [schema.BufferT(), constant]
    graph = schema.SubGraphT()
    shapes = ([1, weight.shape[1]], list(weight.shape), [1, weight.shape[0]])
    graph.tensors = []
    for name, shape, buffer in zip("xwy", shapes, (0, 1, 0), strict=True):
        tensor = schema.TensorT()
        tensor.name, tensor.shape, tensor.buffer = name, shape, buffer
        tensor.type = kind if name == "w" else schema.TensorType.FLOAT32
        graph.tensors.append(tensor)
    op = schema.OperatorT()
    op.inputs, op.outputs = [0, 1, -1] if reader == "FULLY_CONNECTED" else [0, 1], [2]
    if reader == "FULLY_CONNECTED":
        op.builtinOptionsType = schema.BuiltinOptions.FullyConnectedOptions
        op.builtinOptions = schema.FullyConnectedOptionsT()
    graph.inputs, graph.outputs, graph.operators = [0], [2], [op]
    model.subgraphs = [graph]
    signature = schema.SignatureDefT()
    signature.signatureKey, signature.subgraphIndex = "main", 0
    signature.inputs, signature.outputs = [], []
    for maps, name, index in ((signature.inputs, "args_0", 0), (signature.outputs, "output_0", 2)):
        entry = schema.TensorMapT()
        entry.name, entry.tensorIndex = name, index
        maps.append(entry)
    model.signatureDefs = [signature]
    return model


def int8_weight() -> tuple[np.ndarray, tflite_weights.Int8Weight]:
    rng = np.random.default_rng(0)
    values = rng.integers(-127, 128, (4, 8)).astype(np.int8)
    scale = rng.uniform(0.01, 0.1, 4).astype(np.float32)
    return values * scale[:, None], tflite_weights.Int8Weight("layer", values, scale, 0)


def run(path: Path, x: np.ndarray) -> np.ndarray:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(str(path))
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], x)
    interpreter.invoke()
    result: np.ndarray = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
    return result


def test_stamped_weight_computes_with_our_scales(tmp_path: Path) -> None:
    floats, weight = int8_weight()
    model = fully_connected(floats)
    assert tflite_weights.stamp(model, {tflite_weights._digest(floats): weight}) == 1
    path = tmp_path / "m.tflite"
    tflite_schema.write(model, path)
    tensor = tflite_schema.read(path.read_bytes()).subgraphs[0].tensors[1]
    assert tflite_schema.dtype(tensor) == "int8"
    np.testing.assert_array_equal(tensor.quantization.scale, weight.scale)
    x = np.random.default_rng(1).standard_normal((1, 8)).astype(np.float32)
    np.testing.assert_allclose(run(path, x), x @ floats.T, atol=0.02 * np.abs(x @ floats.T).max())


def test_weight_that_the_converter_rewrote_is_an_error() -> None:
    floats, weight = int8_weight()
    model = fully_connected(floats * 2)
    with pytest.raises(ConversionError, match=r"rewrote 1 weights.*layer") as caught:
        tflite_weights.stamp(model, {tflite_weights._digest(floats): weight})
    assert caught.value.reason == Reason.UNSUPPORTED_SCHEME


def test_reader_without_a_hybrid_kernel_reads_a_dequantised_copy(tmp_path: Path) -> None:
    floats, weight = int8_weight()
    model = fully_connected(floats, reader="BATCH_MATMUL")
    graph = model.subgraphs[0]
    graph.operators[0].builtinOptionsType = schema.BuiltinOptions.BatchMatMulOptions
    graph.operators[0].builtinOptions = schema.BatchMatMulOptionsT()
    graph.operators[0].builtinOptions.adjY = True
    tflite_weights.stamp(model, {tflite_weights._digest(floats): weight})
    assert [tflite_schema.op_name(model, op) for op in graph.operators] == ["DEQUANTIZE", "BATCH_MATMUL"]
    path = tmp_path / "m.tflite"
    tflite_schema.write(model, path)
    x = np.random.default_rng(1).standard_normal((1, 8)).astype(np.float32)
    np.testing.assert_allclose(run(path, x), x @ floats.T, rtol=1e-5, atol=1e-5)


def test_int8_model_left_in_float_is_an_error() -> None:
    floats, _ = int8_weight()
    scheme = Quantization("static", (LayerScheme("head", "Linear", "int8", 0),))
    with pytest.raises(ConversionError, match="1 of 1 came out in float: FULLY_CONNECTED y"):
        tflite_counts.check_int8(fully_connected(floats), scheme)
    tflite_counts.check_int8(fully_connected(floats.astype(np.int8), schema.TensorType.INT8), scheme)


def test_layer_that_was_left_in_float_on_purpose_is_none() -> None:
    floats, _ = int8_weight()
    layers = (LayerScheme("body", "Linear", "int8", 0), LayerScheme("head", "Linear", "float32", None, "excluded"))
    tflite_counts.check_int8(fully_connected(floats), Quantization("static", layers))


def test_signature_gets_the_programs_names() -> None:
    model = fully_connected(int8_weight()[0])
    tflite_schema.name_signature(model, 0, "decode", ["tokens"], ["logits"])
    definition = model.signatureDefs[0]
    assert (definition.signatureKey, definition.inputs[0].name, definition.outputs[0].name) == (
        "decode",
        "tokens",
        "logits",
    )


def test_signature_with_a_lost_input_is_an_error() -> None:
    with pytest.raises(ConversionError, match="came back with"):
        tflite_schema.name_signature(fully_connected(int8_weight()[0]), 0, "decode", ["a", "b"], ["logits"])


def test_equal_constants_are_kept_once() -> None:
    model = fully_connected(np.ones((16, 32), np.float32))
    copy = schema.BufferT()
    copy.data = model.buffers[1].data.copy()
    model.buffers.append(copy)
    extra = schema.TensorT()
    extra.name, extra.shape, extra.buffer, extra.type = "again", [16, 32], 2, 0
    model.subgraphs[0].tensors.append(extra)
    tflite_schema.share_buffers(model)
    assert extra.buffer == 1
    assert model.buffers[2].data is None


def test_gpu_analyzer_that_passes_a_flex_operator_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    clear = "Your model looks compatible with GPU delegate on TFLite runtime version 9."
    monkeypatch.setattr(tflite_gpu, "_run_analyzer", lambda path: clear)
    model = fully_connected(int8_weight()[0], reader="RFFT2D")
    report = tflite_gpu.analyze(Path("unread"), model)
    assert report == tflite_gpu.GpuReport({"RFFT2D: not supported": 1}, "rules")


def test_gpu_analyzer_that_refuses_a_flex_operator_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "  Op#0 FlexCosh(T#0) -> [T#1]\nGPU COMPATIBILITY WARNING: Not supported custom op FlexCosh\n\n"
        "GPU COMPATIBILITY WARNING: Subgraph#0 has GPU delegate compatibility issues at nodes 0 on TFLite 2.9\n"
    )
    monkeypatch.setattr(tflite_gpu, "_run_analyzer", lambda path: text)
    report = tflite_gpu.analyze(Path("unread"), None)
    assert report == tflite_gpu.GpuReport({"Not supported custom op FlexCosh": 1}, "analyzer")


def test_gpu_report_in_other_words_is_an_error() -> None:
    with pytest.raises(ConversionError, match="could not be read"):
        tflite_gpu.parse("All is well.")
