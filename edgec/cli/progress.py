"""How a build's progress looks: a live line on a terminal, one line a stage in a log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from edgec.cli.out import Out
    from edgec.report.document import StageRecord


class _Listener:
    """Prints finished stages, notes and warnings; keeps a live line of the running one when there is a terminal."""

    def __init__(self, out: Out, progress: Progress | None) -> None:
        self.out = out
        self.live = progress
        self.task: TaskID | None = None
        self.start = 0.0

    def started(self, stage: str) -> None:
        self.start = time.monotonic()
        if self.live is not None:
            self.task = self.live.add_task(stage, total=None, what="")
        else:
            self.out.progress(f"  {stage} …")

    def event(self, stage: str, event: dict[str, Any]) -> None:
        if "warning" in event:
            self._line(f"  {stage}: warning: {event['warning']}")
        elif "note" in event:
            self._line(f"  {stage}: {event['note']}")
        elif self.live is not None and self.task is not None:
            total = event["total"] or None
            self.live.update(self.task, completed=event["done"], total=total, what=event["what"])

    def finished(self, stage: str, record: StageRecord) -> None:
        if self.live is not None and self.task is not None:
            self.live.remove_task(self.task)
            self.task = None
        if record.cached:
            self._line(f"✓ {stage}: cached")
        elif record.verdict == "failed":
            self._line(f"✗ {stage}: failed")
        else:
            unchanged = " (unchanged)" if record.verdict == "unchanged" else ""
            self._line(f"✓ {stage}: {record.seconds:.1f} s{unchanged}")

    def _line(self, text: str) -> None:
        if self.live is not None:
            self.live.console.print(text, markup=False)
        else:
            self.out.progress(text)


@contextmanager
def watch(out: Out) -> Iterator[_Listener]:
    """A listener for one build; the live display ends with the block."""
    console = out.stderr
    if out.quiet or not console.is_terminal:
        yield _Listener(out, None)
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[what]}"),
        console=console,
        transient=True,
    ) as progress:
        yield _Listener(out, progress)
