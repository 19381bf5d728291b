"""`edgec reference`: an OpenAI-compatible server over the model itself, in PyTorch."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from edgec.cli.out import out
from edgec.cli.server_options import (
    AccessLogOption,
    AllowHostOption,
    ApiKeyOption,
    GraceOption,
    HostOption,
    MaxAnswersOption,
    MaxBodyOption,
    MaxTokensOption,
    MaxWaitingOption,
    NameOption,
    PortOption,
    run_server,
    take_address,
)

_ENGINE = "Engine"


def reference(
    model: Annotated[
        str,
        typer.Argument(
            help="A recipe; what `edgec build` made of one; a Hugging Face folder or a GGUF file; or any other "
            "reference that a recipe's `model:` takes.",
            metavar="MODEL_OR_RECIPE",
            show_default=False,
        ),
    ],
    weights: Annotated[
        Literal["float", "int8"],
        typer.Option("--weights", help="int8: as the recipe's `quantize` fixed them, so a difference is not theirs."),
    ] = "float",
    device: Annotated[
        str | None, typer.Option("--device", help="cpu, cuda, cuda:1 … [default: cuda where there is one]")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option("--dtype", help="Of weights and activations.")
    ] = "float32",
    kv: Annotated[
        Literal["float", "int8"],
        typer.Option("--kv", help="How keys and values are kept; int8: rounded as the native engine rounds them."),
    ] = "float",
    activations: Annotated[
        Literal["float", "int8"],
        typer.Option(
            "--activations",
            help="int8: rounded before each INT8 layer as the native engine does; needs --weights int8.",
        ),
    ] = "float",
    sha256: Annotated[
        str | None, typer.Option("--sha256", help="Of a MODEL that has to be downloaded.", show_default=False)
    ] = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    name: NameOption = None,
    api_key: ApiKeyOption = None,
    allow_host: AllowHostOption = None,
    context: Annotated[
        int,
        typer.Option(
            "--context",
            min=0,
            help="Positions that prompt and answer have together; 0: the model's.",
            rich_help_panel=_ENGINE,
        ),
    ] = 0,
    block_size: Annotated[
        int,
        typer.Option("--block-size", min=1, help="Tokens in a block of keys and values.", rich_help_panel=_ENGINE),
    ] = 16,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="For keys and values, for example `2 GB`. [default: 2 GiB, or 80 % of what is free on a GPU]",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    max_batch: Annotated[
        int, typer.Option("--max-batch", min=1, help="Sequences in a step.", rich_help_panel=_ENGINE)
    ] = 64,
    step_tokens: Annotated[
        int,
        typer.Option(
            "--step-tokens",
            min=1,
            help="Tokens in a step: longer prompts are taken in pieces, between which others go on.",
            rich_help_panel=_ENGINE,
        ),
    ] = 512,
    speculation: Annotated[
        Literal["off", "head", "ngram", "both"],
        typer.Option(
            "--speculation",
            help="Who proposes tokens that one pass then verifies, without loss: the recipe's draft head (needs "
            "--weights int8), n-grams of the text itself, or n-grams first.",
            rich_help_panel=_ENGINE,
        ),
    ] = "off",
    draft_length: Annotated[
        int, typer.Option("--draft-length", min=1, max=8, help="Tokens to propose.", rich_help_panel=_ENGINE)
    ] = 4,
    threads: Annotated[
        int,
        typer.Option("--threads", min=0, help="PyTorch's on the CPU; 0: its own choice.", rich_help_panel=_ENGINE),
    ] = 0,
    max_tokens: MaxTokensOption = None,
    max_answers: MaxAnswersOption = 64,
    max_body: MaxBodyOption = "4 MiB",
    max_waiting: MaxWaitingOption = 0,
    grace: GraceOption = 30.0,
    access_log: AccessLogOption = False,
) -> None:
    """Serve the model as PyTorch computes it, to hold an engine against: OpenAI's API, and /health, /metrics.

    It shares nothing but the HTTP layer with the runtime that bundles carry. SIGTERM and Ctrl-C let answers end.
    """
    out.interrupted = "interrupted"
    from edgec.errors import UsageError
    from edgec.reference.devices import choose_device
    from edgec.reference.options import ReferenceOptions
    from edgec.units import format_bytes, parse_bytes

    if activations == "int8" and weights != "int8":
        raise UsageError(
            "--activations int8 is about layers with INT8 weights, and --weights is float", hint="add --weights int8"
        )
    try:
        budget = parse_bytes(memory) if memory else None
    except ValueError as error:
        raise UsageError(f"--memory {memory}: {error}") from error
    options = ReferenceOptions(
        device=choose_device(device),
        dtype=dtype,
        kv=kv,
        activations=activations,
        block_size=block_size,
        memory=budget,
        max_batch=max_batch,
        step_tokens=step_tokens,
        context=context,
        max_waiting=max_waiting or ReferenceOptions.max_waiting,
        speculation=speculation,
        draft_length=draft_length,
    )
    where = take_address(
        host,
        port,
        api_key=api_key,
        allow_host=allow_host,
        max_tokens=max_tokens,
        max_answers=max_answers,
        max_body=max_body,
    )
    import torch

    from edgec.cli.progress import watch
    from edgec.reference.backend import ReferenceBackend
    from edgec.reference.load import load

    if threads:
        torch.set_num_threads(threads)
    with watch(out) as listener:
        loaded = load(model, weights=weights, sha256=sha256, listener=listener, note=out.progress)
    backend = ReferenceBackend(loaded, options, name)
    pool = backend.engine.description["memory"]["pools"]

    def about() -> str:
        info, room = backend.info, format_bytes(pool)
        return f"{info.name}: context {info.context}, {room} for keys and values, {info.engine}\n  {loaded.origin}"

    run_server(backend, where, grace=grace, access_log=access_log, about=about)
    backend.assert_whole()
