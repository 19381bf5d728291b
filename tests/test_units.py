"""Sizes and times as people write and read them."""

from __future__ import annotations

import pytest

from edgec.units import format_bytes, format_milliseconds, format_number, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (3, 3),
        ("3", 3),
        ("3 MB", 3_000_000),
        ("3mb", 3_000_000),
        ("2.5 MiB", 2_621_440),
        (" 1 kB ", 1000),
        ("1GiB", 2**30),
    ],
)
def test_sizes_are_read(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MB", "-1 MB", "3 M", "3 MBit", "1e3", "NaN", True, None, [3]])
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)  # type: ignore[arg-type]


def test_numbers_are_short() -> None:
    assert [format_bytes(n) for n in (0, 999, 1000, 83_333, 999_600, 4_650_000, 1.5e9, 2e12, None)] == [
        *("0 B", "999 B", "1 kB", "83.3 kB", "1 MB", "4.65 MB", "1.5 GB", "2 TB", "–"),
    ]
    assert [format_seconds(s) for s in (0.04, 9.94, 9.96, 119, 185, None)] == [
        *("0.0 s", "9.9 s", "10 s", "119 s", "3 m 05 s", "–"),
    ]
    assert [format_milliseconds(m) for m in (0.0336, 0.1, 2.87, 1200.0, None)] == [
        *("33.6 µs", "0.1 ms", "2.87 ms", "1.2 s", "–"),
    ]
    assert [format_number(n) for n in (1546, 0.123456, 20.0, 1.2e-5, None)] == ["1,546", "0.1235", "20", "1.2e-05", "–"]
