"""The Core ML target on small programs: what it writes, that it computes the golden, and what it refuses."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from edgec.targets.coreml import CoreMLOptions, convert, open_artifact
from edgec.targets.coreml_counts import Node, _float_arithmetic, read_functions

from edgec.context import Context
from edgec.errors import ConversionError, Reason
from edgec.golden import Recording, replay
from edgec.model import Artifact, Program, Signature, TensorSpec
from edgec.parity import Parity, compare
from edgec.prove import main
from edgec.registry import get_target
from tests.targets.coreml_programs import context, torch_program
from tests.targets.programs import cnn_program, decoder_program

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("coreml")


@pytest.fixture(scope="module")
def cnn(folder: Path) -> Program:
    return cnn_program(folder / "cnn")


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Program:
    return decoder_program(folder / "decoder")


@pytest.fixture(scope="module")
def cnn_artifact(cnn: Program, folder: Path) -> Artifact:
    return convert(cnn, CoreMLOptions(), context(folder / "cnn16"))


@pytest.fixture(scope="module")
def decoder_context(folder: Path) -> Context:
    return context(folder / "decoder16")


@pytest.fixture(scope="module")
def decoder_artifact(decoder: Program, decoder_context: Context) -> Artifact:
    return convert(decoder, CoreMLOptions(), decoder_context)


def parity(program: Program, artifact: Artifact) -> Parity:
    steps = program.recording().steps
    runner = open_artifact(Artifact.open(artifact.path))
    state = {name for s in program.signatures for name in s.state_outputs} if runner.stateful else set()
    quantised = dict(program.quantization.output_steps) if program.quantization else {}
    outputs = replay(runner, program.signatures, steps)
    return compare(outputs, [s.outputs for s in steps], quantised, may_be_absent=state)


def digests(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_static_int8_in_float32_equals_the_golden(cnn: Program, folder: Path) -> None:
    artifact = convert(cnn, CoreMLOptions(precision="float32"), context(folder / "cnn32"))
    assert parity(cnn, artifact).equal


def test_static_int8_in_float16_is_off_by_at_most_one_step(cnn: Program, cnn_artifact: Artifact) -> None:
    found = parity(cnn, cnn_artifact)
    assert found.off_by_n is not None and found.off_by_n <= 1
    assert found.sqnr_db > 40


def test_quantisation_is_the_programs_one_to_one(cnn: Program, cnn_artifact: Artifact) -> None:
    graph = cnn.exported("main", folded=True).graph_module.graph
    targets = [str(n.target) for n in graph.nodes]
    nodes = read_functions(cnn_artifact.file("model"))["main"]
    kinds = [n.kind for n in nodes]
    assert kinds.count("quantize") == sum("quantized_decomposed.quantize" in t for t in targets)
    weights = sum("dequantize_per_channel" in t for t in targets)
    assert kinds.count("constexpr_blockwise_shift_scale") >= weights > 0
    assert cnn_artifact.counts["float_ops"] == 0
    assert cnn_artifact.counts["layout_ops"] == 0


def test_int8_program_is_smaller_than_float(cnn: Program, cnn_artifact: Artifact, folder: Path) -> None:
    assert cnn.baseline is not None
    plain = convert(cnn.baseline, CoreMLOptions(), context(folder / "cnnf"))
    weights = [next(a.path.rglob("weight.bin")).stat().st_size for a in (cnn_artifact, plain)]
    assert weights[0] < 0.75 * weights[1]  # biases and the space between blobs stay as they are in so small a model
    assert "float_ops" not in plain.counts
    assert parity(cnn.baseline, plain).sqnr_db > 50


def test_two_builds_give_the_same_bytes(cnn: Program, cnn_artifact: Artifact, folder: Path) -> None:
    again = convert(cnn, CoreMLOptions(), context(folder / "cnn16-again"))
    assert digests(again.path) == digests(cnn_artifact.path)
    model = (cnn_artifact.file("model") / "Data" / "com.apple.CoreML" / "model.mlmodel").read_bytes()
    assert b"conversion_date" not in model


def test_manifest_names_what_is_there(cnn_artifact: Artifact) -> None:
    package = cnn_artifact.file("model")
    manifest = json.loads((package / "Manifest.json").read_text())
    assert manifest["rootModelIdentifier"] in manifest["itemInfoEntries"]
    for item in manifest["itemInfoEntries"].values():
        assert (package / "Data" / item["path"]).exists()
    assert sorted(p.name for p in package.iterdir()) == ["Data", "Manifest.json"]


def test_decoder_computes_the_golden_over_consecutive_steps(decoder: Program, decoder_artifact: Artifact) -> None:
    found = parity(decoder, decoder_artifact)
    assert found.sqnr_db > 50
    assert {row.output for row in found.rows} >= {"logits", "hidden", "k_0_out", "v_1_out"}


def test_signatures_are_functions_that_share_weights(decoder_artifact: Artifact) -> None:
    package = decoder_artifact.file("model")
    functions = read_functions(package)
    assert sorted(functions) == ["decode", "prefill"]
    int8 = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128) + 64 * 256  # the decoder's products
    size = next(package.rglob("weight.bin")).stat().st_size
    assert int8 < size < 1.5 * int8  # twice, if decode and prefill had weights of their own


def test_weights_stay_int8(decoder_artifact: Artifact) -> None:
    for nodes in read_functions(decoder_artifact.file("model")).values():
        assert sum(n.kind == "constexpr_blockwise_shift_scale" for n in nodes) == 2 * 7 + 1
    assert decoder_artifact.counts["float_ops"] == 0


def test_older_system_gets_a_package_per_signature(decoder: Program, folder: Path) -> None:
    surroundings = context(folder / "decoder17")
    options = CoreMLOptions(minimum_deployment_target="iOS17", kv_cache="inputs")
    artifact = convert(decoder, options, surroundings)
    names = [f.name for f in artifact.files if f.role == "model"]
    assert names == ["model-decode.mlpackage", "model-prefill.mlpackage"]
    assert any("one package per signature" in note for note in surroundings.log.notes)
    assert parity(decoder, artifact).sqnr_db > 50


def test_artifact_says_how_it_is_proven(cnn_artifact: Artifact) -> None:
    here = "executed" if sys.platform == "darwin" else "evaluated"
    assert cnn_artifact.proof == here
    assert cnn_artifact.proof_command == ("" if here == "executed" else "python -m edgec.prove BUNDLE/coreml")


def test_proof_command_passes(cnn_artifact: Artifact) -> None:
    command = [sys.executable, "-m", "edgec.prove", str(cnn_artifact.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("evaluated: cosine")


def test_proof_fails_when_the_outputs_are_others(
    cnn_artifact: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "coreml"
    shutil.copytree(cnn_artifact.path, copy)
    recording = Recording.load(copy / "recording.safetensors")
    recording.steps[1].outputs["logits"] += 1
    recording.save(copy / "recording.safetensors")
    assert main([str(copy)]) == 6
    assert "worst is `logits` of step 1" in capsys.readouterr().out


def test_missing_folder_is_a_usage_error(tmp_path: Path) -> None:
    assert main([str(tmp_path / "nothing")]) == 2


def test_activations_need_ios17(cnn: Program, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="iOS 17") as caught:
        convert(cnn, CoreMLOptions(minimum_deployment_target="iOS16"), context(tmp_path / "x"))
    assert caught.value.reason == Reason.UNSUPPORTED_SCHEME


def test_states_need_ios18(decoder: Program, tmp_path: Path) -> None:
    options = CoreMLOptions(minimum_deployment_target="iOS17", kv_cache="state")
    with pytest.raises(ConversionError, match="iOS 18"):
        convert(decoder, options, context(tmp_path / "x"))


def test_scale_that_float16_cannot_hold_is_reported(tmp_path: Path) -> None:
    import torch
    import torch.ao.quantization.fx._decomposed

    class Tiny(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ops = torch.ops.quantized_decomposed
            q = ops.quantize_per_tensor.default(x, 1e-6, 0, -128, 127, torch.int8)
            return ops.dequantize_per_tensor.default(q, 1e-6, 0, -128, 127, torch.int8)

    signature = Signature("main", (TensorSpec("x", (1, 4), "float32"),), (TensorSpec("y", (1, 4), "float32"),))
    x = np.array([[1e-6, 2e-6, -5e-6, 1e-5]], np.float32)
    program = torch_program(tmp_path / "p", Tiny(), (torch.from_numpy(x),), signature, [{"x": x}])
    surroundings = context(tmp_path / "c")
    convert(program, CoreMLOptions(), surroundings)
    assert any("scales are below" in w for w in surroundings.log.warnings)


def test_norm_of_large_activations_survives_float16(tmp_path: Path) -> None:
    """SmolLM2's residual stream reaches 24,600, whose square no float16 holds."""
    import torch

    class Norm(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)

    signature = Signature("main", (TensorSpec("x", (1, 64), "float32"),), (TensorSpec("y", (1, 64), "float32"),))
    x = np.random.default_rng(0).uniform(-25e3, 25e3, (1, 64)).astype(np.float32)
    program = torch_program(tmp_path / "p", Norm(), (torch.from_numpy(x),), signature, [{"x": x}])
    artifact = convert(program, CoreMLOptions(), context(tmp_path / "c"))
    assert parity(program, artifact).sqnr_db > 60
    trace = open_artifact(artifact).trace("main", {"x": x})  # type: ignore[attr-defined]
    assert max(float(np.abs(v).max()) for v in trace.values()) > 65504  # so float16 alone would not have done


def test_float_operation_in_an_int8_graph_is_counted() -> None:
    def node(kind: str, reads: tuple[str, ...], write: str) -> Node:
        return Node(kind, reads, (write,), {"x": reads})

    graph = [
        node("quantize", ("x",), "q"),
        node("dequantize", ("q",), "d"),
        node("const", (), "w"),
        node("conv", ("d", "w"), "c"),
        node("relu", ("c",), "r"),
        node("quantize", ("r",), "q2"),
        node("dequantize", ("q2",), "d2"),
        node("softmax", ("d2",), "s"),
    ]
    assert [n.kind for n in _float_arithmetic(graph)] == ["softmax"]
    graph[5] = node("identity", ("r",), "q2")
    assert [n.kind for n in _float_arithmetic(graph)] == ["conv", "relu", "softmax"]


def test_target_is_registered_with_its_tools() -> None:
    entry = get_target("coreml")
    tools = {t.name: t for t in entry.tools()}
    assert tools["coremltools"].version is not None
    assert not tools["Core ML runtime"].required
