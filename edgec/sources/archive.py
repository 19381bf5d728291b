"""Take files out of an archive without trusting it: zip and wheel, tar (gzip, bzip2, xz, zstd), and Debian packages.

Nothing in an archive is run, and only the wanted members are written. Refused whole, as UNSAFE_FILE: a member with
an absolute name or `..` in it (whether wanted or not), and, among the wanted ones, a link that leaves the archive, a
device, and more bytes than an honest archive of that size could hold.
"""

from __future__ import annotations

import lzma
import re
import shutil
import stat
import subprocess
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from edgec.errors import Reason, SourceError, ToolMissing

# DEFLATE can't pass 1032:1 and weights seldom pass 5:1; small archives may hold up to the floor whatever their ratio.
MAX_RATIO = 100
FLOOR = 256 * 2**20
_CHUNK = 2**20
_DAMAGED = (zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, NotImplementedError, ValueError)


@dataclass
class _Budget:
    """Bytes that may still be written."""

    archive: Path
    left: int

    def copy(self, source: IO[bytes], destination: Path) -> None:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with destination.open("wb") as out:
            while chunk := source.read(_CHUNK):
                self.left -= len(chunk)
                if self.left < 0:
                    raise _unsafe(self.archive, f"unpacks to over {MAX_RATIO} times its size")
                out.write(chunk)


def extract(archive: Path, names: re.Pattern[str], out: Path, *, strip: str = "") -> list[str]:
    """Write the members whose whole name matches `names` under `out`; gives their names, sorted.

    Args:
        strip: "first" takes the first folder off every name (npm's `package/`).

    Raises:
        SourceError: UNSAFE_FILE for what the module refuses; BAD_CHECKPOINT for a damaged or unknown archive.
        ToolMissing: the archive needs `zstd`, which isn't here.
    """
    budget = _Budget(archive, max(FLOOR, archive.stat().st_size * MAX_RATIO))
    try:
        with archive.open("rb") as file:
            magic = file.read(8)
        if magic.startswith(b"PK"):
            return sorted(_from_zip(archive, names, out, budget, strip))
        if magic == b"!<arch>\n":
            with _debian_data(archive) as data:
                return sorted(_from_tar(data, names, out, budget, strip))
        return sorted(_from_tar(archive, names, out, budget, strip))
    except _DAMAGED as cause:
        raise SourceError(
            f"{archive.name} is not an archive that can be read: {cause}",
            hint="it may be truncated: remove it from the cache and fetch it again",
            reason=Reason.BAD_CHECKPOINT,
        ) from cause


def member_names(archive: Path, *, strip: str = "") -> list[str]:
    """The names of all files in an archive that `extract` could read, sorted."""
    names = set()
    with archive.open("rb") as file:
        magic = file.read(8)
    if magic.startswith(b"PK"):
        with zipfile.ZipFile(archive) as bundle:
            names = {_safe_name(archive, i.filename, strip) for i in bundle.infolist() if not i.is_dir()}
    elif magic == b"!<arch>\n":
        with _debian_data(archive) as data, _tar(data) as tar:
            names = {_safe_name(archive, m.name, strip) for m in tar if not m.isdir()}
    else:
        with _tar(archive) as tar:
            names = {_safe_name(archive, m.name, strip) for m in tar if not m.isdir()}
    return sorted(names)


def _unsafe(archive: Path, what: str) -> SourceError:
    return SourceError(
        f"{archive.name} is refused: it {what}", hint="get the file from a source you trust", reason=Reason.UNSAFE_FILE
    )


def _safe_name(archive: Path, name: str, strip: str) -> str:
    """The member's name without `./` and what `strip` says; raises when it points outside."""
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if ".." in parts or name.startswith(("/", "\\")) or re.match(r"^[A-Za-z]:", "/".join(parts)) or "\0" in name:
        raise _unsafe(archive, f"has a member named {name!r}, outside of itself")
    if strip == "first":
        parts = parts[1:]
    return "/".join(parts)


