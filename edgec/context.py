"""What a stage gets besides its model and its options, and what it can tell the world.

A `Context` belongs to one run of one stage, in that stage's own process. Everything a stage says through it ends up in
the stage's `result.json`, in the ledger and in the report; nothing is printed directly.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any


@dataclass(frozen=True)
class Table:
    """A table for the report (a sensitivity table, pruned groups). Cells are strings or numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | int, ...], ...]


@dataclass
class StageLog:
    """What a stage reported about itself."""

    verdict: str = "changed"  # changed | unchanged
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)  # seconds by part of the stage

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Context:
    """One stage's surroundings.

    Attributes:
        seed: of everything random in this stage.
        threads: how many threads to compute with.
        work: a folder that survives a killed build, for this stage's checkpoints; removed once the stage succeeds.
        recipe_dir: what relative paths in options are relative to.
        cache: where downloads live.
        out: the empty folder that a target (or the export) fills; passes leave it alone.
        log: what the stage has reported so far.
        events: where progress goes (one JSON object a line), or None.
    """

    seed: int
    threads: int
    work: Path
    recipe_dir: Path
    cache: Path
    out: Path
    log: StageLog = field(default_factory=StageLog)
    events: IO[str] | None = None

    def progress(self, done: float, total: float, what: str = "") -> None:
        """Say how far the stage is (`done` of `total`, any unit), with a few words on what it is doing."""
        self._emit({"done": done, "total": total, "what": what})

    def note(self, text: str) -> None:
        """One line for the ledger and the report."""
        self.log.notes.append(text)
        self._emit({"note": text})

    def warn(self, text: str) -> None:
        """Something a user should act on, though the stage went on."""
        self.log.warnings.append(text)
        self._emit({"warning": text})

    def table(self, title: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
        self.log.tables.append(Table(title, columns, tuple(tuple(r) for r in rows)))

    def metric(self, name: str, value: float) -> None:
        """A number of this stage that the report shows beside the task's own metric."""
        self.log.metrics[name] = value

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count the seconds of the block as that part of the stage; parts of one name add up."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.log.timings[part] = self.log.timings.get(part, 0.0) + time.perf_counter() - start

    def unchanged(self, why: str) -> None:
        """The stage looked, and left the model as it was."""
        self.log.verdict = "unchanged"
        self.note(why)

    def _emit(self, event: dict[str, Any]) -> None:
        if self.events is not None:
            print(json.dumps(event), file=self.events, flush=True)
        else:
            print(event.get("note") or event.get("warning") or "", end="", file=sys.stderr)
