"""`edgec bench`: how fast a bundle is, how near its bound, and what it wastes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from edgec.cli.engine_options import (
    BlockOption,
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
from edgec.cli.options import JsonOption
from edgec.cli.out import out

if TYPE_CHECKING:
    from rich.table import Table

    from edgec.runtime.bench import Report
    from edgec.runtime.engine import Engine


def bench(
    bundle: BundleArgument,
    prompts: Annotated[str, typer.Option("--prompts", help="Prompt lengths to compute.")] = "128,512",
    batches: Annotated[str, typer.Option("--batches", help="Numbers of answers to compute together.")] = "1,2,4,8,16",
    decode: Annotated[int, typer.Option("--decode", min=2, help="Tokens of each measured answer.")] = 64,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Runs, of which the median is shown.")] = 3,
    threads: ThreadsOption = 0,
    kernel: KernelOption = None,
    kv: KvOption = "int8",
    memory: MemoryOption = None,
    context: ContextOption = 0,
    speculation: SpeculationOption = "auto",
    draft_length: DraftLengthOption = 0,
    draft_width: DraftWidthOption = 0,
    block_size: BlockOption = 0,
    speculative: Annotated[
        bool,
        typer.Option(
            "--speculative", help="Measure speculation instead: prompts of several kinds with it and without, in turns."
        ),
    ] = False,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, max=100.0, help="Of --speculative's answers.")
    ] = 0.0,
    json: JsonOption = False,
) -> None:
    """Measure a bundle on this machine, each figure beside its bound.

    The largest of --batches decides how many sequences the bundle is opened for.
    """
    out.json = json
    out.interrupted = "interrupted"
    from edgec.runtime.bench import Plan
    from edgec.runtime.bench import bench as measure

    sizes = _numbers("--batches", batches)
    plan = Plan(prompts=_numbers("--prompts", prompts), decode=decode, batches=sizes, repeats=repeats)
    with open_engine(
        bundle,
        threads=threads,
        kernel=kernel,
        kv=kv,
        memory=memory,
        context=context,
        speculation=speculation if speculative or speculation != "auto" else "off",
        draft_length=draft_length,
        draft_width=draft_width,
        block_size=block_size,
        max_batch=min(64, max(sizes)),
        max_waiting=max(64, *sizes),
    ) as engine:
        if speculative:
            _speculative(engine, sizes, temperature, decode, repeats)
            return
        report = measure(engine, plan, out.progress)
    out.document(report.to_dict())
    out.show(_title(report))
    for table in _tables(report):
        out.show(table)
    for line in report.skipped:
        out.progress(f"skipped: {line}")


def _speculative(engine: Engine, batches: tuple[int, ...], temperature: float, decode: int, repeats: int) -> None:
    from edgec.runtime.speculative import measure
    from edgec.units import format_percent

    reports = []
    for batch in batches:
        report = measure(
            engine, batch=batch, temperature=temperature, tokens=decode, repeats=repeats, progress=out.progress
        )
        reports.append(report)
        table = _table((f"batch {batch}", "plain tok/s", "speculative", "speed-up", "tokens a run"))
        for pair in report.pairs:
            run = "–" if pair.tokens_per_run is None else f"{pair.tokens_per_run:.2f}"
            table.add_row(pair.prompt, f"{pair.plain:.1f}", f"{pair.speculative:.1f}", f"{pair.ratio:.2f}×", run)
        out.show(table)
        alpha = ", ".join(f"{a:.2f}" for a in report.acceptance if a is not None) or "nothing was proposed"
        out.show(f"speed-up {report.ratio:.2f}× (median); acceptance by place: {alpha}")
        if report.predicted is not None:
            out.show(
                f"{report.tokens_per_run:.2f} tokens a run of {report.mean_rows:.1f} proposals for "
                f"{report.mean_length:.1f} places, a place at {format_percent(report.cost)} of a step: "
                f"{report.predicted:.2f}× predicted; "
                f"{format_percent(report.wasted)} of the proposals thrown away"
            )
    out.document({"speculative": [report.to_dict() for report in reports]})


def _numbers(option: str, text: str) -> tuple[int, ...]:
    from edgec.errors import UsageError

    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"{option} {text}: whole numbers, separated by commas") from error
    if any(not 1 <= n <= 1 << 20 for n in numbers):
        raise UsageError(f"{option} {text}: numbers from 1 on")
    return numbers


def _title(report: Report) -> str:
    from edgec.units import format_bytes

    about = report.engine
    return (
        f"kernel {about.get('kernel')}, threads {about.get('threads')}, KV {about.get('kv_dtype')}, "
        f"blocks of {about.get('block_size')}; memory reads {format_bytes(report.bandwidth)}/s, "
        f"a token reads {format_bytes(report.bytes_per_token)}"
    )


def _tables(report: Report) -> list[Table]:
    from edgec.units import format_milliseconds, format_percent

    first = _table(("prefill", "tok/s", "first token"))
    for p in report.prefill:
        first.add_row(f"{p.tokens} tokens", f"{p.tokens_per_second:.0f}", format_milliseconds(p.first_token_ms))
    second = _table(("decode", "tok/s", "step", "bound tok/s", "of bound", "scheduling"))
    for d in report.decode:
        bound = "–" if d.bound is None else f"{d.bound:.0f}"
        second.add_row(
            f"batch {d.batch}",
            f"{d.tokens_per_second:.1f}",
            format_milliseconds(d.step_ms),
            bound,
            format_percent(d.of_bound),
            format_percent(d.scheduling),
        )
    if report.mix is None:
        return [first, second]
    m = report.mix
    third = _table(
        ("mixed load", "tok/s", "occupancy", "KV utilisation", "scheduling", "recomputed", "host", "P50", "P99")
    )
    third.add_row(
        f"{m.requests} requests",
        f"{m.tokens_per_second:.1f}",
        *(format_percent(v) for v in (m.occupancy, m.utilisation, m.scheduling, m.recomputed, m.host)),
        format_milliseconds(m.step_p50_ms),
        format_milliseconds(m.step_p99_ms),
    )
    return [first, second, third]


def _table(columns: tuple[str, ...]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    return table
