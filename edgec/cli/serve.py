"""`edgec serve`: an OpenAI-compatible server over a bundle."""

from __future__ import annotations

from typing import Annotated

import typer

from edgec.cli.engine_options import (
    BatchOption,
    BundleArgument,
    ContextOption,
    KernelOption,
    KvOption,
    MemoryOption,
    ThreadsOption,
    open_engine,
)
from edgec.cli.out import out

_LIMITS = "Limits"


def serve(
    bundle: BundleArgument,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on. Others than this machine can't reach the default.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: a free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option("--name", help="The model's name in the API. [default: the recipe's]")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            envvar="EDGEC_API_KEY",
            show_envvar=True,
            help="Clients must send it. Other users of this machine see it on the command line: prefer the variable.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", help="Another name by which clients call this server; may be given again."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            min=1,
            help="Tokens of an answer at most. [default: what the context has room for]",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    max_answers: Annotated[
        int, typer.Option("--max-answers", min=1, help="Prompts times `n` of one call.", rich_help_panel=_LIMITS)
    ] = 64,
    max_body: Annotated[
        str, typer.Option("--max-body", metavar="SIZE", help="Of a request.", rich_help_panel=_LIMITS)
    ] = "4 MiB",
    max_waiting: Annotated[
        int,
        typer.Option(
            "--max-waiting",
            min=0,
            help="Requests that may wait, before 429; 0: the engine's default.",
            rich_help_panel=_LIMITS,
        ),
    ] = 0,
    grace: Annotated[
        float,
        typer.Option(
            "--grace", min=0, help="Seconds that answers have to end, after SIGTERM.", rich_help_panel=_LIMITS
        ),
    ] = 30.0,
    step_slo: Annotated[
        float,
        typer.Option(
            "--step-slo", min=0, help="Milliseconds of a step (P99) that the batch is kept small for; 0: none."
        ),
    ] = 0.0,
    threads: ThreadsOption = 0,
    kernel: KernelOption = None,
    kv: KvOption = "int8",
    memory: MemoryOption = None,
    context: ContextOption = 0,
    max_batch: BatchOption = 0,
    access_log: Annotated[
        bool, typer.Option("--access-log", help="A line for each request, without its content.")
    ] = False,
) -> None:
    """Serve a bundle over HTTP, with OpenAI's API: completions, chat, models; and /health, /metrics.

    Fields that a request may have and what they do by default are OpenAI's (so the temperature is 1); what the engine
    does not do is refused by name. SIGTERM and Ctrl-C let running answers end.
    """
    out.interrupted = "interrupted"
    from edgec.errors import UsageError
    from edgec.runtime.backend import NativeBackend
    from edgec.serving.app import create_app
    from edgec.serving.limits import Limits, loopback_hosts
    from edgec.serving.run import address, listen
    from edgec.serving.run import serve as run
    from edgec.units import format_bytes, parse_bytes

    try:
        body = parse_bytes(max_body)
    except ValueError as error:
        raise UsageError(f"--max-body {max_body}: {error}") from error
    limits = Limits(
        body_bytes=body,
        sequences=max_answers,
        max_tokens=max_tokens,
        api_key=api_key or None,
        hosts=loopback_hosts(host, tuple(h.lower() for h in allow_host or ())),
    )
    listening = listen(host, port)
    engine = open_engine(
        bundle,
        threads=threads,
        kernel=kernel,
        kv=kv,
        memory=memory,
        context=context,
        max_batch=max_batch,
        max_waiting=max_waiting,
        step_slo_ms=step_slo,
    )
    backend = NativeBackend(engine, name)
    if loopback_hosts(host) is None and limits.api_key is None:
        out.progress(f"anyone who reaches {host} can use this server: there is no --api-key")

    def ready() -> None:
        memory_used = engine.description.get("memory", {})
        total = sum(memory_used.get(part, 0) for part in ("weights", "pools", "scratch"))
        out.progress(
            f"{backend.info.name}: context {backend.info.context}, {format_bytes(total)}, {backend.info.engine}"
        )
        out.progress(f"serving on {address(listening)}")

    run(create_app(backend, limits), listening, limits=limits, grace=grace, access_log=access_log, ready=ready)
