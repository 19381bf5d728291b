"""`edgec validate`: hold a bundle's engines against an independent reference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgec.cli.options import JsonOption
from edgec.cli.out import out

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from edgec.report.validation import Validation
    from edgec.validation.options import ValidateOptions
    from edgec.validation.subjects import Reference, Subject

TARGETS = ("native", "onnxruntime", "tflite", "tvm")
_REFERENCE, _LIMITS = "Reference", "Limits"


def validate(
    bundle: Annotated[
        Path,
        typer.Argument(help="What `edgec build` made: its output folder, or the bundle.", metavar="BUNDLE"),
    ],
    target: Annotated[
        list[str] | None,
        typer.Option("--target", "-t", help="native, onnxruntime, tflite, tvm or all; may be given again."),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference", metavar="URL", help="An OpenAI-compatible server instead.", rich_help_panel=_REFERENCE
        ),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", help="Where the reference computes: cpu or cuda.", rich_help_panel=_REFERENCE)
    ] = "cpu",
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="What the reference is made of: a recipe or another bundle. [default: what the bundle was made of]",
            rich_help_panel=_REFERENCE,
        ),
    ] = None,
    served_name: Annotated[
        str | None,
        typer.Option("--name", help="The model's name at the server. [default: its first]", rich_help_panel=_REFERENCE),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key", envvar="EDGEC_API_KEY", show_envvar=True, help="Of the server.", rich_help_panel=_REFERENCE
        ),
    ] = None,
    float_reference: Annotated[
        bool,
        typer.Option(
            "--float/--no-float", help="Also report the distance from the float weights.", rich_help_panel=_REFERENCE
        ),
    ] = True,
    text: Annotated[
        Path | None, typer.Option("--text", help="A text to score, UTF-8. [default: the recipe's evaluation text]")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of it, at least.")] = 5000,
    window: Annotated[int, typer.Option("--window", min=8, help="Positions of a piece of the text.")] = 512,
    prompts: Annotated[int, typer.Option("--prompts", min=1, max=64, help="Prompts to answer.")] = 8,
    answer: Annotated[int, typer.Option("--answer", min=2, help="Tokens of an answer.")] = 48,
    samples: Annotated[int, typer.Option("--samples", min=0, help="Tokens drawn after each prompt.")] = 64,
    max_kl: Annotated[
        float | None, typer.Option("--max-kl", help="Mean KL, nats a token.", rich_help_panel=_LIMITS)
    ] = None,
    max_kl_p99: Annotated[
        float | None, typer.Option("--max-kl-p99", help="Its 99th percentile.", rich_help_panel=_LIMITS)
    ] = None,
    min_top1: Annotated[
        float | None, typer.Option("--min-top1", help="Share of equal likeliest tokens.", rich_help_panel=_LIMITS)
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(
            "--require", metavar="CHECK", help="This check must not end as unproven; or `all`.", rich_help_panel=_LIMITS
        ),
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=0, max=256, help="Of the native engine.")] = 0,
    kernel: Annotated[str | None, typer.Option("--kernel", help="Kernels of the native engine.")] = None,
    junit: Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML there.")] = None,
    json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Hold a bundle's engines against an independent reference: their logits, their answers, their scheduler."""
    out.json, out.quiet = json, quiet
    out.interrupted = "interrupted; nothing was changed"
    from edgec.validation.bundles import open_bundle

    opened = open_bundle(bundle)
    options = _options(
        targets=opened.chosen(target or []),
        tokens=tokens,
        window=window,
        prompts=prompts,
        answer=answer,
        samples=samples,
        float_reference=float_reference,
        limits={"kl": max_kl, "kl_p99": max_kl_p99, "top1": min_top1},
        require=require or [],
    )
    notes: list[str] = []

    def note(line: str) -> None:
        if line not in notes:
            notes.append(line)
            out.progress(line)

    from edgec.validation.models import LoadedModels
    from edgec.validation.validate import References, conclude
    from edgec.validation.validate import validate as run

    server: Reference | None = None
    if reference is not None:
        from edgec.validation.server import ServerReference

        server = ServerReference(reference, opened.tokenizer, name=served_name, api_key=api_key, note=note)
    else:
        from edgec.validation.reference_subject import check_device

        check_device(device)
    openers: Mapping[str, Callable[[], Subject]] = {
        name: opened.opener(name, threads=threads, kernel=kernel) for name in options.targets
    }
    given, where = opened.read_text(text)
    references = References(
        LoadedModels(model or opened.folder, opened.store, note), options, device=device, server=server, note=note
    )
    try:
        document = run(openers, references, given, options, text=where, progress=out.progress)
    finally:
        references.close()
    document.bundle, document.name, document.notes = str(bundle), opened.name, notes
    error = conclude(document)
    _show(document, junit)
    if error is not None:
        out.error(error)
        raise typer.Exit(int(error.exit_code))


def _options(*, limits: dict[str, float | None], require: list[str], **values: Any) -> ValidateOptions:
    from typing import get_args

    from pydantic import ValidationError

    from edgec.errors import UsageError
    from edgec.registry import suggest
    from edgec.validation.options import CheckName, ValidateOptions

    known = get_args(CheckName)
    if require == ["all"]:
        require = list(known)
    for name in require:
        if name not in known:
            raise UsageError(
                f"--require {name}: no such check{suggest(name, known)}", hint=f"checks: {', '.join(known)}, or all"
            )
    given = {name: value for name, value in limits.items() if value is not None}
    try:
        return ValidateOptions.model_validate(
            {**values, "require": require, "limits": dict.fromkeys(values["targets"], given) if given else {}}
        )
    except ValidationError as error:
        first = error.errors()[0]
        names = {"kl": "--max-kl", "kl_p99": "--max-kl-p99", "top1": "--min-top1"}
        name = names.get(str(first["loc"][-1]), f"--{first['loc'][-1]}")
        text = first["msg"].removeprefix("Value error, ")
        raise UsageError(f"{name}: {text[:1].lower()}{text[1:]}") from error


def _show(document: Validation, junit: Path | None) -> None:
    from edgec.errors import UsageError
    from edgec.report.validation_views import render_validation, render_validation_junit

    if junit is not None:
        try:
            junit.parent.mkdir(parents=True, exist_ok=True)
            junit.write_text(render_validation_junit(document), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--junit {junit}: can't be written: {error.strerror}") from error
    out.document(document.to_json())
    out.show(render_validation(document))
