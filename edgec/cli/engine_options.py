"""How a bundle is opened: options that `run`, `bench` and `serve` share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from edgec.cli.out import out

if TYPE_CHECKING:
    from edgec.runtime.engine import Engine

BundleArgument = Annotated[
    Path,
    typer.Argument(
        help="What `edgec build` made for the target `native`: its output folder, or the bundle.",
        metavar="BUNDLE",
        show_default=False,
    ),
]
ThreadsOption = Annotated[
    int, typer.Option("--threads", min=0, max=256, help="Worker threads; 0: one for each fast core, at most 8.")
]
KernelOption = Annotated[
    str | None,
    typer.Option(
        "--kernel", help="Kernels to compute with, for example scalar or avx2. [default: the best for this CPU]"
    ),
]
KvType = Literal["int8", "fp16", "fp32"]
KvOption = Annotated[KvType, typer.Option("--kv", help="How keys and values are kept.")]
MemoryOption = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", help="Hard budget, for example `600 MB`. [default: the bundle's]"),
]
ContextOption = Annotated[
    int, typer.Option("--context", min=0, help="Positions that prompt and answer have together; 0: the bundle's.")
]
BlockOption = Annotated[
    int, typer.Option("--block-size", min=0, help="Tokens in a block of keys and values: 4 to 64; 0: the bundle's.")
]
Speculation = Literal["auto", "off", "head", "ngram", "both"]
SpeculationOption = Annotated[
    Speculation,
    typer.Option(
        "--speculation",
        help="Who proposes tokens that one pass then verifies, without loss: the bundle's draft head, n-grams of the "
        "text itself, or both; auto: n-grams, and the head when there is one.",
    ),
]
DraftLengthOption = Annotated[
    int, typer.Option("--draft-length", min=0, max=8, help="Tokens to propose; 0: as many as pays.")
]
DraftWidthOption = Annotated[
    int,
    typer.Option(
        "--draft-width",
        min=0,
        max=4,
        help="The head's candidates for a place. 1: a chain, verified by rejection sampling; 2 to 4: a tree, which "
        "changes no token; 0: a chain with a fixed --draft-length, else a tree.",
    ),
]
BatchOption = Annotated[int, typer.Option("--max-batch", min=0, max=64, help="Sequences in a step; 0: the bundle's.")]


def open_engine(
    bundle: Path,
    *,
    threads: int = 0,
    kernel: str | None = None,
    kv: KvType = "int8",
    memory: str | None = None,
    speculation: Speculation = "auto",
    **options: Any,
) -> Engine:
    """Open a bundle as the command line says; `options` are further fields of `EngineOptions`."""
    from edgec.errors import UsageError
    from edgec.runtime import library
    from edgec.runtime.abi import KvType as Kv
    from edgec.runtime.abi import LogLevel
    from edgec.runtime.abi import Speculation as Who
    from edgec.runtime.engine import Engine, EngineOptions
    from edgec.runtime.locate import native_folder
    from edgec.units import parse_bytes

    try:
        budget = parse_bytes(memory) if memory else 0
    except ValueError as error:
        raise UsageError(f"--memory {memory}: {error}") from error

    def log(level: LogLevel, line: str) -> None:
        if level >= LogLevel.WARNING or out.debug:
            out.progress(f"runtime: {line}")

    folder = native_folder(bundle)
    if not library.is_compiled():
        out.progress("compiling the runtime for this machine, once")
    made = EngineOptions(
        threads=threads,
        kernel=kernel,
        kv=Kv[kv.upper()],
        memory_budget=budget,
        log=log,
        speculation=Who[speculation.upper()],
        **options,
    )
    return Engine(folder, made)
