"""Charts as inline SVG: rows with names, and beside them panels of bars or dots that share the rows.

One form serves all of the report: a stage's size stands on the same line as its metric, a target's parity on the same
line as its latency. Colours are CSS classes (see report.css.j2), so the page's light and dark modes hold for them too.
Everything that comes from outside is escaped; the result is safe to put into the page as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

from markupsafe import Markup

WIDTH = 1040
_NAMES = 132  # px for the rows' names
_GAP = 40  # px between panels
_HEAD = 30  # px for the panels' titles


@dataclass(frozen=True)
class Bars:
    """One bar a row from zero; `twins` draws a second, paler one below it, `whiskers` a line from the bar's end on."""

    title: str
    values: Sequence[float | None]
    show: Callable[[float], str]
    twins: Sequence[float | None] = ()
    whiskers: Sequence[float | None] = ()
    notes: Sequence[str] = ()  # behind each number
    room: int = 84  # px kept free at the right of a bar for its number


@dataclass(frozen=True)
class Dots:
    """Dots on one axis; `reference` draws a vertical line. On a logarithmic axis zeros stand at the left end."""

    title: str
    points: Sequence[Sequence[float]]
    show: Callable[[float], str]
    log: bool = False
    reference: float | None = None
    reference_name: str = ""
    labels: Sequence[str] = field(default_factory=tuple)  # beside each row's last dot


def chart(names: Sequence[str], panels: Sequence[Bars | Dots], *, title: str, faded: Sequence[bool] = ()) -> Markup:
    """The SVG. `title` is read to those who can't see it; `faded` rows (cached, unproven) are drawn paler."""
    row = 40 if any(isinstance(p, Bars) and any(v is not None for v in p.twins) for p in panels) else 30
    axis = 26 if any(isinstance(p, Dots) for p in panels) else 6
    height = _HEAD + row * len(names) + axis
    width = (WIDTH - _NAMES - _GAP * (len(panels) - 1)) / len(panels)
    pale = list(faded) or [False] * len(names)
    parts = []
    for i, name in enumerate(names):
        y = _HEAD + row * i
        parts.append(f'<line class="rule" x1="0" x2="{WIDTH}" y1="{y}" y2="{y}"/>')
        short = name if len(name) <= 18 else f"{name[:17]}…"
        parts.append(f'<text class="name" x="0" y="{y + row / 2 + 4:.1f}">{escape(short)}</text>')
    for k, panel in enumerate(panels):
        x = _NAMES + k * (width + _GAP)
        parts.append(f'<text class="head" x="{x:.1f}" y="18">{escape(panel.title)}</text>')
        draw = _bars if isinstance(panel, Bars) else _dots
        parts += draw(panel, x, width, row, pale)  # type: ignore[arg-type]
    body = "\n".join(parts)
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">\n{body}\n</svg>'
    )


def _bars(panel: Bars, x: float, width: float, row: int, pale: list[bool]) -> list[str]:
    # A whisker may be a single outlier: it is cut off before it squeezes the bars.
    top = max((v for series in (panel.values, panel.twins) for v in series if v is not None), default=0.0) or 1.0
    longest = max((v for v in panel.whiskers if v is not None), default=0.0)
    top = max(top, min(longest, 1.5 * top))
    scale = (width - panel.room) / top
    doubled = any(v is not None for v in panel.twins)
    thick = 11 if doubled else 14
    parts = []
    for i, value in enumerate(panel.values):
        middle = _HEAD + row * i + row / 2
        y = middle - thick - 1 if doubled else middle - thick / 2
        style = "bar pale" if pale[i] else "bar"
        note = panel.notes[i] if panel.notes else ""
        whisker = panel.whiskers[i] if panel.whiskers else None
        whisker = None if whisker is None else min(whisker, top)
        parts += _bar(x, y, value, scale, thick, style, panel.show, note, beyond=whisker or 0.0)
        if whisker is not None and value is not None:
            start, end, line = x + value * scale, x + whisker * scale, y + thick / 2
            parts.append(f'<line class="whisker" x1="{start:.1f}" x2="{end:.1f}" y1="{line:.1f}" y2="{line:.1f}"/>')
        if doubled:
            parts += _bar(x, middle + 1, panel.twins[i], scale, thick, "twin", panel.show, "")
    return parts


