"""SHA-256 of a file, and of a set of files.

A set's digest is that of the lines `<sha256>  <name>`, sorted and each ended by a newline, which a shell says as
`find . -type f -printf '%P\\n' | xargs -d'\\n' sha256sum | sort | sha256sum`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_digest(files: Iterable[tuple[str, Path]]) -> str:
    """SHA-256 of a set of `(name, path)`; the order does not matter."""
    lines = sorted(f"{file_digest(path)}  {name}\n" for name, path in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def tree_digest(folder: Path) -> str:
    """SHA-256 of a folder: of its files, by their names relative to it."""
    return files_digest((p.relative_to(folder).as_posix(), p) for p in folder.rglob("*") if p.is_file())


def path_digest(path: Path) -> str:
    """SHA-256 of a file, or of a folder's files."""
    return tree_digest(path) if path.is_dir() else file_digest(path)