def _from_zip(archive: Path, names: re.Pattern[str], out: Path, budget: _Budget, strip: str) -> Iterator[str]:
    with zipfile.ZipFile(archive) as bundle:
        members = [(_safe_name(archive, info.filename, strip), info) for info in bundle.infolist()]
        for name, info in members:
            if not name or info.is_dir() or not names.fullmatch(name):
                continue
            mode = info.external_attr >> 16
            if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
                raise _unsafe(archive, f"has {name!r}, which is a link or a device")
            with bundle.open(info) as source:
                budget.copy(source, out / name)
            yield name


def _from_tar(path: Path, names: re.Pattern[str], out: Path, budget: _Budget, strip: str) -> Iterator[str]:
    with _tar(path) as bundle:
        total = 0
        for member in bundle:
            name = _safe_name(budget.archive, member.name, strip)
            total += member.size
            if total > budget.left * 4:  # skipping a bomb costs time even when it isn't wanted
                raise _unsafe(budget.archive, f"claims to hold {total:,} bytes")
            if not name or member.isdir() or not names.fullmatch(name):
                continue
            if member.issym() or member.islnk():
                _check_link(budget.archive, member)
            elif not member.isreg():
                raise _unsafe(budget.archive, f"has {name!r}, which is a device")
            source = _open_member(bundle, member)
            if source is None:
                raise _unsafe(budget.archive, f"has the link {name!r} to {member.linkname!r}, which isn't in it")
            with source:
                budget.copy(source, out / name)
            yield name


def _open_member(bundle: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes] | None:
    """A member's bytes, those of its target when it is a link; None when the target is missing or not a file."""
    try:
        return bundle.extractfile(member)
    except (KeyError, RecursionError):
        return None


def _check_link(archive: Path, member: tarfile.TarInfo) -> None:
    """Raise when a link points out of the archive; a symbolic link starts at its own folder, a hard one at the root."""
    depth = len(PurePosixPath(member.name).parts) - 1 if member.issym() else 0
    for part in PurePosixPath(member.linkname).parts:
        depth += -1 if part == ".." else part != "."
        if depth < 0 or part.startswith("/"):
            raise _unsafe(archive, f"has the link {member.name!r} to {member.linkname!r}, outside of itself")


@contextmanager
def _tar(path: Path) -> Iterator[tarfile.TarFile]:
    with path.open("rb") as file:
        zstd = file.read(4) == b"\x28\xb5\x2f\xfd"
    if not zstd:
        with tarfile.open(path, "r:*") as bundle:
            yield bundle
        return
    program = shutil.which("zstd")
    if program is None:
        raise ToolMissing(f"{path.name} is compressed with zstd, which isn't here", hint="apt-get install zstd")
    with tempfile.TemporaryFile() as plain:
        done = subprocess.run([program, "-dcq", str(path)], stdout=plain, stderr=subprocess.PIPE, check=False)
        if done.returncode:
            raise EOFError(done.stderr.decode(errors="replace").strip())
        plain.seek(0)
        with tarfile.open(fileobj=plain, mode="r:") as bundle:
            yield bundle


@contextmanager
def _debian_data(package: Path) -> Iterator[Path]:
    """The `data.tar.*` of a Debian package, as a temporary file. An ar header: name 16, …, size 10 bytes, then `\\n."""
    with package.open("rb") as file, tempfile.TemporaryDirectory() as folder:
        file.seek(8)
        while header := file.read(60):
            if len(header) < 60 or header[58:] != b"`\n":
                raise EOFError("a damaged ar header")
            name, size = header[:16].decode(errors="replace").strip().rstrip("/"), int(header[48:58])
            if name.startswith("data.tar"):
                data = Path(folder) / name.replace("/", "_")
                with data.open("wb") as out:
                    left = size
                    while left and (chunk := file.read(min(left, _CHUNK))):
                        left -= out.write(chunk)
                if left:
                    raise EOFError("data.tar is cut short")
                yield data
                return
            file.seek(size + size % 2, 1)
    raise EOFError("no data.tar in it")
