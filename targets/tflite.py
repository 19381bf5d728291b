"""TFLite: one .tflite file for LiteRT on phones, through litert-torch.

All signatures share one file and its weights. INT8 programs keep the scales that the quantise pass fixed: static ones
through the graph's quantize and dequantize nodes, weight-only ones by writing our INT8 values and scales into the file
(tflite_weights.py). The file is checked afterwards: a layer silently left in float, a Flex or a custom operator is an
error.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from edgec.context import Context
from edgec.errors import ConversionError, Reason
from edgec.model import Artifact, Program, Runner, artifact_file
from edgec.registry import Options, Tool, register_target, suggest

FILE = "model.tflite"


class TfliteOptions(Options):
    """What the .tflite file may hold, and how it is examined."""

    allow_custom_ops: bool = Field(
        False, description="accept operators that need code beside LiteRT's own (custom ops, TensorFlow's Flex)"
    )
    channels_last: list[str] = Field(
        default_factory=list,
        description="inputs that the file takes as (batch, height, width, channels), as cameras and GPUs have them",
    )
    analyze_gpu: bool = Field(True, description="run TensorFlow's analyzer for the GPU delegate over the file")
    kernels: Literal["xnnpack", "reference"] = Field(
        "xnnpack", description="what parity and latency are measured with: XNNPACK, or LiteRT's reference kernels"
    )


def tools() -> list[Tool]:
    """The converter and the interpreter."""
    return [
        Tool.of_package("litert-torch", "converting"),
        Tool.of_package("ai-edge-litert", "running and examining .tflite files"),
    ]


def open_artifact(artifact: Artifact) -> Runner:
    """LiteRT over the artefact's file."""
    from .tflite_runner import TfliteRunner

    return TfliteRunner(artifact)


@register_target("tflite", tools=tools, open=open_artifact)
def convert(program: Program, options: TfliteOptions, context: Context) -> Artifact:
    """Convert every signature of `program` into `context.out/model.tflite`.

    Raises:
        ConversionError: unsupported-op, unsupported-scheme, or the converter's own failure.
    """
    from .tflite_convert import load_modules, to_flatbuffer
    from .tflite_counts import check_int8, count_ops, undelegated
    from .tflite_gpu import analyze
    from .tflite_schema import custom_ops, name_signature, read, share_buffers, write
    from .tflite_weights import stamp, to_float_weights

    _check_channels_last(program, options)
    scheme = program.quantization.scheme if program.quantization else "float"
    modules = load_modules(program)
    weights = to_float_weights([m for m, _ in modules.values()]) if scheme == "weight-only" else {}
    content = to_flatbuffer(
        modules,
        program.signatures,
        static_int8=scheme == "static",
        channels_last=frozenset(options.channels_last),
    )
    del modules

    model = read(content)
    for i, signature in enumerate(program.signatures):
        name_signature(
            model, i, signature.name, [t.name for t in signature.inputs], [t.name for t in signature.outputs]
        )
    if weights:
        stamp(model, weights)
    del weights
    if (custom := custom_ops(model)) and not options.allow_custom_ops:
        raise ConversionError(
            f"tflite: the file needs custom operators: {', '.join(custom)}",
            hint="set `allow_custom_ops: true` if the app's runtime has them, or rewrite that part of the model",
            reason=Reason.UNSUPPORTED_OP,
        )
    if program.quantization is not None:
        check_int8(model, program.quantization)
    share_buffers(model)
    path = context.out / FILE
    write(model, path)

    counts, by_name = count_ops(model, program.quantization)
    counts["custom_ops"] = len(custom)  # kinds; Flex operations are custom ones, too
    details: dict[str, Any] = {
        "kernels": options.kernels,
        "channels_last": options.channels_last,
        "report_ops": by_name,
    }
    if custom:
        details["report_custom_ops"] = custom
    else:
        left = undelegated(model, path)
        counts["undelegated_ops"] = sum(left.values())
        details["report_undelegated"] = left
        if left:
            context.note("XNNPACK leaves to LiteRT's own kernels: " + ", ".join(f"{n} {k}" for k, n in left.items()))
    if options.analyze_gpu:
        report = analyze(path, model)
        counts["gpu_incompatible_ops"] = report.total
        details["report_gpu"] = report.issues
        details["report_gpu_source"] = report.source
        if report.source == "rules":
            context.note(
                "the installed GPU analyzer passes any file: the delegate's published rules were applied instead"
            )
        if report.issues:
            context.note("the GPU delegate does not take: " + "; ".join(f"{n} × {k}" for k, n in report.issues.items()))
    artifact = Artifact(
        target="tflite",
        path=context.out,
        files=(artifact_file(context.out, FILE, "model"),),
        signatures=program.signatures,
        counts=counts,
        details=details,
    )
    artifact.save()
    return artifact


def _check_channels_last(program: Program, options: TfliteOptions) -> None:
    known = {t.name: t for s in program.signatures for t in s.inputs}
    for name in options.channels_last:
        if name not in known or len(known[name].shape) != 4:
            raise ConversionError(
                f"tflite: `channels_last` names `{name}`, which is no input with four dimensions{suggest(name, known)}",
                hint="inputs: " + ", ".join(f"{t.name} {list(t.shape)}" for t in known.values()),
                reason=Reason.BAD_OPTION,
            )
