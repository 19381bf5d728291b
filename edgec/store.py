"""The content-addressed store: every stage's result, under the SHA-256 of what made it.

    <root>/objects/<key[:2]>/<key>/out/…         what the stage made
    <root>/objects/<key[:2]>/<key>/result.json   what it reported, with the digest of out/
    <root>/work/<key>/                           checkpoints of an unfinished stage; a killed build resumes from here
    <root>/tmp/<key>-<random>/                   being written
    <root>/locks/<key>                           one builder per key
    <root>/downloads/                            packages (edgec/sources/fetch.py)

An object appears by one `rename`, so it is whole or absent; failures are never kept; two builds of the same recipe
share the work, the second waiting for the first.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgec.errors import Reason, StoreError

STORE_HINT = "set EDGEC_CACHE to a folder that can be written"
OUTPUT_HINT = "choose another output folder with --out"


def default_root() -> Path:
    """`$EDGEC_CACHE`, or the platform's cache folder."""
    if named := os.environ.get("EDGEC_CACHE"):
        return Path(named)
    from platformdirs import user_cache_path

    return user_cache_path("edgec")


def canonical(data: Any) -> bytes:
    """The one JSON text of some data, for hashing."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest_json(data: Any) -> str:
    return hashlib.sha256(canonical(data)).hexdigest()


def digest_tree(folder: Path) -> tuple[str, dict[str, str]]:
    """SHA-256 of a folder's files (sorted "name size sha256" lines), and each file's own by relative name."""
    files = {}
    lines = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            files[path.relative_to(folder).as_posix()] = digest = hashlib.file_digest(file, "sha256").hexdigest()
        lines.append(f"{path.relative_to(folder).as_posix()} {path.stat().st_size} {digest}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest(), files


def store_error(error: OSError, doing: str, *, hint: str = STORE_HINT) -> StoreError:
    """Turn the operating system's refusal into words. `hint` is for all but a full disk."""
    where = error.filename or ""
    if error.errno == errno.ENOSPC:
        return StoreError(
            f"no space left on the disk while {doing} {where}".rstrip(),
            hint="free some space (`edgec cache prune` removes old results), then run the same command again",
            reason=Reason.DISK_FULL,
        )
    return StoreError(
        f"{error.strerror or error} while {doing} {where}".rstrip(),
        hint=hint,
    )


@dataclass(frozen=True)
class Entry:
    """A finished stage in the store."""

    key: str
    path: Path

    @property
    def out(self) -> Path:
        return self.path / "out"

    @property
    def result(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads((self.path / "result.json").read_text())
        return data


class Store:
    """See the module's text for the layout. Raises `StoreError` where a folder can't be made or written."""

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            for name in ("objects", "work", "tmp", "locks", "downloads"):
                (root / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise store_error(error, "opening the store") from error

    @property
    def downloads(self) -> Path:
        return self.root / "downloads"

    def find(self, key: str) -> Entry | None:
        """The finished object of a key. Touches it, so that pruning knows it was used."""
        path = self._object(key)
        if not (path / "result.json").is_file():
            return None
        try:
            os.utime(path)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):  # a read-only store can still be read
                raise store_error(error, "reading the store") from error
        return Entry(key, path)

    def work(self, key: str) -> Path:
        """The folder where a stage keeps checkpoints until it is done."""
        path = self.root / "work" / key
        path.mkdir(parents=True, exist_ok=True)
        return path

    @contextmanager
    def writing(self, key: str) -> Iterator[Path]:
        """A temporary folder for `key`, removed when the block fails; call `commit` inside the block."""
        path = self.root / "tmp" / f"{key}-{uuid.uuid4().hex[:8]}"
        try:
            (path / "out").mkdir(parents=True)
        except OSError as error:
            raise store_error(error, "writing to the store") from error
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)  # what is left of a failure; a commit has moved it away

    def commit(self, key: str, path: Path, result: dict[str, Any]) -> Entry:
        """Make `path` the object of `key`, replacing an older one (`--force`)."""
        digest, _ = digest_tree(path / "out")
        final = self._object(key)
        try:
            (path / "result.json").write_text(json.dumps(result | {"digest": digest}, indent=1))
            final.parent.mkdir(parents=True, exist_ok=True)
            if final.exists():
                old = path.with_name(path.name + ".old")
                final.rename(old)
                path.rename(final)
                shutil.rmtree(old)
            else:
                path.rename(final)
            shutil.rmtree(self.root / "work" / key, ignore_errors=True)  # nobody resumes a finished stage
        except OSError as error:
            raise store_error(error, "keeping a result in the store") from error
        return Entry(key, final)

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Held by the one process that builds `key`. What a killed builder left in tmp/ is cleared on entry."""
        from filelock import FileLock

        try:
            with FileLock(self.root / "locks" / key[:40]):
                for stale in (self.root / "tmp").glob(f"{key}-*"):
                    shutil.rmtree(stale, ignore_errors=True)  # only this lock's holder may write there
                yield
        except OSError as error:
            raise store_error(error, "locking the store") from error

    def entries(self) -> list[Entry]:
        """All finished objects, the least recently used first."""
        paths = [p.parent for p in self.root.glob("objects/*/*/result.json")]
        return [Entry(p.name, p) for p in sorted(paths, key=lambda p: p.stat().st_mtime)]

    def _object(self, key: str) -> Path:
        return self.root / "objects" / key[:2] / key


def tree_bytes(path: Path) -> int:
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
