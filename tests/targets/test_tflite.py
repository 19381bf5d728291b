"""The tflite target on small programs: converted once per module, since each conversion takes seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from edgec.targets.tflite import TfliteOptions, convert, open_artifact
from edgec.targets.tflite_runner import TfliteRunner
from edgec.targets.tflite_schema import custom_ops, dtype, read, signature_graphs, weighted_ops

from edgec.context import Context
from edgec.errors import ConversionError, Reason
from edgec.golden import replay, zero_state
from edgec.model import Artifact, LayerScheme, Program, Quantization, Signature, TensorSpec
from edgec.parity import Parity, compare

pytestmark = pytest.mark.slow


def build(program: Program, folder: Path, **options: object) -> Artifact:
    folder.mkdir(parents=True)
    context = Context(seed=0, threads=2, work=folder, recipe_dir=folder, cache=folder, out=folder)
    convert(program, TfliteOptions.model_validate(options), context)
    return Artifact.open(folder)


def parity(program: Program, artifact: Artifact) -> Parity:
    steps = program.recording().steps
    quantised = dict(program.quantization.output_steps) if program.quantization else {}
    outputs = replay(open_artifact(artifact), program.signatures, steps)
    return compare(outputs, [s.outputs for s in steps], quantised)


@pytest.fixture(scope="module")
def cnn(small_cnn: Program, tmp_path_factory: pytest.TempPathFactory) -> tuple[Program, Artifact]:
    return small_cnn, build(small_cnn, tmp_path_factory.mktemp("tflite") / "cnn")


@pytest.fixture(scope="module")
def decoder(small_decoder: Program, tmp_path_factory: pytest.TempPathFactory) -> tuple[Program, Artifact]:
    return small_decoder, build(small_decoder, tmp_path_factory.mktemp("tflite") / "decoder")


def test_static_int8_is_off_by_no_step(cnn: tuple[Program, Artifact]) -> None:
    program, artifact = cnn
    assert parity(program, artifact).off_by_n == 0


def test_reference_kernels_agree_too(cnn: tuple[Program, Artifact]) -> None:
    program, artifact = cnn
    artifact.details["kernels"] = "reference"
    try:
        assert parity(program, artifact).off_by_n == 0
    finally:
        artifact.details["kernels"] = "xnnpack"


def test_static_int8_is_int8_from_end_to_end(cnn: tuple[Program, Artifact]) -> None:
    _, artifact = cnn
    model = read(artifact.file("model").read_bytes())
    [graph] = signature_graphs(model).values()
    assert {dtype(graph.tensors[i]) for i in (*graph.inputs, *graph.outputs)} == {"int8"}
    assert [dtype(w) for _, _, w in weighted_ops(model, graph)] == ["int8"] * 6
    depthwise = [w for _, name, w in weighted_ops(model, graph) if name == "DEPTHWISE_CONV_2D"]
    assert [len(w.quantization.scale) for w in depthwise] == [16, 32]  # a scale for each channel
    assert artifact.counts["float_ops"] == 0
    assert artifact.counts["undelegated_ops"] == 0
    assert artifact.counts["gpu_incompatible_ops"] == 0
    assert not custom_ops(model)


def test_trace_shows_each_operator_and_ends_in_the_output(cnn: tuple[Program, Artifact]) -> None:
    program, artifact = cnn
    runner = TfliteRunner(artifact)
    step = program.recording().steps[0]
    trace = runner.trace("main", step.inputs)
    assert len(trace) == artifact.counts["ops"]
    np.testing.assert_array_equal(list(trace.values())[-1], runner.run("main", step.inputs)["logits"])


def test_camera_layout_saves_the_transpose(cnn: tuple[Program, Artifact], tmp_path: Path) -> None:
    program, plain = cnn
    artifact = build(program, tmp_path / "a", channels_last=["image"])
    assert artifact.counts["layout_ops"] == plain.counts["layout_ops"] - 1
    assert parity(program, artifact).off_by_n == 0


def test_channels_last_of_an_unknown_input_is_refused(cnn: tuple[Program, Artifact], tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="did you mean `image`"):
        build(cnn[0], tmp_path / "a", channels_last=["imag"])


def test_two_conversions_give_the_same_bytes(cnn: tuple[Program, Artifact], tmp_path: Path) -> None:
    program, artifact = cnn
    again = build(program, tmp_path / "a", analyze_gpu=False)
    assert "gpu_incompatible_ops" not in again.counts
    assert again.file("model").read_bytes() == artifact.file("model").read_bytes()


def test_model_left_in_float_is_an_error(cnn: tuple[Program, Artifact], tmp_path: Path) -> None:
    """tensorflow#58451 and its kin: a float program that claims to be INT8 must not pass as one."""
    program = cnn[0].baseline
    assert program is not None
    claimed = Quantization("weight-only", (LayerScheme("classifier", "Linear", "int8", 0),))
    liar = Program(program.path, program.signatures, claimed, "tensors", 21, program.parameters)
    with pytest.raises(ConversionError, match="came out in float") as caught:
        build(liar, tmp_path / "a")
    assert caught.value.reason == Reason.UNSUPPORTED_SCHEME


