"""The ledger on the terminal: what each stage cost and bought, in 100 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.constrain import Constrain
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from edgec.parity import EXACT_DB
from edgec.units import format_bytes, format_number, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from edgec.report.document import BuildDocument, GateRecord, Latency, StageRecord

WIDTH = 100
_STYLES = {
    "changed": "green",
    "unchanged": "yellow",
    "failed": "bold red",
    "pass": "green",
    "fail": "bold red",
    "unproven": "yellow",
}


def render_build(document: BuildDocument) -> RenderableType:
    """Everything a person wants to see when a build is over."""
    parts: list[RenderableType] = [render_stages(document)]
    if spent := _spent(document):
        parts.append(spent)
    if document.targets:
        parts.append(render_targets(document))
    if document.gates:
        parts.append(render_gates(document.gates))
    if document.wastes is not None:
        parts.append(_wastes(document))
    parts.append(_ending(document))
    return Constrain(Group(*parts), WIDTH)


def new_table(title: str) -> Table:
    """An empty table in the house's dress."""
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, expand=True, padding=(0, 1, 0, 0)
    )


def render_stages(document: BuildDocument) -> RenderableType:
    """One line a stage. `ratio` is the running product of the compression, from the float source."""
    metric = document.metric.name if document.metric else "metric"
    table = new_table(f"{document.recipe.name if document.recipe else 'build'}: stages")
    table.add_column("stage", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for heading in ("size", "weights", "ratio", metric[:12], "drop", "p50 ms", "memory", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for stage in document.ledger:
        table.add_row(
            escape(stage.stage),
            _verdict(stage),
            format_bytes(stage.bytes),
            _count(stage.parameters),
            _ratio(stage.compression),
            format_number(stage.metric),
            _drop(stage.drop),
            _milliseconds(stage.latency_ms),
            format_bytes(stage.peak_memory),
            format_seconds(stage.seconds),
        )
    warnings = [f"{s.stage}: {w}" for s in document.ledger for w in s.warnings]
    return Group(table, *(Text(f"! {w}", style="yellow") for w in warnings))


def _spent(document: BuildDocument) -> RenderableType | None:
    """Where the minutes went: the five longest parts of stages that took a while."""
    parts = [
        (seconds, f"{stage.stage} {part} {format_seconds(seconds)}")
        for stage in document.ledger
        for part, seconds in stage.timings.items()
        if seconds >= 5.0
    ]
    longest = [text for _, text in sorted(parts, reverse=True)[:5]]
    return Text(f"Longest: {', '.join(longest)}", style="dim") if longest else None


def render_targets(document: BuildDocument) -> RenderableType:
    """One line an artefact: parity (SQNR in dB, off by N steps), latency beside its float twin."""
    table = new_table("targets")
    table.add_column("target", no_wrap=True)
    table.add_column("proof", no_wrap=True)
    for heading in ("size", "ratio", "cosine", "dB", "rel. err.", "steps", "p50 ms", "p95 ms", "float ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, target in document.targets.items():
        parity = target.parity
        table.add_row(
            escape(name),
            Text(target.proof if target.proof != "none" else "unproven", style="green" if target.proven else "yellow"),
            format_bytes(target.bytes),
            _ratio(target.compression),
            f"{parity.cosine:.6f}" if parity else "–",
            _decibels(parity.sqnr_db) if parity else "–",
            f"{parity.relative_error:.1e}" if parity else "–",
            "–" if parity is None or parity.off_by_n is None else str(parity.off_by_n),
            _milliseconds(target.latency_ms),
            _milliseconds(target.latency_ms, "p95"),
            _milliseconds(target.float_latency_ms),
        )
    unproven = [
        Text(f"{name}: unproven here; prove it with: {t.proof_command}", style="yellow")
        for name, t in document.targets.items()
        if not t.proven and t.proof_command
    ]
    return Group(table, *unproven)


def render_gates(gates: list[GateRecord]) -> RenderableType:
    """One line a gate."""
    table = new_table("gates")
    table.add_column("gate", overflow="fold", ratio=1)
    table.add_column("limit", justify="right", max_width=26, overflow="fold")
    table.add_column("value", justify="right", max_width=26, overflow="fold")
    table.add_column("verdict", no_wrap=True)
    for gate in gates:
        verdict = gate.verdict if gate.required or gate.verdict != "unproven" else "unproven (default)"
        name = "compare" if gate.name.startswith("compare.") else gate.name
        label = f"{escape(name)} [dim]{escape(gate.note)}[/dim]" if gate.note else escape(name)
        table.add_row(
            label,
            format_limit(gate.name, gate.limit),
            format_limit(gate.name, gate.value),
            Text(verdict, style=_STYLES[gate.verdict]),
        )
    return table


def format_limit(name: str, value: float | int | str | None) -> str:
    """A gate's limit or value in its own unit."""
    if value is None or isinstance(value, str):
        return "–" if value is None else value
    if name.startswith("max_bytes"):
        return format_bytes(value)
    if name.startswith("parity.cosine"):
        return f"{value:.6g}"
    return format_number(value)


def _wastes(document: BuildDocument) -> RenderableType:
    assert document.wastes is not None
    shares = []
    for name in ("memory", "compute", "idle", "size"):
        share = getattr(document.wastes, name).share
        shares.append(f"{name} {'–' if share is None else f'{share:.1%}'}")
    return Text(f"\nWaste left: {', '.join(shares)}  (of what: report.html)", style="dim")


def _ending(document: BuildDocument) -> RenderableType:
    cached = f", {len(document.cached_stages)} of {len(document.ledger)} stages from the store"
    took = f"in {format_seconds(document.seconds)}{cached if document.cached_stages else ''}"
    text = Text()
    if document.error is None:
        text.append("\nBuilt", style="bold green").append(f" {took}.")
    else:
        text.append("\nFailed", style="bold red").append(f" {took} [{document.error.reason}].")
    if document.bundle:
        text.append(f"\nThe bundle lies in {document.bundle}")
    return text


def _verdict(stage: StageRecord) -> Text:
    text = Text(stage.verdict, style=_STYLES[stage.verdict])
    return text.append(" ·", style="dim").append("cached", style="dim") if stage.cached else text


def _decibels(sqnr: float) -> str:
    return "exact" if sqnr >= EXACT_DB else f"{sqnr:.0f}"


def _count(number: int | None) -> str:
    if number is None:
        return "–"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g} {unit}"
    return str(number)


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}×"


def _drop(value: float | None) -> str:
    if value is None:
        return "–"
    return "0" if value == 0 else f"{value:+.3g}"


def _milliseconds(latency: Latency | None, which: str = "p50") -> str:
    if latency is None:
        return "–"
    value = float(getattr(latency, which))
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"
