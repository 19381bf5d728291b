"""What `inspect` says of Core ML, GGUF, safetensors, libraries and edgec's own folders."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from edgec.errors import Reason, SourceError
from edgec.inspection.elf import read_library
from edgec.inspection.facts import Port, Quantized, Weights
from edgec.inspection.inspect import inspect_path
from edgec.model import Artifact, Program, Signature, TensorSpec, artifact_file
from tests.onnx_samples import chain


def test_safetensors_by_dtype(tmp_path: Path) -> None:
    save_file({"a": np.zeros((2, 3), np.float32), "b": np.zeros(5, np.int8)}, tmp_path / "a.safetensors")
    found = inspect_path(tmp_path / "a.safetensors")
    assert found.weights == (Weights("float32", 1, 6, 24), Weights("int8", 1, 5, 5))


def test_gguf_blocks_and_metadata(tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(20)])
    kind = GGMLQuantizationType.Q8_0
    writer.add_tensor("w", quantize(np.ones((4, 64), np.float32), kind), raw_dtype=kind)
    writer.add_tensor("n", np.ones(7, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = inspect_path(tmp_path / "a.gguf")
    assert found.weights == (Weights("Q8_0", 1, 256, 272), Weights("F32", 1, 7, 28))
    assert found.quantized == (Quantized("weights", "Q8_0", "per block of 32", 1, 256, None, None),)
    assert found.metadata["llama.block_count"] == "3"
    assert found.metadata["tokenizer.ggml.tokens"] == "[20 values]"
    whole = (tmp_path / "a.gguf").read_bytes()
    for length in range(0, len(whole) - 4, 13):
        (tmp_path / "a.gguf").write_bytes(whole[:length])
        with pytest.raises(SourceError) as caught:
            inspect_path(tmp_path / "a.gguf")
        assert caught.value.reason == Reason.BAD_CHECKPOINT, length


COREML = """
import sys
import coremltools as ct, numpy as np
import coremltools.optimize.coreml as cto
from coremltools.converters.mil import Builder as mb

@mb.program(input_specs=[mb.TensorSpec(shape=(1, 64))], opset_version=ct.target.iOS18)
def program(x):
    weight = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
    return mb.relu(x=mb.linear(x=x, weight=weight, bias=np.ones(32, np.float32)), name="y")

model = ct.convert(program, minimum_deployment_target=ct.target.iOS18, skip_model_load=True,
                   compute_precision=ct.precision.FLOAT32)
model.save(sys.argv[1] + "/float.mlpackage")
config = cto.OptimizationConfig(global_config=cto.OpLinearQuantizerConfig(mode="linear_symmetric", weight_threshold=64))
cto.linear_quantize_weights(model, config).save(sys.argv[1] + "/int8.mlpackage")
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coreml")
    subprocess.run([sys.executable, "-c", COREML, str(folder)], check=True, capture_output=True, timeout=300)
    return folder


@pytest.mark.slow
def test_a_core_ml_package(packages: Path) -> None:
    found = inspect_path(packages / "float.mlpackage")
    (graph,) = found.graphs
    assert graph.inputs == (Port("x", (1, 64), "float32"),)
    assert [(o.name, o.dtype) for o in graph.outputs] == [("y", "float32")]
    assert graph.ops == {"linear": 1, "relu": 1}
    assert found.weights == (Weights("float32", 2, 32 * 64 + 32, 4 * (32 * 64 + 32)),)
    assert found.quantized == ()


@pytest.mark.slow
def test_a_core_ml_package_with_int8_weights(packages: Path) -> None:
    (quantized,) = inspect_path(packages / "int8.mlpackage").quantized
    assert (quantized.what, quantized.dtype, quantized.granularity) == ("weights", "int8", "per channel")
    assert quantized.parameters == 32 * 64
    weights = np.random.default_rng(0).normal(size=(32, 64))  # as in COREML; one scale per row: its greatest / 127
    assert quantized.greatest_scale == pytest.approx(np.abs(weights).max() / 127, rel=1e-3)


