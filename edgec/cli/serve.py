"""`edgec serve`: an OpenAI-compatible server over a bundle."""

from __future__ import annotations

from typing import Annotated

import typer

from edgec.cli.engine_options import (
    BatchOption,
    BundleArgument,
    ContextOption,
    DraftLengthOption,
    DraftWidthOption,
    KernelOption,
    KvOption,
    MemoryOption,
    SpeculationOption,
    ThreadsOption,
    open_engine,
)
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


def serve(
    bundle: BundleArgument,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    name: NameOption = None,
    api_key: ApiKeyOption = None,
    allow_host: AllowHostOption = None,
    max_tokens: MaxTokensOption = None,
    max_answers: MaxAnswersOption = 64,
    max_body: MaxBodyOption = "4 MiB",
    max_waiting: MaxWaitingOption = 0,
    grace: GraceOption = 30.0,
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
    speculation: SpeculationOption = "auto",
    draft_length: DraftLengthOption = 0,
    draft_width: DraftWidthOption = 0,
    max_batch: BatchOption = 0,
    access_log: AccessLogOption = False,
) -> None:
    """Serve a bundle over HTTP, with OpenAI's API: completions, chat, models; and /health, /metrics.

    Fields that a request may have and what they do by default are OpenAI's (so the temperature is 1); what the engine
    does not do is refused by name. SIGTERM and Ctrl-C let running answers end.
    """
    out.interrupted = "interrupted"
    from edgec.runtime.backend import NativeBackend
    from edgec.units import format_bytes

    where = take_address(
        host,
        port,
        api_key=api_key,
        allow_host=allow_host,
        max_tokens=max_tokens,
        max_answers=max_answers,
        max_body=max_body,
    )
    engine = open_engine(
        bundle,
        threads=threads,
        kernel=kernel,
        kv=kv,
        memory=memory,
        context=context,
        speculation=speculation,
        draft_length=draft_length,
        draft_width=draft_width,
        max_batch=max_batch,
        max_waiting=max_waiting,
        step_slo_ms=step_slo,
    )
    backend = NativeBackend(engine, name)

    def about() -> str:
        memory_used = engine.description.get("memory", {})
        total = sum(memory_used.get(part, 0) for part in ("weights", "pools", "scratch"))
        return f"{backend.info.name}: context {backend.info.context}, {format_bytes(total)}, {backend.info.engine}"

    run_server(backend, where, grace=grace, access_log=access_log, about=about)