def test_int8_weights_keep_our_scales(decoder: tuple[Program, Artifact]) -> None:
    program, artifact = decoder
    model = read(artifact.file("model").read_bytes())
    exported = program.exported("decode")
    ours = {
        tuple(t.flatten().tolist()): name for name, t in exported.state_dict.items() if name.endswith("k_proj.scale")
    }
    theirs = [
        tuple(np.asarray(w.quantization.scale).tolist())
        for _, name, w in weighted_ops(model, signature_graphs(model)["decode"])
        if name == "FULLY_CONNECTED"
    ]
    assert len(theirs) == 15
    assert len(ours) == 2
    assert set(ours) <= set(theirs)


def test_int8_weights_compute_what_the_golden_computes(decoder: tuple[Program, Artifact]) -> None:
    program, artifact = decoder
    result = parity(program, artifact)
    assert result.cosine > 0.999
    assert result.relative_error < 0.05  # activations are quantised to 8 bits on the fly


def test_signatures_share_their_weights(decoder: tuple[Program, Artifact]) -> None:
    program, artifact = decoder
    model = read(artifact.file("model").read_bytes())
    weights = [{w.buffer for _, _, w in weighted_ops(model, graph)} for graph in signature_graphs(model).values()]
    assert weights[0] == weights[1]
    assert sum(len(b.data) for b in model.buffers if b.data is not None) < 1.2 * program.parameters


def test_what_xnnpack_leaves_is_counted_over_all_signatures(decoder: tuple[Program, Artifact]) -> None:
    _, artifact = decoder
    left = artifact.details["report_undelegated"]
    assert artifact.counts["float_ops"] == 0  # tables that are looked up in float are no products
    assert left["STABLEHLO_SCATTER"] == 8  # 2 pools × 2 layers × 2 signatures
    assert "FULLY_CONNECTED" not in left  # the INT8 products are XNNPACK's
    assert artifact.counts["undelegated_ops"] == sum(left.values())


def test_second_signature_is_traced_too(decoder: tuple[Program, Artifact]) -> None:
    program, artifact = decoder
    step = next(s for s in program.recording().steps if s.signature == "prefill")
    feeds = {**step.inputs, **zero_state(program.signature("prefill"))}
    trace = TfliteRunner(artifact).trace("prefill", feeds)
    assert any(v.shape == (1, 8, 256) for v in trace.values())


def test_float_program_converts_to_float(decoder: tuple[Program, Artifact], tmp_path: Path) -> None:
    program = decoder[0].baseline
    assert program is not None
    artifact = build(program, tmp_path / "a")
    assert parity(program, artifact).relative_error < 1e-5
    assert "float_ops" not in artifact.counts
    assert artifact.bytes > 2 * decoder[1].bytes


def test_unsupported_op_names_the_op_and_the_users_line(tmp_path: Path) -> None:
    """coremltools#2115 and its kin, for TFLite."""
    import torch

    class Exotic(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cummax(x * 2, 1).values  # the line that the error must name

    signature = Signature("main", (TensorSpec("x", (2, 8), "float32"),), (TensorSpec("y", (2, 8), "float32"),))
    torch.export.save(torch.export.export(Exotic().eval(), (torch.randn(2, 8),)), tmp_path / "main.pt2")
    program = Program(tmp_path, (signature,), None, "tensors", 21, 0)
    with pytest.raises(ConversionError, match=r"aten.cummax.default at test_tflite.py:\d+") as caught:
        build(program, tmp_path / "a")
    assert caught.value.reason == Reason.UNSUPPORTED_OP
    assert "the line that the error must name" in caught.value.message
    assert "float" in caught.value.hint
