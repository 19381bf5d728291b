"""The bundle: what a device gets, with the papers that say what it is.

    <out>/bundle/<target>/…        each target's artefact
    <out>/bundle/<extra files>     what belongs to the model (tokenizer.json)
    <out>/bundle/recipe.json       the recipe with every default spelled out
    <out>/bundle/bundle.json       what is in here: targets, signatures, the SHA-256 of every other file
    <out>/bundle/edgec.lock        what made it: inputs, stages, tools
    <out>/bundle/sbom.cdx.json     the same for supply-chain tools (CycloneDX)

Nothing in it depends on when or how fast it was built, so the same recipe gives the same bytes. It appears by a rename,
and an older bundle is replaced only by a finished one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgec import __version__
from edgec.errors import StoreError
from edgec.model import Artifact
from edgec.store import OUTPUT_HINT, Entry, digest_tree, store_error

FORMAT = 1
MODEL_FILES = ("model.json", "weights.safetensors", "reference.safetensors", "graph.pt2")


def assemble(
    out: Path,
    recipe: dict[str, Any],
    targets: dict[str, Entry],
    source: Entry | None,
    papers: Callable[[dict[str, str]], dict[str, str]],
) -> tuple[Path, str]:
    """Write `<out>/bundle`.

    Args:
        out: the build's output folder.
        recipe: the resolved recipe.
        targets: each target's stage in the store.
        source: the source stage, whose extra files (a tokenizer) go along.
        papers: gives the text of edgec.lock and sbom.cdx.json by name, from the files' digests.

    Returns:
        The bundle's folder, and the SHA-256 of its contents.
    """
    final, new = out / "bundle", out / f".bundle-{os.getpid()}"
    try:
        if digest := _unchanged(final, recipe, targets, source, papers):
            return final, digest
        _clear_killed(out)
        new.mkdir(parents=True)
        digest = _fill(new, recipe, targets, source, papers)
        if final.is_dir() and digest_tree(final)[0] == digest:
            shutil.rmtree(new)
            return final, digest
        old = out / f".bundle-old-{os.getpid()}"
        if final.exists():
            final.rename(old)
        new.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise store_error(error, "writing the bundle", hint=OUTPUT_HINT) from error
    finally:  # also when it is interrupted
        shutil.rmtree(new, ignore_errors=True)
    return final, digest


def _clear_killed(out: Path) -> None:
    """Remove what builds that were killed have left half-written."""
    for path in out.glob(".bundle-*"):
        try:
            os.kill(int(path.name.rpartition("-")[2]), 0)
        except ProcessLookupError:
            shutil.rmtree(path, ignore_errors=True)
        except (ValueError, PermissionError):  # not ours to judge
            continue


def _fill(
    folder: Path,
    recipe: dict[str, Any],
    targets: dict[str, Entry],
    source: Entry | None,
    papers: Callable[[dict[str, str]], dict[str, str]],
) -> str:
    """Copy and write everything; gives the folder's digest. Raises StoreError when a result isn't what it was."""
    for name, entry in targets.items():
        shutil.copytree(entry.out, folder / name)
    for path in _extra_files(source):
        shutil.copyfile(path, folder / path.name)
    _, files = digest_tree(folder)
    for name, entry in targets.items():
        if _digest(folder, files, below=name) != entry.result["digest"]:
            raise StoreError(
                f"the store's result of `{name}` was changed after it was made: {entry.out}",
                hint="build with --force to make it again",
            )
    texts = _texts(recipe, targets, files, papers)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
        files[name] = _sha256(text)
    return _digest(folder, files)


def _unchanged(
    folder: Path,
    recipe: dict[str, Any],
    targets: dict[str, Entry],
    source: Entry | None,
    papers: Callable[[dict[str, str]], dict[str, str]],
) -> str | None:
    """The digest of a finished bundle that holds just this, found without reading its artefacts; otherwise None.

    Its own list of digests, with the sizes of the files as they are, has to give the digests of the stages; a file
    that is younger than that list was changed by somebody else.
    """
    try:
        manifest = folder / "bundle.json"
        listed: dict[str, str] = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        artefacts = {n: d for n, d in listed.items() if n.partition("/")[0] in targets and "/" in n}
        if any(_digest(folder, artefacts, below=name) != entry.result["digest"] for name, entry in targets.items()):
            return None
        extra = {p.name: p.read_bytes() for p in _extra_files(source)}
        files = artefacts | {name: hashlib.sha256(content).hexdigest() for name, content in extra.items()}
        texts = _texts(recipe, targets, files, papers)
        small = extra | {name: text.encode() for name, text in texts.items()}
        if any((folder / name).read_bytes() != content for name, content in small.items()):
            return None
        files |= {name: _sha256(text) for name, text in texts.items()}
        there = [p for p in folder.rglob("*") if p.is_file()]
        if {p.relative_to(folder).as_posix() for p in there} != set(files):
            return None
        finished = manifest.stat().st_mtime_ns
        if any(p.stat().st_mtime_ns > finished for p in there):
            return None
        return _digest(folder, files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no bundle, or a damaged one
        return None


def _extra_files(source: Entry | None) -> list[Path]:
    """Files of the source stage that belong to the model, and go along: its tokenizer."""
    if source is None:
        return []
    return [p for p in sorted(source.out.iterdir()) if p.is_file() and p.name not in MODEL_FILES]


def _texts(
    recipe: dict[str, Any],
    targets: dict[str, Entry],
    files: dict[str, str],
    papers: Callable[[dict[str, str]], dict[str, str]],
) -> dict[str, str]:
    """What is written rather than copied, by name: the recipe, the papers and, last, bundle.json."""
    texts = {"recipe.json": json.dumps(recipe, indent=1, sort_keys=True) + "\n"}
    copied = files | {"recipe.json": _sha256(texts["recipe.json"])}
    texts |= papers(copied)
    manifest = {
        "format": FORMAT,
        "name": recipe["name"],
        "edgec": __version__,
        "targets": {name: describe(Artifact.open(entry.out)) for name, entry in targets.items()},
        "files": files | {name: _sha256(text) for name, text in texts.items()},
    }
    return texts | {"bundle.json": json.dumps(manifest, indent=1, sort_keys=True) + "\n"}


def _digest(folder: Path, files: dict[str, str], *, below: str = "") -> str:
    """`digest_tree` of a folder (or of one below it) whose files' digests are known: only their sizes are looked up."""
    prefix = f"{below}/" if below else ""
    own = {Path(name): digest for name, digest in files.items() if name.startswith(prefix)}
    lines = [
        f"{path.as_posix().removeprefix(prefix)} {(folder / path).stat().st_size} {own[path]}" for path in sorted(own)
    ]
    return _sha256("\n".join(lines))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def describe(artifact: Artifact) -> dict[str, Any]:
    """An artefact's entry in bundle.json."""
    return {
        "bytes": artifact.bytes,
        "files": [asdict(f) for f in artifact.files],
        "signatures": [asdict(s) for s in artifact.signatures],
        "proof": artifact.proof,
        "proof_command": artifact.proof_command,
    }
