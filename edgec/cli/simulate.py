"""`edgec simulate`: the scheduler on a workload, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgec.cli.options import JsonOption
from edgec.cli.out import out
from edgec.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from edgec.runtime.simulate import Recommendation, Setting, Simulated
    from edgec.runtime.workload import Cost, Request

_WORK, _COST, _SCHEDULER = "Workload", "Cost of a step", "Scheduler"
_LENGTHS = "fixed:N, uniform:LOW:HIGH, exponential:MEAN or lognormal:MEAN:SIGMA."


def simulate(
    trace: Annotated[
        Path | None,
        typer.Argument(
            help="A trace: .jsonl or .csv with arrival (seconds), prompt, answer (tokens), and if need be max_tokens, "
            "tenant, weight, priority, prefix, prefix_tokens. Without one, work is drawn at random.",
            show_default=False,
        ),
    ] = None,
    requests: Annotated[int, typer.Option("--requests", min=1, help="How many.", rich_help_panel=_WORK)] = 500,
    rate: Annotated[
        float,
        typer.Option("--rate", min=0, help="Poisson arrivals a second; 0: all at the start.", rich_help_panel=_WORK),
    ] = 0.0,
    prompt: Annotated[
        str, typer.Option("--prompt", help=f"Lengths: {_LENGTHS}", rich_help_panel=_WORK)
    ] = "exponential:128",
    answer: Annotated[
        str, typer.Option("--answer", help="Lengths, in the same way.", rich_help_panel=_WORK)
    ] = "exponential:128",
    shared_prefix: Annotated[
        int,
        typer.Option(
            "--shared-prefix", min=0, help="Tokens that all prompts begin with, besides.", rich_help_panel=_WORK
        ),
    ] = 0,
    tenant: Annotated[
        list[str] | None,
        typer.Option("--tenant", help="NAME[:WEIGHT[:SHARE[:PRIORITY]]]; may be given again.", rich_help_panel=_WORK),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the random work.", rich_help_panel=_WORK)] = 0,
    fixed_ms: Annotated[
        float | None, typer.Option("--fixed-ms", min=0, help="Of every step.", rich_help_panel=_COST)
    ] = None,
    row_ms: Annotated[
        float | None,
        typer.Option("--row-ms", min=0, help="Of each token that a step computes.", rich_help_panel=_COST),
    ] = None,
    sequence_ms: Annotated[
        float | None, typer.Option("--sequence-ms", min=0, help="Of each sequence in a step.", rich_help_panel=_COST)
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option("--bench", help="What `edgec bench BUNDLE --json` measured, instead.", rich_help_panel=_COST),
    ] = None,
    context: Annotated[
        int, typer.Option("--context", min=2, help="Tokens of a sequence at most.", rich_help_panel=_SCHEDULER)
    ] = 2048,
    max_batch: Annotated[
        int, typer.Option("--max-batch", min=1, help="Sequences in a step.", rich_help_panel=_SCHEDULER)
    ] = 16,
    step_tokens: Annotated[
        int,
        typer.Option("--step-tokens", min=1, help="Rows of a step: decodes, then prompts.", rich_help_panel=_SCHEDULER),
    ] = 128,
    block_size: Annotated[
        int, typer.Option("--block-size", min=1, max=1024, help="Tokens of a KV block.", rich_help_panel=_SCHEDULER)
    ] = 16,
    kv_tokens: Annotated[
        int,
        typer.Option(
            "--kv-tokens",
            min=0,
            help="Tokens that the KV pool holds; 0: enough for the batch at full context.",
            rich_help_panel=_SCHEDULER,
        ),
    ] = 0,
    slo_ms: Annotated[
        float,
        typer.Option("--slo-ms", min=0, help="P99 step time to keep to; 0: none.", rich_help_panel=_SCHEDULER),
    ] = 0.0,
    aging_steps: Annotated[
        int,
        typer.Option("--aging-steps", min=1, help="Steps of waiting per priority level.", rich_help_panel=_SCHEDULER),
    ] = 32,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="NAME=V,V,…",
            help="Try each of block-size, max-batch, step-tokens, kv-tokens or aging-steps; may be given again.",
        ),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare/--no-compare", help="Also run static batching.")] = True,
    recommend: Annotated[bool, typer.Option("--recommend", help="Choose B* and the block size for this work.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with charts.")] = None,
    json: JsonOption = False,
) -> None:
    """Run the scheduler alone on a trace or on random work, to plan capacity."""
    out.json = json
    from edgec.runtime import simulate as simulation
    from edgec.runtime.scheduling import SchedulerConfig, scheduling_library

    work = _requests(trace, requests, rate, prompt, answer, tenant or [], shared_prefix, seed)
    cost = _cost(bench, fixed_ms, row_ms, sequence_ms)
    config = SchedulerConfig(
        block_size=block_size,
        context=context,
        max_batch=max_batch,
        step_tokens=step_tokens,
        max_waiting=len(work),
        aging_steps=aging_steps,
        step_slo=slo_ms / 1000,
    )
    sweeps = [simulation.parse_sweep(s) for s in sweep or []]
    setting = simulation.Setting(config, kv_tokens or (max_batch * context if sweeps else 0))
    library = scheduling_library()
    swept = simulation.sweep(setting, sweeps, work, cost, progress=out.progress, library=library)
    groups = [("as swept" if sweeps else "this workload", "Each run is the same work.", swept)]
    if compare:
        groups.append(("continuous against static batching", _COMPARED, _compare(setting, work, cost)))
    chosen: Recommendation | None = None
    if recommend:
        chosen, by_batch, by_block = simulation.recommend(
            setting, work, cost, slo=slo_ms / 1000, progress=out.progress, library=library
        )
        groups += [("by batch", "From which B* was chosen.", by_batch), ("by block size", "At that batch.", by_block)]
    out.document(_document(setting, work, cost, groups, chosen))
    for title, _, runs in groups:
        out.show(_table(title, runs))
    if compare and (ratio := _ratio(groups[1][2])) is not None:
        out.show(f"continuous batching gives {ratio:.2f}× the tokens per second of static batching on this work")
    for reason in chosen.reasons if chosen else ():
        out.show(reason)
    if html is not None:
        _write(html, work, cost, groups, chosen)


_COMPARED = "A static batch is filled, its prompts are padded, and it runs until its longest member ends."


def _requests(
    trace: Path | None,
    count: int,
    rate: float,
    prompt: str,
    answer: str,
    tenants: list[str],
    shared_prefix: int,
    seed: int,
) -> list[Request]:
    from edgec.runtime.workload import Lengths, TenantMix, random_requests, read_trace

    if trace is not None:
        return read_trace(trace)
    mixes = [TenantMix.parse(t) for t in tenants]
    lengths = Lengths.parse(prompt), Lengths.parse(answer)
    return random_requests(count, rate, *lengths, tenants=mixes, shared_prefix=shared_prefix, seed=seed)


def _cost(bench: Path | None, fixed: float | None, row: float | None, sequence: float | None) -> Cost:
    from edgec.runtime.workload import Cost, cost_from_bench

    usual = Cost()
    if bench is None:
        return Cost(
            usual.fixed if fixed is None else fixed / 1000,
            usual.per_row if row is None else row / 1000,
            usual.per_sequence if sequence is None else sequence / 1000,
        )
    if any(v is not None for v in (fixed, row, sequence)):
        raise UsageError("--bench says what a step costs; leave out --fixed-ms, --row-ms and --sequence-ms")
    return cost_from_bench(bench)


def _compare(setting: Setting, work: list[Request], cost: Cost) -> list[Simulated]:
    from dataclasses import replace

    from edgec.runtime.simulate import simulate as run

    config = setting.resolve()
    return [
        run(replace(config, static_batching=static), work, cost, name="static" if static else "continuous")
        for static in (False, True)
    ]


def _ratio(runs: list[Simulated]) -> float | None:
    continuous, static = runs
    return continuous.tokens_per_second / static.tokens_per_second if static.tokens_per_second else None


def _document(
    setting: Setting,
    work: list[Request],
    cost: Cost,
    groups: list[tuple[str, str, list[Simulated]]],
    chosen: Recommendation | None,
) -> dict[str, Any]:
    from dataclasses import asdict

    compared = next((runs for title, _, runs in groups if title.startswith("continuous")), None)
    return {
        "requests": len(work),
        "prompt_tokens": sum(r.prompt for r in work),
        "config": asdict(setting.resolve()),
        "cost": asdict(cost),
        "groups": [{"title": title, "runs": [r.to_dict() for r in runs]} for title, _, runs in groups],
        "continuous_over_static": _ratio(compared) if compared else None,
        "recommendation": asdict(chosen) if chosen else None,
    }


def _table(title: str, runs: list[Simulated]) -> Table:
    from rich.table import Table

    from edgec.runtime.simulation_report import COLUMNS, row

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "run" else "right")
    for run in runs:
        table.add_row(*row(run))
    return table


def _write(
    path: Path,
    work: list[Request],
    cost: Cost,
    groups: list[tuple[str, str, list[Simulated]]],
    chosen: Recommendation | None,
) -> None:
    from edgec.runtime.simulation_report import render_html

    priced = (
        f"step costs from a table of {len(cost.table)} measurements"
        if cost.table
        else f"a step: {cost.fixed * 1000:g} ms + {cost.per_row * 1000:g} ms a row"
    )
    facts = [f"{len(work):,} requests", f"{sum(r.prompt for r in work):,} prompt tokens", priced]
    try:
        path.write_text(render_html(facts, groups, chosen), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} can't be written: {error}") from error
    out.progress(f"wrote {path}")
