"""What `edgec simulate` found, for people: table rows and one self-contained HTML page with charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from edgec import __version__
from edgec.report.charts import Bars, Dots, chart
from edgec.runtime.simulate import Recommendation, Simulated
from edgec.units import format_milliseconds, format_number

COLUMNS = (
    *("run", "tokens/s", "first token p50", "p99", "between p50", "p99", "longest", "occupancy", "KV used"),
    *("recomputed", "padding", "fairness", "B*"),
)


def _ms(seconds: float) -> str:
    return format_milliseconds(seconds * 1000)


def _share(value: float) -> str:
    return f"{value:.1%}"


def row(run: Simulated) -> tuple[str, ...]:
    """One run under `COLUMNS`."""
    return (
        run.name,
        format_number(run.tokens_per_second),
        _ms(run.first_token.p50),
        _ms(run.first_token.p99),
        _ms(run.between_tokens.p50),
        _ms(run.between_tokens.p99),
        _ms(run.longest_gap),
        _share(run.occupancy),
        _share(run.kv_utilisation),
        _share(run.recomputed),
        _share(run.padding),
        f"{run.fairness:.3f}",
        str(run.batch_limit),
    )


@dataclass(frozen=True)
class _Tile:
    label: str
    number: str
    under: str


@dataclass(frozen=True)
class _Section:
    title: str
    about: str
    charts: list[Markup]
    rows: list[tuple[str, ...]]


def render_html(
    facts: Sequence[str],
    groups: Sequence[tuple[str, str, Sequence[Simulated]]],
    recommendation: Recommendation | None = None,
) -> str:
    """The page. `groups` are (title, what it shows, runs); the first run of the first group gives the tiles."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    import edgec.report

    folder = Path(edgec.report.__file__).parent
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    first = groups[0][2][0]
    return environment.get_template("simulation.html.j2").render(
        facts=facts,
        tiles=_tiles(first),
        recommendation=recommendation,
        sections=[
            _Section(title, about, _charts(title, runs), [row(r) for r in runs]) for title, about, runs in groups
        ],
        columns=COLUMNS,
        tenants=first.tenants,
        tenant_chart=_tenants(first),
        fairness=f"{first.fairness:.3f}",
        version=__version__,
    )


def _tiles(run: Simulated) -> list[_Tile]:
    return [
        _Tile("answer tokens", f"{format_number(run.tokens_per_second)}/s", run.name),
        _Tile("first token, median", _ms(run.first_token.p50), f"p99 {_ms(run.first_token.p99)}"),
        _Tile("between tokens, p99", _ms(run.between_tokens.p99), f"median {_ms(run.between_tokens.p50)}"),
        _Tile("step occupancy", _share(run.occupancy), "of the sequences that steps could have held"),
        _Tile("KV utilisation", _share(run.kv_utilisation), f"blocks of {run.block_size} tokens"),
        _Tile("recomputed", _share(run.recomputed), f"{run.preemptions:,} preemptions"),
    ]


def _charts(title: str, runs: Sequence[Simulated]) -> list[Markup]:
    names = [r.name for r in runs]
    speed = Bars("answer tokens per second", [r.tokens_per_second for r in runs], format_number)
    first = Bars(
        "time to first token",
        [r.first_token.p50 for r in runs],
        _ms,
        whiskers=[r.first_token.p99 for r in runs],
        notes=[f"· p99 {_ms(r.first_token.p99)}" for r in runs],
        room=170,
    )
    gap = Bars(
        "time between tokens",
        [r.between_tokens.p50 for r in runs],
        _ms,
        whiskers=[r.between_tokens.p99 for r in runs],
        notes=[f"· p99 {_ms(r.between_tokens.p99)}" for r in runs],
        room=170,
    )
    occupancy = [r.occupancy for r in runs]
    kept = [r.kv_utilisation for r in runs]
    recomputed = [r.recomputed for r in runs]
    shares = [
        Dots(what, [[value] for value in values], _share, labels=[_share(value) for value in values])
        for what, values in (("step occupancy", occupancy), ("KV utilisation", kept), ("recomputed", recomputed))
    ]
    return [
        chart(names, [speed, first, gap], title=f"{title}: speed"),
        chart(names, shares, title=f"{title}: what is left of waste"),
    ]


def _tenants(run: Simulated) -> Markup:
    tokens = Bars(
        "answer tokens",
        [float(t.answer_tokens) for t in run.tenants],
        lambda v: format_number(int(v)),
        notes=[f"· weight {t.weight:g}" for t in run.tenants],
        room=150,
    )
    waits = Bars(
        "time to first token",
        [t.first_token.p50 for t in run.tenants],
        _ms,
        whiskers=[t.first_token.p99 for t in run.tenants],
        notes=[f"· p99 {_ms(t.first_token.p99)}" for t in run.tenants],
        room=170,
    )
    return chart([t.name for t in run.tenants], [tokens, waits], title="tenants")
