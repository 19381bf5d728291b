"""A Markdown summary of a build, for a pull request or `$GITHUB_STEP_SUMMARY`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from edgec.parity import EXACT_DB
from edgec.report.ledger import format_limit
from edgec.units import format_bytes, format_milliseconds, format_number, format_seconds

if TYPE_CHECKING:
    from edgec.report.document import BuildDocument, Latency

_MARKS = {"pass": "✅", "fail": "❌", "unproven": "⚠️"}


def render_markdown(document: BuildDocument) -> str:
    """The text: verdict, targets, what broke, the ledger."""
    name = document.recipe.name if document.recipe else "edgec build"
    parts = [f"## {_escape(name)}: {'built ✅' if document.error is None else 'failed ❌'}", _opening(document)]
    if document.error is not None:
        hint = f"\n> {_escape(document.error.hint)}" if document.error.hint else ""
        parts.append(f"> **{_escape(document.error.message)}** (`{document.error.reason}`){hint}")
    if document.targets:
        parts.append(_targets(document))
    if document.gates:
        parts.append(_gates(document))
    if document.ledger:
        parts.append(f"<details><summary>Stages</summary>\n\n{_stages(document)}\n\n</details>")
    warnings = [f"* {_escape(s.stage)}: {_escape(w)}" for s in document.ledger for w in s.warnings]
    if warnings:
        parts.append("**Warnings**\n\n" + "\n".join(warnings))
    return "\n\n".join(parts) + "\n"


def _opening(document: BuildDocument) -> str:
    cached = (
        f", {len(document.cached_stages)} of {len(document.ledger)} stages cached" if document.cached_stages else ""
    )
    return f"{format_seconds(document.seconds)}{cached}. Exit code {document.exit_code}."


def _targets(document: BuildDocument) -> str:
    metric = document.metric.name if document.metric else "metric"
    head = ("target", "proof", "size", "ratio", "cosine", "SQNR", "off by", _escape(metric), "p50", "float p50")
    rows = []
    for name, target in document.targets.items():
        p = target.parity
        rows.append(
            (
                _escape(name),
                target.proof if target.proven else f"⚠️ {target.proof}",
                format_bytes(target.bytes),
                f"{target.compression:.3g}×" if target.compression else "–",
                f"{p.cosine:.6f}" if p else "–",
                "–" if p is None else "exact" if p.sqnr_db >= EXACT_DB else f"{p.sqnr_db:.0f} dB",
                str(p.off_by_n) if p and p.off_by_n is not None else "–",
                format_number(target.metric),
                _milliseconds(target.latency_ms),
                _milliseconds(target.float_latency_ms),
            )
        )
    commands = [
        f"* {_escape(name)} is unproven here; prove it with `{t.proof_command}`"
        for name, t in document.targets.items()
        if not t.proven and t.proof_command
    ]
    return "\n\n".join([_table(head, rows), *(["\n".join(commands)] if commands else [])])


def _gates(document: BuildDocument) -> str:
    """What broke stands in the open; the rest folds away."""
    rows = [
        (
            f"{_MARKS[g.verdict]} {g.verdict}",
            f"`{g.name}`",
            _escape(format_limit(g.name, g.limit)),
            _escape(format_limit(g.name, g.value)),
            _escape(g.note),
        )
        for g in document.gates
    ]
    head = ("verdict", "gate", "limit", "value", "note")
    broken = [row for row, g in zip(rows, document.gates, strict=True) if not g.holds]
    held = [row for row, g in zip(rows, document.gates, strict=True) if g.holds]
    parts = [_table(head, broken)] if broken else []
    if held:
        parts.append(f"<details><summary>{len(held)} gates hold</summary>\n\n{_table(head, held)}\n\n</details>")
    return "\n\n".join(parts)


def _stages(document: BuildDocument) -> str:
    metric = document.metric.name if document.metric else "metric"
    head = ("stage", "verdict", "size", "parameters", "ratio", _escape(metric), "drop", "peak memory", "time")
    return _table(
        head,
        [
            (
                _escape(s.stage),
                f"{s.verdict}{', cached' if s.cached else ''}",
                format_bytes(s.bytes),
                format_number(s.parameters),
                f"{s.compression:.3g}×" if s.compression else "–",
                format_number(s.metric),
                format_number(s.drop),
                format_bytes(s.peak_memory),
                format_seconds(s.seconds),
            )
            for s in document.ledger
        ],
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _escape(text: str) -> str:
    """What a cell or a line can't hold: pipes would end it, angle brackets would be HTML."""
    for old, new in (("|", "\\|"), ("<", "&lt;"), (">", "&gt;"), ("\n", " ")):
        text = text.replace(old, new)
    return text


def _milliseconds(latency: Latency | None) -> str:
    return format_milliseconds(latency.p50 if latency else None)
