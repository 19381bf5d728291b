"""The onnxruntime target on small programs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from edgec.targets.onnxruntime import OnnxRuntimeOptions, convert, open_artifact
from edgec.targets.onnxruntime_nbits import block_size, pack, to_matmul_nbits
from edgec.targets.onnxruntime_runner import OrtRunner

from edgec.context import Context
from edgec.errors import ConversionError
from edgec.golden import replay
from edgec.model import Artifact, LayerScheme, Program, Quantization
from edgec.parity import Parity, compare

onnx = pytest.importorskip("onnx")
pytestmark = pytest.mark.slow


def build(program: Program, folder: Path, **options: object) -> tuple[Artifact, Context]:
    folder.mkdir(parents=True)
    context = Context(seed=0, threads=2, work=folder, recipe_dir=folder, cache=folder, out=folder)
    convert(program, OnnxRuntimeOptions.model_validate(options), context)
    return Artifact.open(folder), context


def parity(program: Program, artifact: Artifact) -> Parity:
    steps = program.recording().steps
    state = {name for s in program.signatures for name in s.state_outputs}
    quantised = dict(program.quantization.output_steps) if program.quantization else {}
    outputs = replay(open_artifact(artifact), program.signatures, steps)
    return compare(outputs, [s.outputs for s in steps], quantised, may_be_absent=state)


def test_static_int8_equals_the_golden_at_every_level(small_cnn: Program, tmp_path: Path) -> None:
    for level in ("basic", "extended", "all"):
        artifact, _ = build(small_cnn, tmp_path / level, level=level, ort_format=False)
        assert parity(small_cnn, artifact).off_by_n == 0, level


def test_static_int8_is_fused_and_float_leftovers_are_counted(small_cnn: Program, tmp_path: Path) -> None:
    artifact, _ = build(small_cnn, tmp_path / "a")
    ops = artifact.details["report_ops"]
    assert ops["QLinearConv"] == 5
    assert "Conv" not in ops
    # Each ReLU6 stays a float Clip between two quantised tensors; the mean stays float too.
    assert artifact.counts["float_ops"] >= ops.get("Clip", 0) + ops["ReduceMean"]
    assert artifact.counts["layout_ops"] == 0
    assert artifact.details["report_error_without_x64_precision"] >= 0


def test_optimised_and_ort_files_compute_the_same(small_cnn: Program, tmp_path: Path) -> None:
    import onnxruntime as ort

    artifact, _ = build(small_cnn, tmp_path / "a")
    assert {f.role for f in artifact.files} == {"model", "optimized", "ort"}
    assert artifact.bytes == artifact.file("model").stat().st_size
    step = small_cnn.recording().steps[0]
    for role in ("optimized", "ort"):
        session = ort.InferenceSession(str(artifact.file(role)), providers=["CPUExecutionProvider"])
        np.testing.assert_allclose(session.run(["logits"], step.inputs)[0], step.outputs["logits"], atol=0.01)


def test_two_conversions_give_the_same_bytes(small_decoder: Program, tmp_path: Path) -> None:
    first, second = (build(small_decoder, tmp_path / n)[0] for n in ("a", "b"))
    names = [f.name for f in first.files]
    assert names == [f.name for f in second.files]
    for name in names:
        assert (first.path / name).read_bytes() == (second.path / name).read_bytes(), name


def test_signatures_share_one_file_of_weights(small_decoder: Program, tmp_path: Path) -> None:
    artifact, _ = build(small_decoder, tmp_path / "a")
    models = {f.name: f.bytes for f in artifact.files if f.role == "model"}
    assert set(models) == {"decode.onnx", "prefill.onnx", "weights.bin"}
    assert models["weights.bin"] < 1.5 * small_decoder.parameters  # INT8, each tensor once, padded to pages
    assert max(models["decode.onnx"], models["prefill.onnx"]) < 50_000


def test_int8_weights_become_matmul_nbits_with_our_scales(small_decoder: Program, tmp_path: Path) -> None:
    artifact, context = build(small_decoder, tmp_path / "a")
    assert artifact.details["report_ops"]["MatMulNBits"] == 30  # 7 per layer and the head, in both signatures
    assert artifact.counts["float_ops"] == 0
    assert any("30 products" in note for note in context.log.notes)
    result = parity(small_decoder, artifact)
    assert result.cosine > 0.999
    assert result.relative_error < 0.05  # activations are quantised to 8 bits on the fly


def test_tied_head_and_embedding_are_stored_once(small_decoder: Program, tmp_path: Path) -> None:
    artifact, _ = build(small_decoder, tmp_path / "a")
    model = onnx.load(str(artifact.path / "decode.onnx"), load_external_data=False)
    vocabulary = [t for t in model.graph.initializer if t.dims and t.dims[0] == 256 and t.data_type in (2, 3)]
    assert len(vocabulary) == 1


def test_pools_are_updated_in_place_and_forgotten_on_reset(small_decoder: Program, tmp_path: Path) -> None:
    artifact, _ = build(small_decoder, tmp_path / "a")
    assert artifact.details["in_place"]["decode"] == ["k_0", "v_0", "k_1", "v_1"]
    runner = OrtRunner(artifact)
    assert runner.stateful
    steps = small_decoder.recording().steps
    outputs = replay(runner, small_decoder.signatures, steps)
    pool = steps[-1].outputs["k_1_out"]
    np.testing.assert_allclose(runner.pool("k_1"), pool, atol=0.05 * np.abs(pool).max())
    assert "k_1_out" not in outputs[-1]
    first = runner.run(steps[0].signature, steps[0].inputs)["logits"]
    runner.reset()
    again = runner.run(steps[0].signature, steps[0].inputs)["logits"]
    np.testing.assert_array_equal(again, outputs[0]["logits"])
    assert first.shape == again.shape


def test_pools_that_take_turns_give_the_same_numbers(small_decoder: Program, tmp_path: Path) -> None:
    artifact, _ = build(small_decoder, tmp_path / "a")
    steps = small_decoder.recording().steps
    in_place = replay(OrtRunner(artifact), small_decoder.signatures, steps)
    artifact.details["in_place"] = {"decode": [], "prefill": []}
    in_turns = replay(OrtRunner(artifact), small_decoder.signatures, steps)
    for a, b in zip(in_place, in_turns, strict=True):
        np.testing.assert_array_equal(a["logits"], b["logits"])


def test_float_decoder_equals_the_golden(small_decoder: Program, tmp_path: Path) -> None:
    program = small_decoder.baseline
    assert program is not None
    artifact, _ = build(program, tmp_path / "a", ort_format=False)
    assert parity(program, artifact).relative_error < 1e-5


@pytest.mark.parametrize("rows", [64, 96, 40])
def test_packed_weight_multiplies_as_its_scales_say(rows: int) -> None:
    """K that needs no padding, a smaller block, and padding."""
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(rows)
    weight = rng.integers(-127, 128, (16, rows)).astype(np.int8)
    scale = rng.uniform(0.001, 0.01, 16).astype(np.float32)
    bias = rng.standard_normal(16).astype(np.float32)
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["wf"], axis=0),
        helper.make_node("Gemm", ["x", "wf", "b"], ["y"], name="gemm", transB=1),
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [info("x", TensorProto.FLOAT, [3, rows])],
        [info("y", TensorProto.FLOAT, [3, 16])],
        [numpy_helper.from_array(a, n) for n, a in (("w", weight), ("s", scale), ("b", bias))],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    assert to_matmul_nbits(model) == 1
    x = rng.standard_normal((3, rows)).astype(np.float32)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = x @ (weight * scale[:, None]).T + bias
    np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, atol=0.02 * np.abs(expected).max())


def test_block_divides_the_rows_when_one_can() -> None:
    assert [block_size(n) for n in (1536, 576, 96, 40)] == [64, 64, 32, 32]
    assert pack("w", np.zeros((2, 40), np.int8), np.ones(2, np.float32)).values.shape == (2, 2, 32)


def test_per_channel_int8_below_opset_13_is_refused(small_cnn: Program, tmp_path: Path) -> None:
    """neural-compressor#819, at the last door: an old file would lose all scales but one per layer."""
    from edgec.targets.onnxruntime_graph import check_opset

    model = onnx.load(str(small_cnn.onnx_path("main")))
    model.opset_import[0].version = 12
    with pytest.raises(ConversionError, match=r"opset 12.*quantised per channel") as caught:
        check_opset(model, "main", small_cnn.quantization)
    assert "opset: 21" in caught.value.hint
    check_opset(model, "main", Quantization("static", (LayerScheme("a", "Conv2d", "int8", None),)))
    check_opset(model, "main", None)
