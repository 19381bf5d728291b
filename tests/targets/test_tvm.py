"""The target tvm on the tiny Programs: parity, INT8 weights on disk, bytes that repeat, pools, other machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgec.targets import tvm as target
from edgec.targets import tvm_build

from edgec.context import Context
from edgec.errors import ConversionError, RecipeError, ToolMissing
from edgec.golden import replay, zero_state
from edgec.model import Artifact, Program, Signature, TensorSpec
from edgec.parity import compare
from tests.targets.programs import cnn_program, decoder_program

slow = pytest.mark.slow
HOST_ONLY = {"triples": ["host"]}


def build(program: Program, folder: Path, **options: Any) -> tuple[Artifact, Context]:
    context = _context(folder)
    artifact = target.convert(program, target.TvmOptions.model_validate(options or HOST_ONLY), context)
    return Artifact.open(artifact.path), context


def _context(folder: Path) -> Context:
    out, work = folder / "artifact", folder / "work"
    out.mkdir(parents=True)
    work.mkdir()
    return Context(seed=0, threads=2, work=work, recipe_dir=folder, cache=folder / "cache", out=out)


@pytest.fixture(scope="module")
def cnn(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return cnn_program(tmp_path_factory.mktemp("cnn"))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return decoder_program(tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def cnn_artifact(cnn: Program, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return build(cnn, tmp_path_factory.mktemp("cnn-tvm"))[0]


@pytest.fixture(scope="module")
def decoder_artifact(decoder: Program, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return build(decoder, tmp_path_factory.mktemp("decoder-tvm"))[0]


def _arrays(artifact: Artifact) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(artifact.path / target.PARAMS)


@slow
def test_static_int8_gives_the_golden_step_for_step(cnn: Program, cnn_artifact: Artifact) -> None:
    recording = cnn.recording()
    outputs = replay(target.open_artifact(cnn_artifact), cnn.signatures, recording.steps)
    assert cnn.quantization is not None
    parity = compare(outputs, [s.outputs for s in recording.steps], dict(cnn.quantization.output_steps))
    assert parity.off_by_n == 0


@slow
def test_decoder_agrees_over_interleaved_steps_in_shared_pools(decoder: Program, decoder_artifact: Artifact) -> None:
    recording = decoder.recording()
    outputs = replay(target.open_artifact(decoder_artifact), decoder.signatures, recording.steps)
    assert set(recording.steps[-1].outputs) == set(outputs[-1]), "the last step's pools are compared too"
    parity = compare(outputs, [s.outputs for s in recording.steps], {})
    assert parity.relative_error < 1e-5


@slow
def test_a_layer_is_stored_once_and_in_int8(decoder: Program, decoder_artifact: Artifact) -> None:
    arrays = _arrays(decoder_artifact)
    assert decoder.quantization is not None
    weights = [a for a in arrays.values() if a.dtype == np.int8]
    layers = [layer.name for layer in decoder.quantization.layers]
    assert {"embed_tokens", "lm_head"} <= set(layers), "these two are tied: one array serves both"
    assert len(weights) == len(layers) - 1
    functions = decoder_artifact.details["functions"]
    int8 = {n for n, a in arrays.items() if a.dtype == np.int8}
    assert int8 <= set(functions["decode"]["params"]) and int8 <= set(functions["prefill"]["params"])
    assert {f.role for f in decoder_artifact.files if f.name == target.PARAMS} == {"model"}


@slow
def test_static_int8_keeps_every_weight_in_int8(cnn: Program, cnn_artifact: Artifact) -> None:
    arrays = _arrays(cnn_artifact).values()
    assert cnn.quantization is not None
    assert sum(a.dtype == np.int8 for a in arrays) == len(cnn.quantization.layers)
    assert sum(a.nbytes for a in arrays if a.dtype == np.float32) < sum(a.nbytes for a in arrays if a.dtype == np.int8)


@slow
def test_two_builds_give_the_same_bytes(cnn: Program, cnn_artifact: Artifact, tmp_path: Path) -> None:
    again, _ = build(cnn, tmp_path)
    for file in cnn_artifact.files:
        assert (again.path / file.name).read_bytes() == (cnn_artifact.path / file.name).read_bytes(), file.name


@slow
def test_no_path_of_this_machine_is_in_the_library(cnn_artifact: Artifact) -> None:
    library = (cnn_artifact.path / "model.so").read_bytes()
    assert str(cnn_artifact.path.parent).encode() not in library
    assert b"/tmp/" not in library


@slow
def test_one_transpose_for_a_whole_cnn(cnn_artifact: Artifact) -> None:
    """litert-torch#179 for TVM: only the input is turned to channels last; no convolution brings its own."""
    assert cnn_artifact.counts["layout_ops"] == 1


@slow
def test_float_arithmetic_of_an_int8_model_is_counted(cnn_artifact: Artifact) -> None:
    assert cnn_artifact.counts["float_ops"] == cnn_artifact.counts["ops"] > 0


@slow
def test_pools_are_updated_in_place_and_the_callers_arrays_are_not(
    decoder: Program, decoder_artifact: Artifact
) -> None:
    runner = target.open_artifact(decoder_artifact)
    steps = decoder.recording().steps
    signature = decoder.signature("prefill")
    zeros = zero_state(signature)
    first = runner.run("prefill", steps[0].inputs | zeros)
    assert not any(array.any() for array in zeros.values())
    state = {name: first[out] for name, out in signature.state}
    assert state["k_0"].any()
    second = runner.run("prefill", steps[1].inputs | state)
    assert np.shares_memory(second["k_0_out"], state["k_0"])


