"""Work for the simulator: requests from a trace file, or drawn at random; and what a step costs."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from edgec.errors import Reason, SourceError, UsageError

_MAX_TOKENS = 1 << 24  # of a prompt or an answer; more is a damaged trace
_MAX_REQUESTS = 10_000_000


@dataclass(frozen=True)
class Request:
    """One line of a trace.

    Args:
        arrival: seconds.
        prompt: tokens.
        answer: tokens that the model would answer with.
        max_tokens: what the client allows; 0: until the context is full.
        prefix: requests of one prefix begin with the same `prefix_tokens` tokens, which the prefix cache can find.
    """

    arrival: float
    prompt: int
    answer: int
    max_tokens: int = 0
    priority: int = 0
    tenant: str = "all"
    weight: float = 1.0
    prefix: str = ""
    prefix_tokens: int = 0


_CASTS: dict[str, type] = {f.name: {"float": float, "int": int, "str": str}[str(f.type)] for f in fields(Request)}
_NEEDED = ("arrival", "prompt", "answer")


def read_trace(path: Path) -> list[Request]:
    """Requests from `.jsonl` (one object a line) or `.csv` (a header line), sorted by arrival.

    Raises:
        SourceError: the file can't be read, or a line isn't a request; the message has the line's number.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path} can't be read: {error}") from error
    rows = _csv_rows(path, text) if path.suffix.lower() == ".csv" else _json_rows(path, text)
    made = [_request(path, line, row) for line, row in rows]
    if not made:
        raise SourceError(f"{path} has no request in it", reason=Reason.EMPTY_DATA)
    return sorted(made, key=lambda r: r.arrival)


def _json_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _bad(path, number, f"not JSON: {error}") from error
        if not isinstance(row, dict):
            raise _bad(path, number, "not a JSON object")
        yield number, row


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(text.splitlines())
    for row in reader:
        if None in row:
            raise _bad(path, reader.line_num, "more values than the header has names")
        yield reader.line_num, {k: v for k, v in row.items() if v not in ("", None)}


