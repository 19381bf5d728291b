"""Turn a reference into verified local files.

Packages are downloaded once into `cache/downloads/packages/`, and the files that a reference means are unpacked once
into `cache/downloads/files/`, each in a folder that appears whole or not at all: two processes may ask for the same
reference at once, and a killed one leaves nothing behind that counts. What is cached needs no network.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from edgec.errors import Reason, RecipeError, SourceError, StoreError
from edgec.sources.digest import file_digest, files_digest, path_digest
from edgec.sources.reference import Reference, fixed_prefix, parse_reference, wanted


def fetch(reference: str, sha256: str | None, *, recipe_dir: Path, cache: Path) -> Path:
    """The one file or folder that `reference` names, with the digest that was asked for.

    Args:
        reference: see `edgec.sources.reference`; local paths are relative to `recipe_dir`.
        sha256: of the file, or of the folder (see `edgec.sources.digest`). May be None for local paths only.
        cache: the cache folder; downloads lie in its `downloads/`.

    Raises:
        RecipeError: the reference is malformed, or is remote and has no digest (the hint gives it).
        SourceError: SOURCE_NOT_FOUND, DIGEST_MISMATCH (both digests are in the message), or UNSAFE_FILE.
        StoreError: the cache can't be written.
    """
    ref = parse_reference(reference)
    if ref.is_glob:
        files = fetch_all(reference, sha256, recipe_dir=recipe_dir, cache=cache)
        if len(files) != 1:
            raise RecipeError(f"`{reference}` means {len(files)} files where one is wanted", hint="name one file")
        return files[0]
    if ref.is_local:
        path = recipe_dir / Path(ref.path).expanduser()
        if not path.exists():
            raise SourceError(f"{path} does not exist", hint=_neighbours(path))
    else:
        path = _unpacked(ref, cache) / ref.path
    _verify(ref, sha256, lambda: path_digest(path) if path.is_dir() else _cached_digest(path, cache), path)
    return path


def fetch_all(reference: str, sha256: str | None, *, recipe_dir: Path, cache: Path) -> list[Path]:
    """All files that `reference` names (wildcards, or everything in a folder), sorted by name.

    `sha256` is the digest of their set, with names relative to the folder in front of the first wildcard. A reference
    to one file gives that file, and `sha256` is that file's own. Raises as `fetch` does.
    """
    ref = parse_reference(reference)
    if not ref.is_glob:
        path = fetch(reference, sha256, recipe_dir=recipe_dir, cache=cache)
        return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    prefix = fixed_prefix(ref.path)
    root = (recipe_dir / Path(prefix).expanduser()) if ref.is_local else _unpacked(ref, cache) / prefix
    rest = wanted(ref.path[len(prefix) :].lstrip("/"))
    files = sorted(p for p in root.rglob("*") if p.is_file() and rest.fullmatch(p.relative_to(root).as_posix()))
    if not files:
        raise SourceError(f"no file matches {reference}", hint=f"looked in {root}")
    _verify(ref, sha256, lambda: files_digest((p.relative_to(root).as_posix(), p) for p in files), root)
    return files


def _verify(ref: Reference, sha256: str | None, digest: Callable[[], str], path: Path) -> None:
    if sha256 is None and ref.is_local:
        return
    actual = digest()
    if sha256 is None:
        raise RecipeError(
            f"`{ref.text}` is downloaded, so it needs its SHA-256 in the recipe",
            hint=f"after checking that it is what you want, pin it with  sha256: {actual}",
            reason=Reason.DIGEST_MISMATCH,
        )
    if actual != sha256.strip().lower().removeprefix("sha256:"):
        where = "" if ref.is_local else f"; to download it again, remove {path}"
        raise SourceError(
            f"`{ref.text}` has SHA-256 {actual}, not {sha256} as asked for",
            hint=f"the file was changed, or the recipe's digest is another file's{where}",
            reason=Reason.DIGEST_MISMATCH,
        )


def _cached_digest(path: Path, cache: Path) -> str:
    """A file's digest, remembered by path, size and time of change: hashing gigabytes at each build costs seconds."""
    info = path.stat()
    key = hashlib.sha256(f"{path.resolve()}:{info.st_size}:{info.st_mtime_ns}:{info.st_ino}".encode()).hexdigest()
    note = cache / "downloads" / "digests" / key
    if note.is_file() and re.fullmatch(r"[0-9a-f]{64}", text := note.read_text()):
        return text
    digest = file_digest(path)
    if info.st_size > 2**20 and cache.is_dir() and os.access(cache, os.W_OK):
        _write_atomic(note, digest)
    return digest