@pytest.mark.slow
def test_a_damaged_core_ml_package(packages: Path, tmp_path: Path) -> None:
    for spoil in ("Manifest.json", "Data/com.apple.CoreML/model.mlmodel", "Data/com.apple.CoreML/weights/weight.bin"):
        copy = tmp_path / "copy.mlpackage"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(packages / "float.mlpackage", copy)
        data = (copy / spoil).read_bytes()
        (copy / spoil).write_bytes(data[: len(data) // 3 if "weight" not in spoil else 10])
        with pytest.raises(SourceError) as caught:
            inspect_path(copy)
        assert caught.value.reason == Reason.BAD_CHECKPOINT, spoil


@pytest.mark.slow
def test_reading_core_ml_loads_no_framework(packages: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from edgec.inspection.inspect import inspect_path; "
        f"inspect_path(Path({str(packages / 'float.mlpackage')!r})); "
        "print([m for m in ('tensorflow', 'torch', 'coremltools') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def library(folder: Path, *functions: str) -> Path:
    source = folder / "lib.c"
    source.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in functions))
    path = folder / "lib.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(path), str(source)], check=True)
    return path


def test_kernels_of_a_tvm_library_are_counted_by_what_they_fuse(tmp_path: Path) -> None:
    path = library(
        tmp_path, "__tvm_ffi_fused_conv2d_relu", "__tvm_ffi_fused_conv2d_relu1", "__tvm_ffi_matmul", "helper"
    )
    found = inspect_path(path)
    assert found.graphs[0].ops == {"fused_conv2d_relu": 2, "matmul": 1}
    assert found.metadata["container"] == "ELF"


def test_another_library_is_no_tvm_library(tmp_path: Path) -> None:
    path = library(tmp_path, "helper")
    assert "helper" in read_library(path).symbols
    with pytest.raises(SourceError, match="exports no TVM function"):
        inspect_path(path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(SourceError) as caught:
        inspect_path(path)
    assert caught.value.reason == Reason.BAD_CHECKPOINT


def folders(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A program, and a bundle with one artefact in it."""
    signature = Signature(
        "main", (TensorSpec("image", (1, 3, 8, 8), "float32"),), (TensorSpec("logits", (1, 5), "float32"),)
    )
    program = Program(tmp_path / "program", (signature,), None, "tensors", 21, 832)
    program.path.mkdir()
    chain(program.onnx_path("main"))
    program.save()
    bundle = tmp_path / "bundle"
    (bundle / "onnxruntime").mkdir(parents=True)
    chain(bundle / "onnxruntime/model.onnx")
    file = artifact_file(bundle / "onnxruntime", "model.onnx", "model")
    Artifact("onnxruntime", bundle / "onnxruntime", (file,), (signature,), {"ops": 6}).save()
    (bundle / "bundle.json").write_text(json.dumps({"name": "sample", "targets": {"onnxruntime": {}}}))
    return program.path, bundle, bundle / "onnxruntime"


def test_edgecs_own_folders(tmp_path: Path) -> None:
    program, bundle, artifact = folders(tmp_path)
    found = inspect_path(program)
    assert found.format == "program"
    assert found.graphs[0].ops["Conv"] == 2
    assert found.metadata["parameters"] == "832"
    found = inspect_path(artifact)
    assert (found.format, found.metadata["ops"], len(found.parts)) == ("artifact", "6", 1)
    found = inspect_path(bundle)
    assert [p.format for p in found.parts] == ["artifact"]
    assert found.to_dict()["parts"][0]["parts"][0]["format"] == "onnx"


@pytest.mark.parametrize(
    ("name", "text"),
    [(n, t) for n in ("program.json", "artifact.json", "bundle.json") for t in ("", "{", "[]")]
    + [("program.json", "{}"), ("artifact.json", "{}")],
)
def test_a_damaged_description_is_one_clear_error(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SourceError) as caught:
        inspect_path(tmp_path)
    assert caught.value.reason == Reason.BAD_CHECKPOINT


def test_formats_are_told_by_content_where_the_name_says_nothing(tmp_path: Path) -> None:
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "a.safetensors")
    (tmp_path / "a.safetensors").rename(tmp_path / "weights")
    assert inspect_path(tmp_path / "weights").format == "safetensors"


@pytest.mark.parametrize(
    "name", ["a.txt", "a.onnx", "a.tflite", "a.so", "a.gguf", "a.safetensors", "a.mlmodel", "a.ort"]
)
def test_garbage_under_any_name_is_refused(tmp_path: Path, name: str) -> None:
    for content in (b"", b"garbage", bytes(range(256)) * 40):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SourceError) as caught:
            inspect_path(tmp_path / name)
        assert caught.value.reason == Reason.BAD_CHECKPOINT


def test_rendering_shows_what_was_found(tmp_path: Path) -> None:
    from rich.console import Console

    from edgec.inspection.render import render

    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render(inspect_path(folders(tmp_path)[1])))
    text = console.export_text()
    for word in ("Conv × 2", "1 × 3 × 8 × 8", "quantised: nothing", "832"):
        assert word in text