@slow
def test_a_slot_outside_the_pool_changes_nothing(decoder: Program, decoder_artifact: Artifact) -> None:
    runner = target.open_artifact(decoder_artifact)
    inputs = dict(decoder.recording().steps[0].inputs)
    inputs["slot_mapping"] = np.full_like(inputs["slot_mapping"], 10_000)
    outputs = runner.run("prefill", inputs | zero_state(decoder.signature("prefill")))
    assert not outputs["k_0_out"].any() and np.isfinite(outputs["logits"]).all()


@slow
def test_a_triple_without_linker_leaves_object_files(cnn: Program, tmp_path: Path) -> None:
    artifact, context = build(cnn, tmp_path, triples=["host", "aarch64-linux-android"], verify_cross=False)
    objects = [f.name for f in artifact.files if f.role == "cross"]
    assert objects and all(name.endswith(".o") for name in objects)
    assert (artifact.path / objects[0]).read_bytes()[18:20] == b"\xb7\x00", "ELF machine 183 is AArch64"
    assert any("no linker for aarch64-linux-android" in note for note in context.log.notes)


@slow
def test_an_unproven_aarch64_library_is_said_to_be_so(
    cnn: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgec.targets import tvm_cross

    monkeypatch.setattr(tvm_cross, "qemu", lambda: None)
    artifact, context = build(cnn, tmp_path, triples=["host", "aarch64-linux-gnu"])
    library = artifact.details["report_libraries"][1]
    assert library["proof"] == "none"
    assert any("unproven" in warning and "qemu" in warning for warning in context.log.warnings)


@slow
@pytest.mark.parametrize(
    ("name", "cpu", "named"), [("bogus-linux-gnu", None, "bogus"), ("host", "bogus-cpu", "bogus-cpu")]
)
def test_an_unknown_architecture_or_cpu_is_an_error_of_the_recipe(name: str, cpu: str | None, named: str) -> None:
    """LLVM by itself ends the process for the one and silently compiles for another CPU for the other."""
    with pytest.raises(RecipeError, match=f"`{named}`"):
        tvm_build.machine(name, cpu).target()


def test_missing_arm_linker_fails_only_a_recipe_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    here = target.linker
    monkeypatch.setattr(tvm_build, "linker", lambda name: None if name == tvm_build.AARCH64 else here(name))
    monkeypatch.setattr(target, "_llvm", lambda: "22")
    with pytest.raises(ToolMissing) as caught:
        target.check_tools(target.TvmOptions.model_validate({"triples": ["host", "aarch64-linux-gnu"]}))
    assert caught.value.hint == "apt-get install g++-aarch64-linux-gnu"
    machines = target.check_tools(target.TvmOptions())
    assert [m.linker is None for m in machines] == [False, True]


def test_tvm_without_llvm_stops_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """tvm#17238, at the target: nothing is imported or converted first."""
    monkeypatch.setattr(target, "_llvm", lambda: None)
    with pytest.raises(ToolMissing, match="LLVM"):
        target.check_tools(target.TvmOptions())
    assert [t.name for t in target.tools() if t.required and t.version is None] == ["LLVM in TVM"]


@slow
def test_an_unknown_operation_is_named_with_its_node(tmp_path: Path) -> None:
    import onnx
    from edgec.targets.tvm_import import import_onnx
    from onnx import TensorProto, helper

    node = helper.make_node("Det", ["x"], ["y"], name="determinant")
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [2, 2]), ("y", []))]
    graph = helper.make_graph([node], "g", ports[:1], ports[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "m.onnx")
    with pytest.raises(ConversionError, match=r"Det \(node `determinant`\)") as caught:
        import_onnx({"main": tmp_path / "m.onnx"}, {})
    assert caught.value.reason == "unsupported-op" and caught.value.hint


@slow
def test_a_dynamic_dimension_is_warned_about_and_runs_at_every_size(tmp_path: Path) -> None:
    """coremltools#2370 for TVM: what flexible shapes cost is said, and least, middle and greatest size are right."""
    import torch

    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval()
    batch = torch.export.Dim("batch", min=1, max=8)
    exported = torch.export.export(module, (torch.randn(3, 8),), dynamic_shapes=({0: batch},))
    torch.export.save(exported, tmp_path / "main.pt2")
    x, y = TensorSpec("x", ("batch", 8), "float32"), TensorSpec("y", ("batch", 4), "float32")
    signature = Signature("main", (x,), (y,), dynamic=(("batch", 1, 8),))
    artifact, context = build(Program(tmp_path, (signature,), None, "tensors", 21, 212), tmp_path / "out")
    assert any("batch (1 to 8)" in warning for warning in context.log.warnings)
    runner = target.open_artifact(artifact)
    for size in (1, 3, 8):
        data = np.random.default_rng(size).standard_normal((size, 8)).astype(np.float32)
        expected = module(torch.from_numpy(data)).detach().numpy()
        np.testing.assert_allclose(runner.run("main", {"x": data})["y"], expected, rtol=1e-5, atol=1e-6)