def _write_atomic(path: Path, text: str) -> None:
    with _storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        Path(file.name).replace(path)


def _unpacked(ref: Reference, cache: Path) -> Path:
    """The folder that holds the files `ref` means, by their names in the package."""
    from edgec.sources.archive import extract
    from edgec.sources.download import download

    def get_package(out: Path) -> None:
        download(ref, out)

    def unpack(out: Path) -> None:
        package = _once(cache / "downloads" / "packages" / _slug(ref, ref.package), get_package)
        archive = next(p for p in package.iterdir() if p.is_file())
        names = extract(archive, wanted(ref.path), out, strip="first" if ref.kind == "npm" else "")
        if not names:
            raise SourceError(f"{archive.name} has nothing at `{ref.path}`", hint=_similar(archive, ref))
        (out.parent / "members.json").write_text(json.dumps(names))

    def get_hub(out: Path) -> None:
        download(ref, out)
        if not any(p.is_file() for p in out.rglob("*")):
            raise SourceError(f"`{ref.text}` has no such file", hint="look at the repository's file list")

    fill = get_hub if ref.kind == "hf" else unpack
    return _once(_folder(ref, cache), lambda out: _into(out / "tree", fill)) / "tree"


def _folder(ref: Reference, cache: Path) -> Path:
    return cache / "downloads" / "files" / _slug(ref, ref.text)


def at_hand(reference: str, *, recipe_dir: Path, cache: Path) -> Path | None:
    """Where `fetch` finds the file or folder when it needs no download, unverified; None when it needs one."""
    ref = parse_reference(reference)
    root = recipe_dir if ref.is_local else _folder(ref, cache) / "tree"
    path = root / Path(ref.path).expanduser()
    return path if path.exists() else None


def _into(folder: Path, fill: Callable[[Path], None]) -> None:
    folder.mkdir()
    fill(folder)


def _slug(ref: Reference, text: str) -> str:
    """A folder's name that people can read and that no two references share."""
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", ref.package).strip("-")
    return f"{ref.kind}-{readable}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """`folder`, filled by `fill` if it isn't there yet; whole or not at all, and by one process only."""
    if folder.is_dir():
        return folder
    with _storing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            if folder.is_dir():
                return folder
            work = Path(tempfile.mkdtemp(prefix=".part-", dir=folder.parent))
            work.chmod(0o755)
            try:
                fill(work)
                work.replace(folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return folder


class _storing:
    """Turn what an OSError says about the cache into a StoreError."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError):
            return
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise StoreError(
            f"{self.path} can't be written: {error.strerror or error}",
            hint="free some space, or point --cache elsewhere" if full else "check the cache folder's permissions",
            reason=Reason.DISK_FULL if full else Reason.STORE,
        ) from error


def _neighbours(path: Path) -> str:
    """What lies where the missing file was looked for."""
    if not path.parent.is_dir():
        return f"the folder {path.parent} does not exist either"
    names = sorted(p.name for p in path.parent.iterdir())[:8]
    return f"in {path.parent}: {', '.join(names) or 'nothing'}"


def _similar(archive: Path, ref: Reference) -> str:
    """Names in the archive that are close to the one that isn't there."""
    import difflib

    from edgec.sources.archive import member_names

    names = member_names(archive, strip="first" if ref.kind == "npm" else "")
    close = difflib.get_close_matches(ref.path, names, n=3, cutoff=0.3) or names[:5]
    return f"it has, among others: {', '.join(close)}"
