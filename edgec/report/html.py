"""report.html: one self-contained file, without scripts, fonts or images from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from edgec.parity import EXACT_DB
from edgec.report.charts import Bars, Dots, chart
from edgec.report.ledger import format_limit
from edgec.units import format_bytes, format_milliseconds, format_number, format_seconds

if TYPE_CHECKING:
    from edgec.report.document import BuildDocument, Latency, TargetRecord


@dataclass(frozen=True)
class Tile:
    """One of the numbers at the top."""

    label: str
    number: str
    under: str


def render_html(document: BuildDocument) -> str:
    """The page's text. Whatever the document holds is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    order = {"fail": 0, "unproven": 1, "pass": 2}
    counts = [name for target in document.targets.values() for name in target.counts]
    return environment.get_template("report.html.j2").render(
        d=document,
        name=document.recipe.name if document.recipe else "edgec build",
        metric=_metric(document),
        tiles=_tiles(document),
        gates=sorted(document.gates, key=lambda g: (g.holds, order[g.verdict])),
        count_names=list(dict.fromkeys(counts)),
        chain_chart=_chain(document),
        target_chart=_targets(document),
        parity_chart=_parity(document),
        cost_chart=_costs(document),
        bytes=format_bytes,
        number=format_number,
        seconds=format_seconds,
        ratio=_ratio,
        ms=_milliseconds,
        speedup=_speedup,
        details=_details,
        exact_db=EXACT_DB,
        limit=format_limit,
        pill=lambda text, style: Markup('<span class="pill {}">{}</span>').format(style, text),
    )


def _metric(document: BuildDocument) -> str:
    return document.metric.name if document.metric else "metric"


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}×"


def _milliseconds(latency: Latency | None, which: str) -> str:
    return format_milliseconds(getattr(latency, which) if latency else None)


def _against_source(compression: float | None) -> str:
    if compression is None:
        return ""
    if compression >= 1.0:
        return f", {compression:.3g}× smaller than the float source"
    return f", {1.0 / compression:.3g}× the float source's weights"


def _speedup(target: TargetRecord) -> str:
    if target.latency_ms is None or target.float_latency_ms is None:
        return "–"
    return f"{target.float_latency_ms.p50 / target.latency_ms.p50:.2f}×"


def _details(target: TargetRecord) -> list[tuple[str, str]]:
    """`(label, text)` of what a target wants in its report: the entries of its details that begin with "report_"."""
    rows = []
    for key, value in target.details.items():
        if isinstance(value, dict):
            text = ", ".join(f"{name} {_plain(n)}" for name, n in value.items())
        elif isinstance(value, list):
            text = ", ".join(_plain(v) for v in value)
        else:
            text = _plain(value)
        rows.append((key.removeprefix("report_").replace("_", " "), text or "none"))
    return rows


def _plain(value: object) -> str:
    return format_number(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _tiles(document: BuildDocument) -> list[Tile]:
    tiles = []
    sized = {name: t.bytes for name, t in document.targets.items() if t.bytes}
    if sized:
        name = min(sized, key=lambda n: sized[n])
        compression = document.targets[name].compression
        tiles.append(Tile("smallest artefact", format_bytes(sized[name]), f"{name}{_against_source(compression)}"))
    values = [s.metric for s in document.ledger if s.kind != "target" and s.metric is not None]
    if values:
        source = document.metric.source if document.metric else None
        tiles.append(Tile(_metric(document), format_number(values[-1]), f"source {format_number(source)}"))
    timed = {name: t for name, t in document.targets.items() if t.latency_ms is not None}
    if timed:
        name = min(timed, key=lambda n: timed[n].latency_ms.p50)  # type: ignore[union-attr]
        under = f"{name}{f', {_speedup(timed[name])} the float speed' if timed[name].float_latency_ms else ''}"
        tiles.append(Tile("fastest, median", _milliseconds(timed[name].latency_ms, "p50"), under))
    if document.targets:
        proven = sum(t.proven for t in document.targets.values())
        tiles.append(Tile("proven here", f"{proven} of {len(document.targets)}", "targets ran on their own engine"))
    if document.gates:
        held = sum(g.holds for g in document.gates)
        tiles.append(Tile("gates that hold", f"{held} of {len(document.gates)}", "the table is below"))
    cached = f"{len(document.cached_stages)} of {len(document.ledger)} stages from the store"
    tiles.append(Tile("this build took", format_seconds(document.seconds), cached))
    return tiles


def _chain(document: BuildDocument) -> Markup:
    stages = document.ledger
    size = Bars(
        "size",
        [s.bytes for s in stages],
        format_bytes,
        notes=[f"· {_ratio(s.compression)}" if s.compression else "" for s in stages],
    )
    metric = Dots(
        _metric(document),
        [[s.metric] if s.metric is not None else [] for s in stages],
        lambda value: f"{value:.6g}",
        reference=document.metric.source if document.metric else None,
        reference_name="the source",
        labels=["" if s.metric is None else f"{s.metric:.6g}" for s in stages],
    )
    return chart([s.stage for s in stages], [size, metric], title="size and metric by stage")


def _targets(document: BuildDocument) -> Markup:
    targets = list(document.targets.values())
    size = Bars("size", [t.bytes for t in targets], format_bytes, twins=[t.float_bytes for t in targets])
    latency = Bars(
        "latency of one step, median",
        [t.latency_ms.p50 if t.latency_ms else None for t in targets],
        format_milliseconds,
        twins=[t.float_latency_ms.p50 if t.float_latency_ms else None for t in targets],
        whiskers=[t.latency_ms.p95 if t.latency_ms else None for t in targets],
        notes=[f"· p95 {format_milliseconds(t.latency_ms.p95)}" if t.latency_ms else "" for t in targets],
        room=150,
    )
    return chart(list(document.targets), [size, latency], title="size and latency by target")


def _parity(document: BuildDocument) -> Markup:
    targets = list(document.targets.values())
    errors = Dots(
        "relative error",
        [sorted({r.relative_error for r in t.parity.rows}) if t.parity else [] for t in targets],
        _relative_error,
        log=True,
        labels=[_relative_error(t.parity.relative_error) if t.parity else "" for t in targets],
    )
    return chart(list(document.targets), [errors], title="parity by target", faded=[not t.proven for t in targets])


def _relative_error(value: float) -> str:
    return "0" if value == 0.0 else f"{value:.1e}"


def _costs(document: BuildDocument) -> Markup:
    stages = document.ledger
    time = Bars("time", [s.seconds for s in stages], format_seconds)
    memory = Bars("peak memory", [s.peak_memory for s in stages], format_bytes)
    faded = [s.cached for s in stages]
    return chart([s.stage for s in stages], [time, memory], title="time and peak memory by stage", faded=faded)