def _bar(
    x: float,
    y: float,
    value: float | None,
    scale: float,
    thick: int,
    style: str,
    show: Callable[[float], str],
    note: str,
    beyond: float = 0.0,
) -> list[str]:
    if value is None:
        return (
            [f'<text class="none" x="{x:.1f}" y="{y + thick - 2:.1f}">not measured</text>'] if style != "twin" else []
        )
    length = max(1.5, value * scale)
    text = f"{show(value)} {note}".strip()
    end = x + max(length, beyond * scale) + 6
    return [
        f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{length:.1f}" height="{thick}" rx="2">'
        f"<title>{escape(text)}</title></rect>",
        f'<text class="value" x="{end:.1f}" y="{y + thick - 2:.1f}">{escape(text)}</text>',
    ]


def _dots(panel: Dots, x: float, width: float, row: int, pale: list[bool]) -> list[str]:
    place, ticks = _axis(panel, x, width - 56 if panel.labels else width - 8)
    bottom = _HEAD + row * len(panel.points)
    parts = []
    for value, label in ticks:
        at = place(value)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_HEAD}" y2="{bottom}"/>')
        parts.append(f'<text class="tick" x="{at:.1f}" y="{bottom + 16}">{escape(label)}</text>')
    if panel.reference is not None:
        at = place(panel.reference)
        parts.append(
            f'<line class="reference" x1="{at:.1f}" x2="{at:.1f}" y1="{_HEAD}" y2="{bottom}">'
            f"<title>{escape(panel.reference_name)}</title></line>"
        )
    for i, points in enumerate(panel.points):
        y = _HEAD + row * i + row / 2
        if not points:
            parts.append(f'<text class="none" x="{x:.1f}" y="{y + 4:.1f}">not measured</text>')
        for value in points:
            style = "dot pale" if pale[i] else "dot"
            parts.append(
                f'<circle class="{style}" cx="{place(value):.1f}" cy="{y:.1f}" r="4.5">'
                f"<title>{escape(panel.show(value))}</title></circle>"
            )
        if points and panel.labels:
            at = max(place(v) for v in points) + 9
            parts.append(f'<text class="value" x="{at:.1f}" y="{y + 4:.1f}">{escape(panel.labels[i])}</text>')
    return parts


def _axis(panel: Dots, x: float, width: float) -> tuple[Callable[[float], float], list[tuple[float, str]]]:
    """`(value → x, ticks)`."""
    values = [v for points in panel.points for v in points]
    if panel.reference is not None:
        values.append(panel.reference)
    if panel.log:
        positive = [v for v in values if v > 0.0] or [1.0]
        low = math.floor(math.log10(min(positive))) - 1
        high = max(low + 2, math.ceil(math.log10(max(positive))))
        every = max(1, (high - low) // 4)

        def log_place(value: float) -> float:
            exponent = math.log10(value) if value > 0.0 else low
            return x + 6 + (width - 12) * (max(exponent, low) - low) / (high - low)

        marks = [(10.0**e, f"1e{e}") for e in range(low + every, high + 1, every)]
        return log_place, [(0.0, "0"), *marks]
    low_value, high_value = min(values, default=0.0), max(values, default=1.0)
    margin = (high_value - low_value) * 0.15 or abs(high_value) * 0.05 or 1.0
    low_value, high_value = low_value - margin, high_value + margin

    def place(value: float) -> float:
        return x + 6 + (width - 12) * (value - low_value) / (high_value - low_value)

    step = _nice((high_value - low_value) / 3)
    first = math.ceil(low_value / step) * step
    count = int((high_value - first) / step) + 1
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return place, [(first + i * step, f"{first + i * step:.{decimals}f}") for i in range(count)]


def _nice(rough: float) -> float:
    """The nearest of 1, 2, 5 · 10ⁿ at or above `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= rough * 0.999)
