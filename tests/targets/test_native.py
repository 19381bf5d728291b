"""The target native on a small decoder: what the bundle holds, and that the engine computes the program."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from edgec.targets.native import NativeOptions, convert, open_artifact, tools
from edgec.targets.native_runner import NativeRunner
from safetensors.numpy import load_file

from edgec.context import Context
from edgec.errors import ConversionError, ToolMissing
from edgec.golden import replay
from edgec.model import DECODER_FILE, Artifact, Program
from edgec.parity import compare
from edgec.registry import get_target
from edgec.runtime.compile import PLATFORMS, compiler, host
from edgec.runtime.locate import native_folder
from tests.targets.programs import BLOCK, BLOCKS, TABLE, decoder_config
from tests.tasks.tiny_lm import write_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def decoder(small_decoder: Program, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The decoder with the companions that the export adds for a language model."""
    folder = tmp_path_factory.mktemp("native") / "program"
    shutil.copytree(small_decoder.path, folder)
    companions = folder / "companions"
    companions.mkdir()
    write_tokenizer(companions)
    shape = {"block_size": BLOCK, "blocks": BLOCKS, "blocks_per_sequence": TABLE, "batch": 2, "chunk": 8}
    companion = {"architecture": decoder_config(2).to_dict(), "shape": shape}
    (companions / DECODER_FILE).write_text(json.dumps(companion))
    shutil.copytree(companions, folder / "float/companions")
    return Program.open(folder)


def build(program: Program, folder: Path, **options: object) -> Artifact:
    folder.mkdir(parents=True)
    context = Context(seed=0, threads=2, work=folder, recipe_dir=folder, cache=folder, out=folder)
    convert(program, NativeOptions.model_validate({"libraries": [host().name], "context": 64, **options}), context)
    return Artifact.open(folder)


@pytest.fixture(scope="module")
def artifact(decoder: Program, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return build(decoder, tmp_path_factory.mktemp("built") / "native")


@pytest.mark.parametrize("quantized", [True, False], ids=["int8", "float"])
def test_engine_computes_the_recorded_steps(decoder: Program, tmp_path: Path, quantized: bool) -> None:
    program = decoder if quantized else decoder.baseline
    assert program is not None
    steps = program.recording().steps
    outputs = replay(open_artifact(build(program, tmp_path / "native")), program.signatures, steps)
    state = {name for s in program.signatures for name in s.state_outputs}
    found = compare(outputs, [s.outputs for s in steps], {}, may_be_absent=state)
    assert found.cosine > (0.999 if quantized else 0.9999)  # the KV cache is INT8 in both


def test_every_kernel_set_gives_the_same_bits(decoder: Program, artifact: Artifact) -> None:
    steps = decoder.recording().steps
    runs = [
        replay(NativeRunner(artifact, threads=threads, kernel=kernel), decoder.signatures, steps)
        for threads, kernel in ((1, "scalar"), (1, None), (2, None))
    ]
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            assert all(np.array_equal(a[name], b[name]) for name in a)


def test_bundle_holds_what_an_app_needs(artifact: Artifact) -> None:
    names = {f.name for f in artifact.files}
    library = f"lib/{host().name}/{host().library}"
    assert {"model.safetensors", "tokenizer.json", "manifest.json", "runtime", library} <= names
    assert artifact.bytes == (artifact.path / "model.safetensors").stat().st_size
    for name in (
        "CMakeLists.txt",
        "include/edgec.h",
        "examples/chat.c",
        "bindings/swift/Edgec.swift",
        "src/engine.cpp",
    ):
        assert (artifact.path / "runtime" / name).is_file()
    assert native_folder(artifact.path) == artifact.path.resolve()


def test_manifest_has_the_digest_of_every_file(artifact: Artifact) -> None:
    manifest = json.loads((artifact.path / "manifest.json").read_text())
    listed = manifest["files"]
    there = {
        p.relative_to(artifact.path).as_posix()
        for p in artifact.path.rglob("*")
        if p.is_file() and p.name not in ("manifest.json", "artifact.json")
    }
    assert set(listed) == there
    for name, entry in listed.items():
        assert hashlib.sha256((artifact.path / name).read_bytes()).hexdigest() == entry["sha256"]
    assert manifest["eos"] == []
    assert manifest["defaults"]["context"] == 64


def test_weights_and_scales_are_the_quantise_pass_own(decoder: Program, artifact: Artifact) -> None:
    stored = load_file(artifact.path / "model.safetensors")
    state = decoder.exported("decode").state_dict
    weight = state["model.layers.1.mlp.down_proj.weight"].numpy()
    assert weight.dtype == np.int8
    assert np.array_equal(stored["layers.1.mlp.down_proj.weight"], weight)
    assert np.array_equal(stored["layers.1.mlp.down_proj.scale"], state["model.layers.1.mlp.down_proj.scale"].numpy())
    assert "lm_head.weight" not in stored  # tied


def test_two_conversions_give_the_same_bytes(decoder: Program, artifact: Artifact, tmp_path: Path) -> None:
    again = build(decoder, tmp_path / "native")
    for path in artifact.path.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (again.path / path.relative_to(artifact.path)).read_bytes(), path


def test_default_budget_is_enough_to_open(artifact: Artifact) -> None:
    from edgec.runtime import Engine, Sampling

    with Engine(artifact.path) as engine:
        assert len(engine.answer([[5, 6, 7]], Sampling(max_tokens=5, temperature=0.0))[0][0].tokens) == 5


def test_what_is_no_language_model_is_refused(small_cnn: Program, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="Llama"):
        build(small_cnn, tmp_path / "native")


def test_static_activations_are_refused(decoder: Program, tmp_path: Path) -> None:
    assert decoder.quantization is not None
    static = replace(decoder, quantization=replace(decoder.quantization, scheme="static"))
    with pytest.raises(ConversionError, match="static"):
        build(static, tmp_path / "native")


def test_a_model_without_tokenizer_is_refused(decoder: Program, tmp_path: Path) -> None:
    shutil.copytree(decoder.path, tmp_path / "program")
    (tmp_path / "program/companions/tokenizer.json").unlink()
    with pytest.raises(ConversionError, match=r"tokenizer\.json"):
        build(Program.open(tmp_path / "program"), tmp_path / "native")


def test_platforms_are_checked(decoder: Program, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="solaris"):
        build(decoder, tmp_path / "a", libraries=["solaris-sparc"])
    if missing := [p for p in PLATFORMS if compiler(p) is None]:
        with pytest.raises(ToolMissing, match=missing[0].name):
            build(decoder, tmp_path / "b", libraries=[missing[0].name])


def test_doctor_knows_the_compilers() -> None:
    listed = tools()
    assert listed[0].required
    assert host().name in listed[0].name
    assert not any(tool.required for tool in listed[1:])
    assert get_target("native").twin is False


def test_library_of_the_bundle_is_the_one_that_runs(artifact: Artifact) -> None:
    library = artifact.path / "lib" / host().name / host().library
    said = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True)
    assert "edgec_engine_create" in said.stdout
