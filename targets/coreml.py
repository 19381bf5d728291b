"""Core ML: an ML program (`.mlpackage`) for iOS, macOS, watchOS and tvOS.

Converted from the same ExportedProgram as every other target, through coremltools' own torch frontend. The quantise
pass's parameters become MIL's `quantize`, `dequantize` and `constexpr_blockwise_shift_scale` operations one to one;
nothing is calibrated again. Several signatures become functions of one package, which share their weights.

Core ML itself exists on Apple's systems only. There `open` runs the real runtime and the artefact is "executed";
elsewhere the saved package is evaluated operation by operation (mil_evaluator.py), the artefact is "evaluated", and
`proof_command` says what to run on a Mac. The artefact carries the recording that this needs.

A program with state (KV pools) is written in two forms: pools as inputs and outputs, and pools as Core ML states that
stay on the device between calls. Each is checked against the golden, because runtimes have broken one and not the
other (executorch#21855, coremltools#2639).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from edgec.context import Context
from edgec.errors import ConversionError, Reason
from edgec.golden import Recording, Step
from edgec.model import Artifact, ArtifactFile, Program, Runner, artifact_file
from edgec.registry import Options, Tool, register_target

MODEL, STATEFUL = "model.mlpackage", "stateful.mlpackage"
RECORDING = "recording.safetensors"


class CoreMLOptions(Options):
    """How the Core ML package is made."""

    minimum_deployment_target: Literal["iOS16", "iOS17", "iOS18", "iOS26"] = Field(
        "iOS18",
        description="the oldest system that must run it (macOS 13, 14, 15, 26 alike); INT8 activations need iOS17, "
        "states and several signatures in one package iOS18",
    )
    precision: Literal["float16", "float32"] = Field(
        "float16",
        description="what floats are computed in; the Neural Engine takes float16 only, float32 keeps a program on "
        "the CPU and the GPU. With float16 the mean of squares in a norm stays in float32: it overflows float16",
    )
    float32_operations: tuple[str, ...] = Field(
        (),
        description="with float16: further MIL operations that stay in float32, by type (`reduce_mean`) or name",
    )
    kv_cache: Literal["both", "inputs", "state"] = Field(
        "both",
        description="for a program with state: pools as inputs and outputs (`inputs`), as Core ML states (`state`), "
        "or one package of each, where the first is the model and the second an extra",
    )


def tools() -> list[Tool]:
    """coremltools converts anywhere; the runtime comes with macOS."""
    runtime = "with macOS" if sys.platform == "darwin" else None
    return [
        Tool.of_package("coremltools", "converting to Core ML", pin="==9.0"),
        Tool("Core ML runtime", runtime, "use a Mac", "running the package, not only evaluating it", required=False),
    ]


def open_artifact(artifact: Artifact) -> Runner:
    """Core ML where there is one, else the evaluator."""
    from .coreml_runner import open_package

    details = artifact.details
    stateful = details["form"] == "state"
    return open_package({s: artifact.path / p for s, p in details["packages"].items()}, artifact.signatures, stateful)


@register_target("coreml", tools=tools, open=open_artifact)
def convert(program: Program, options: CoreMLOptions, context: Context) -> Artifact:
    """Write the package (or packages), count their operations, check the stateful form.

    Raises:
        ConversionError: an operation or a scheme that Core ML lacks, with the source line it comes from.
        ParityError: the stateful form doesn't compute what the golden does.
    """
    from .coreml_counts import count_operations
    from .coreml_state import check_stateful

    _check_options(program, options)
    for signature in program.signatures:
        for name, least, greatest in signature.dynamic:
            context.warn(
                f"dimension `{name}` of `{signature.name}` is flexible ({least}–{greatest}): Core ML runs "
                "flexible shapes many times slower, off the Neural Engine; export one signature per fixed size instead"
            )
    forms = ["inputs"]
    if any(s.state for s in program.signatures) and options.kv_cache != "inputs":
        forms = ["state"] if options.kv_cache == "state" else ["inputs", "state"]
    packages = _write(program, options, context, forms)
    files: list[ArtifactFile] = []
    for form in forms:
        role = "model" if form == forms[0] else "stateful-model"
        files += [artifact_file(context.out, name, role) for name in sorted(set(packages[form].values()))]
    counts = count_operations({s: context.out / p for s, p in packages[forms[0]].items()}, program.quantization)
    if "state" in forms:
        paths = {s: context.out / p for s, p in packages["state"].items()}
        check_stateful(paths, program, context, strict=forms[0] != "state")
    _write_recording(program, context.out)
    files.append(artifact_file(context.out, RECORDING, "recording"))
    artifact = Artifact(
        target="coreml",
        path=context.out,
        files=tuple(files),
        signatures=program.signatures,
        counts=counts,
        details={
            "form": forms[0],
            "packages": packages[forms[0]],
            "stateful_packages": packages.get("state", {}),
            "output_steps": list(program.quantization.output_steps) if program.quantization else [],
            "report_precision": options.precision,
            "report_minimum_deployment_target": options.minimum_deployment_target,
        },
        proof="executed" if sys.platform == "darwin" else "evaluated",
        proof_command="" if sys.platform == "darwin" else "python -m edgec.prove BUNDLE/coreml",
    )
    artifact.save()
    return artifact


def _check_options(program: Program, options: CoreMLOptions) -> None:
    """What an older system can't have is refused, not left out."""
    system, scheme = options.minimum_deployment_target, program.quantization
    if scheme is not None and scheme.scheme == "static" and system == "iOS16":
        raise ConversionError(
            "coreml: INT8 activations need iOS 17, the recipe asks for iOS 16",
            hint="set `minimum_deployment_target: iOS17`, or quantise weights only",
            reason=Reason.UNSUPPORTED_SCHEME,
        )
    if options.kv_cache == "state" and system in ("iOS16", "iOS17"):
        raise ConversionError(
            f"coreml: states need iOS 18, the recipe asks for {system}",
            hint="set `minimum_deployment_target: iOS18`, or `kv_cache: inputs`",
            reason=Reason.UNSUPPORTED_SCHEME,
        )


