"""Fenced blocks of a page in docs/: files (```` ```python name.py ````) and commands (```` ```console ````)."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
_FENCE = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """One line behind a `$`, and the exit code that its comment promises (0 without one)."""

    words: list[str]
    exit_code: int


def page_files(page: str) -> dict[str, str]:
    """Name → text of every block that names a file."""
    return {name: text for _, name, text in _FENCE.findall((DOCS / page).read_text()) if name}


def page_commands(page: str) -> list[Command]:
    """Every command of the page's console blocks, in order."""
    commands = []
    for language, _, text in _FENCE.findall((DOCS / page).read_text()):
        if language == "console":
            for line in text.splitlines():
                found = re.fullmatch(r"\$ (.*?)(?:\s+# exits with (\d+))?", line)
                assert found, f"{page}: not a command: {line}"
                commands.append(Command(shlex.split(found[1]), int(found[2] or 0)))
    return commands


def write_page_files(page: str, folder: Path) -> None:
    """Write the page's files into `folder`."""
    for name, text in page_files(page).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
