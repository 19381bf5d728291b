"""ONNX Runtime: the ONNX files themselves, their optimised form, and the ORT format for minimal builds.

Static INT8 stays quantize and dequantize nodes (QDQ), which every build of ONNX Runtime fuses for its own CPU. INT8
weights of language models become MatMulNBits with the same scales. Several signatures share one file of weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from edgec.context import Context
from edgec.errors import ConversionError
from edgec.model import Artifact, Program, Runner, artifact_file
from edgec.registry import Options, Tool, register_target

if TYPE_CHECKING:
    import onnx


class OnnxRuntimeOptions(Options):
    """What is made beside the models, and how they are run when they are measured."""

    level: Literal["disable", "basic", "extended", "all"] = Field(
        "all", description="graph optimisation level at which parity and latency are measured"
    )
    optimize: Literal["basic", "extended", "all"] = Field(
        "extended",
        description="level of the optimised file; `all` is for CPUs like this machine's only",
    )
    ort_format: bool = Field(True, description="also write the ORT format, which minimal builds of the runtime load")
    weight_kernels: Literal["matmulnbits", "qdq"] = Field(
        "matmulnbits", description="what multiplies by INT8 weights when activations are float"
    )
    x64_precision: bool = Field(
        True,
        description="run with session.x64quantprecision, without which static INT8 saturates on x86 CPUs without VNNI",
    )


def tools() -> list[Tool]:
    """The runtime, which also optimises, and the library that reads and writes ONNX."""
    return [
        Tool.of_package("onnxruntime", "optimising and running ONNX models"),
        Tool.of_package("onnx", "reading and writing ONNX models"),
    ]


def open_artifact(artifact: Artifact) -> Runner:
    """ONNX Runtime on CPU over the artefact's models."""
    from .onnxruntime_runner import OrtRunner

    return OrtRunner(artifact)


@register_target("onnxruntime", tools=tools, open=open_artifact)
def convert(program: Program, options: OnnxRuntimeOptions, context: Context) -> Artifact:
    """Copy, repair and optimise every signature's model into `context.out`.

    Raises:
        ConversionError: unsupported-scheme (per-channel INT8 below opset 13), or ONNX Runtime refuses a model.
    """
    import onnx

    from .onnxruntime_graph import check_opset, count_ops, in_place_state, save, unshare_parameters
    from .onnxruntime_nbits import to_matmul_nbits

    out = context.out
    weight_only = program.quantization is not None and program.quantization.scheme == "weight-only"
    models: dict[str, onnx.ModelProto] = {}
    in_place: dict[str, list[str]] = {}
    rewritten = 0
    for signature in program.signatures:
        model = onnx.load(str(program.onnx_path(signature.name)))
        check_opset(model, signature.name, program.quantization)
        in_place[signature.name] = in_place_state(model, signature.state)
        if weight_only and options.weight_kernels == "matmulnbits":
            rewritten += to_matmul_nbits(model)
        else:
            unshare_parameters(model)
        models[signature.name] = model
    if rewritten:
        context.note(f"{rewritten} products read INT8 weights through MatMulNBits")
    files = [artifact_file(out, name, "model") for name in save(models, out)]
    del models
    paths = {s.name: out / f"{s.name}.onnx" for s in program.signatures}

    optimized = _optimize(paths, out / "optimized", options.optimize)
    counts, by_name = count_ops(optimized, program.quantization)
    files += [artifact_file(out, f"optimized/{n}", "optimized") for n in save(optimized, out / "optimized")]
    del optimized
    if options.ort_format:
        files += [artifact_file(out, f"ort/{n}", "ort") for n in _to_ort(paths, out / "ort", options.optimize)]
    details: dict[str, Any] = {
        "models": {s.name: f"{s.name}.onnx" for s in program.signatures},
        "in_place": in_place,
        "level": options.level,
        "precise": options.x64_precision,
        "report_ops": by_name,
        "report_optimized_for": "this machine's CPU" if options.optimize == "all" else "any CPU",
    }
    artifact = Artifact("onnxruntime", out, tuple(files), program.signatures, counts, details)
    if program.quantization is not None and program.quantization.scheme == "static":
        plain, precise = _error(artifact, program, precise=False), _error(artifact, program, precise=True)
        details["report_error_without_x64_precision"] = plain
        if plain > 2 * precise:  # rounding alone differs by a few steps either way; saturation by many times that
            context.warn(
                "this machine's INT8 kernels saturate without session.x64quantprecision=1 (relative error "
                f"{plain:.2g} instead of {precise:.2g}); Arm CPUs, and x86 CPUs with VNNI, do not"
            )
    artifact.save()
    return artifact


def _optimize(paths: dict[str, Path], folder: Path, level: str) -> dict[str, onnx.ModelProto]:
    """The models after ONNX Runtime's graph optimisations, loaded with their weights."""
    import onnx

    folder.mkdir()
    models = {}
    for name, path in paths.items():
        written = folder / f"{name}.onnx"
        _session_that_saves(path, written, level)
        models[name] = onnx.load(str(written))
        for leftover in folder.iterdir():
            leftover.unlink()
    return models


def _to_ort(paths: dict[str, Path], folder: Path, level: str) -> list[str]:
    from .onnxruntime_ort import write_ort
    from .onnxruntime_runner import LEVELS

    folder.mkdir()
    for name, path in paths.items():
        write_ort(path.parent, path.name, f"{folder.name}/{name}.ort", LEVELS[level])
    return [f"{name}.ort" for name in paths]


def _session_that_saves(path: Path, written: Path, level: str) -> None:
    import onnxruntime as ort

    from .onnxruntime_runner import session_options

    options = session_options(level, precise=False, threads=1)
    options.optimized_model_filepath = str(written)
    # Beyond protobuf's 2 GB there is no other way to write the weights.
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "raw.bin")
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    try:
        ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # pybind raises a dozen classes of its own
        raise ConversionError(
            f"onnxruntime: {path.name} is refused: {str(error).strip().splitlines()[0][:300]}",
            hint="the model as exported does run (it is the golden), so this is a rewrite's fault: please report it",
        ) from error


def _error(artifact: Artifact, program: Program, *, precise: bool) -> float:
    """The worst relative error of the artefact at level `all`; an app that sets no option isn't `precise`."""
    from edgec.golden import replay
    from edgec.parity import compare

    from .onnxruntime_runner import OrtRunner

    steps = program.recording().steps
    got = replay(OrtRunner(artifact, level="all", precise=precise), program.signatures, steps)
    return float(compare(got, [s.outputs for s in steps], {}).relative_error)