def _write(program: Program, options: CoreMLOptions, context: Context, forms: list[str]) -> dict[str, dict[str, str]]:
    """Convert every signature in every form. Gives, by form, the package's name for each signature.

    One package with a function per signature from iOS 18 on; before that a package each, because only then can a
    package hold several functions.
    """
    from .coreml_convert import convert_signature, load_signature, small_scales
    from .coreml_package import join, save

    models: dict[str, dict[str, Any]] = {form: {} for form in forms}
    total = len(forms) * len(program.signatures)
    for i, signature in enumerate(program.signatures):
        exported = load_signature(program, signature)
        for j, form in enumerate(forms):  # "state" last: it edits the exported program
            context.progress(i * len(forms) + j, total, f"coreml: converting {signature.name}, {form}")
            model = convert_signature(exported, signature, options, form)
            for warning in small_scales(model):
                if warning not in context.log.warnings:
                    context.warn(warning)
            models[form][signature.name] = model
        del exported
    packages: dict[str, dict[str, str]] = {}
    separate = len(program.signatures) > 1 and options.minimum_deployment_target in ("iOS16", "iOS17")
    if separate:
        context.note(f"one package per signature, because {options.minimum_deployment_target} has no functions")
    for form in forms:
        name = MODEL if form == forms[0] else STATEFUL
        made = models.pop(form)
        if separate:
            packages[form] = {s: name.replace(".", f"-{s}.") for s in made}
            for s, model in made.items():
                save(model, context.out / packages[form][s], context.work)
        else:
            packages[form] = dict.fromkeys(made, name)
            save(join(made) if len(made) > 1 else next(iter(made.values())), context.out / name, context.work)
    return packages


def _write_recording(program: Program, out: Path) -> None:
    """The program's recording without state outputs (large, and implied by the others), for a proof elsewhere."""
    kept = {s.name: s.state_outputs for s in program.signatures}
    steps = [
        Step(s.signature, s.inputs, {k: v for k, v in s.outputs.items() if k not in kept[s.signature]})
        for s in program.recording().steps
    ]
    Recording(steps).save(out / RECORDING)
