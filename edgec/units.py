"""Sizes, times and shares as people write and read them."""

from __future__ import annotations

import re

# SI and IEC are different numbers and both are in use: "3 MB" is 3,000,000 bytes, "3 MiB" is 3 · 2²⁰.
_BYTES = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


def parse_bytes(text: str | int | float) -> int:
    """`"3 MB"` → 3000000; whole numbers are bytes. Raises ValueError with what was expected."""
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise ValueError(f"not a size: {text!r}; write bytes, or for example `3 MB` or `2.5 MiB`")
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if found is None or found[2].upper() not in _BYTES:
        raise ValueError(f"not a size: {text!r}; write bytes, or for example `3 MB` or `2.5 MiB`")
    return round(float(found[1]) * _BYTES[found[2].upper()])


def format_bytes(count: int | float | None) -> str:
    """Three significant digits in SI units; "–" for None."""
    if count is None:
        return "–"
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def format_seconds(seconds: float | None) -> str:
    """ "0.8 s", "42 s", "3 m 05 s"; "–" for None."""
    if seconds is None:
        return "–"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} m {rest:02d} s"


def format_milliseconds(milliseconds: float | None) -> str:
    """ "33.6 µs", "2.87 ms", "1.2 s"; "–" for None."""
    if milliseconds is None:
        return "–"
    if milliseconds < 0.0995:
        return f"{milliseconds * 1000:.3g} µs"
    return f"{milliseconds:.3g} ms" if milliseconds < 999.5 else f"{milliseconds / 1000:.3g} s"


def format_number(value: float | int | None) -> str:
    """A metric or a ratio with four significant digits, without a tail of zeros; "–" for None."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}"


def format_percent(share: float | None) -> str:
    """0.942 → "94.2%"; "–" for None."""
    return "–" if share is None else f"{share:.1%}"
