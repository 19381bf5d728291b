"""Where the command line's words go: data to stdout, progress and errors to stderr.

One `Out` per process decides between people, `--json` and `--quiet`, so that no command has to. With `--json` stdout
holds exactly one JSON document, also when the command fails.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from edgec.errors import EdgecError


@dataclass
class Out:
    """How to talk. `json` and `quiet` are set by the command that runs."""

    json: bool = False
    quiet: bool = False
    debug: bool = False
    interrupted: str = "interrupted; finished stages are kept, the same command goes on from there"

    @property
    def stderr(self) -> Console:
        from rich.console import Console

        return Console(stderr=True, quiet=self.quiet, highlight=False)

    def show(self, renderable: RenderableType) -> None:
        """The command's result for people; nothing under `--json`."""
        if not self.json:
            from rich.console import Console

            # A pipe has no width of its own: 80 columns would cut the tables that CI logs are read for.
            width = None if sys.stdout.isatty() else 160
            Console(highlight=False, width=width).print(renderable)

    def document(self, data: Any) -> None:
        """The command's result for machines; nothing without `--json`."""
        if self.json:
            print(json.dumps(data, indent=2, sort_keys=False, allow_nan=False))

    def progress(self, text: str) -> None:
        """A line about what is going on."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def error(self, error: EdgecError) -> None:
        """What happened and what to do, on stderr."""
        print(f"edgec: {error.message} [{error.reason}]", file=sys.stderr)
        if error.hint:
            print(f"  {error.hint}", file=sys.stderr)


out = Out()