def _request(path: Path, line: int, row: Mapping[str, Any]) -> Request:
    unknown = [name for name in row if name not in _CASTS]
    if unknown:
        raise _bad(path, line, f"unknown field `{unknown[0]}`; the fields are {', '.join(_CASTS)}")
    missing = [name for name in _NEEDED if name not in row]
    if missing:
        raise _bad(path, line, f"no `{missing[0]}`")
    values: dict[str, Any] = {}
    for name, value in row.items():
        cast = _CASTS[name]
        try:
            values[name] = cast(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise _bad(path, line, f"`{name}` is {value!r}, which is no {cast.__name__}") from error
    made = Request(**values)
    limits = {
        "arrival": math.isfinite(made.arrival) and made.arrival >= 0,
        "prompt": 1 <= made.prompt <= _MAX_TOKENS,
        "answer": 1 <= made.answer <= _MAX_TOKENS,
        "max_tokens": 0 <= made.max_tokens <= _MAX_TOKENS,
        "priority": -8 <= made.priority <= 7,
        "weight": math.isfinite(made.weight) and made.weight > 0,
        "prefix_tokens": 0 <= made.prefix_tokens <= _MAX_TOKENS,
    }
    for name, good in limits.items():
        if not good:
            raise _bad(path, line, f"`{name}` is out of range: {getattr(made, name)!r}")
    return made


def _bad(path: Path, line: int, what: str) -> SourceError:
    return SourceError(f"{path}:{line}: {what}", reason=Reason.BAD_DATA)


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens, each at least 1.

    `fixed:N`, `uniform:LOW:HIGH`, `exponential:MEAN`, or `lognormal:MEAN:SIGMA` (of the logarithm).
    """

    kind: str
    numbers: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """From the command line's spelling; raises UsageError with the spellings there are."""
        kind, *rest = text.split(":")
        wanted = {"fixed": 1, "uniform": 2, "exponential": 1, "lognormal": 2}
        try:
            numbers = tuple(float(n) for n in rest)
        except ValueError:
            numbers = ()
        good = len(numbers) == wanted.get(kind, -1) and all(math.isfinite(n) and 0 < n <= _MAX_TOKENS for n in numbers)
        if not good or (kind == "uniform" and numbers[0] > numbers[1]) or (kind == "lognormal" and numbers[1] > 5):
            raise UsageError(
                f"not a distribution of lengths: {text!r}",
                hint="write fixed:128, uniform:16:512, exponential:128 (mean) or lognormal:128:0.8 (mean and sigma)",
            )
        return cls(kind, numbers)

    def draw(self, source: random.Random) -> int:
        """One length."""
        first, *rest = self.numbers
        if self.kind == "fixed":
            value = first
        elif self.kind == "uniform":
            value = source.uniform(first - 0.5, rest[0] + 0.5)
        elif self.kind == "exponential":
            value = source.expovariate(1.0 / first)
        else:
            value = source.lognormvariate(math.log(first) - rest[0] ** 2 / 2, rest[0])
        return min(max(1, round(value)), _MAX_TOKENS)

    def __str__(self) -> str:
        return ":".join([self.kind, *(f"{n:g}" for n in self.numbers)])


@dataclass(frozen=True)
class TenantMix:
    """A tenant of random work: `share` of the requests are its own."""

    name: str
    weight: float = 1.0
    share: float = 1.0
    priority: int = 0

    @classmethod
    def parse(cls, text: str) -> TenantMix:
        """`name[:weight[:share[:priority]]]`."""
        name, *rest = text.split(":")
        try:
            weight, share, priority = [*rest, *("1", "1", "0")[len(rest) :]][:3]
            made = cls(name, float(weight), float(share), int(priority))
        except ValueError:
            made = cls("")
        numbers = made.weight > 0 and made.share > 0 and math.isfinite(made.weight) and math.isfinite(made.share)
        if not made.name or len(rest) > 3 or not numbers or not -8 <= made.priority <= 7:
            raise UsageError(
                f"not a tenant: {text!r}",
                hint="write name, or name:weight, name:weight:share, name:weight:share:priority (−8 to 7)",
            )
        return made


def random_requests(
    count: int,
    rate: float,
    prompt: Lengths,
    answer: Lengths,
    *,
    tenants: Sequence[TenantMix] = (),
    shared_prefix: int = 0,
    seed: int = 0,
) -> list[Request]:
    """Poisson arrivals at `rate` requests per second; 0: all are there at the start. Equal seeds, equal requests."""
    if not 1 <= count <= _MAX_REQUESTS:
        raise UsageError(f"requests must be 1 to {_MAX_REQUESTS:,}, not {count:,}")
    source = random.Random(seed)
    mixes = list(tenants) or [TenantMix("all")]
    shares = [m.share for m in mixes]
    made, now = [], 0.0
    for _ in range(count):
        now += source.expovariate(rate) if rate > 0 else 0.0
        mix = source.choices(mixes, shares)[0]
        lengths = (prompt.draw(source) + shared_prefix, answer.draw(source))
        tenant = {"priority": mix.priority, "tenant": mix.name, "weight": mix.weight}
        made.append(Request(now, *lengths, **tenant, prefix_tokens=shared_prefix))  # type: ignore[arg-type]
    return made


@dataclass(frozen=True)
class Cost:
    """Seconds of a step with r rows and s sequences: `fixed + per_row · r + per_sequence · s`.

    With a `table` of (rows, seconds), ascending: straight lines between its points and beyond them, in place of the
    first two. The defaults are those of SmolLM2-135M in INT8 on two cores with AVX2.
    """

    fixed: float = 0.007
    per_row: float = 0.0015
    per_sequence: float = 0.00005
    table: tuple[tuple[float, float], ...] = ()


def cost_from_bench(path: Path) -> Cost:
    """The step times that `edgec bench --json` measured.

    Raises:
        SourceError: not such a file.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path} can't be read: {error}") from error
    table = dict(_step_times(document)) if isinstance(document, dict) else {}
    if len(table) < 2:
        raise SourceError(
            f"{path} has no step times in it",
            hint="it should be what `edgec bench BUNDLE --json` prints",
            reason=Reason.BAD_DATA,
        )
    return Cost(0.0, 0.0, 0.0, tuple(sorted(table.items())))


def _step_times(document: Mapping[str, Any]) -> Iterator[tuple[float, float]]:
    """`(rows, seconds)`: a prefill of n tokens is a step of n rows, a decode at batch b one of b rows."""
    for section, size in (("prefill", "tokens"), ("decode", "batch")):
        rows = document.get(section)
        for row in rows if isinstance(rows, list) else []:
            if not isinstance(row, dict):
                continue
            count, rate = row.get(size), row.get("tokens_per_second")
            if isinstance(count, int | float) and isinstance(rate, int | float) and count >= 1 and rate > 0:
                yield float(count), float(count) / float(rate)
