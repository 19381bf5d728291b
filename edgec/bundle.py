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
from edgec.model import Artifact
from edgec.store import Entry, digest_tree, store_error

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
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        _fill(new, recipe, targets, source, papers)
        digest, _ = digest_tree(new)
        if final.is_dir() and digest_tree(final)[0] == digest:
            shutil.rmtree(new)
            return final, digest
        old = out / f".bundle-old-{os.getpid()}"
        if final.exists():
            final.rename(old)
        new.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        raise store_error(error, "writing the bundle") from error
    return final, digest


def _fill(
    folder: Path,
    recipe: dict[str, Any],
    targets: dict[str, Entry],
    source: Entry | None,
    papers: Callable[[dict[str, str]], dict[str, str]],
) -> None:
    for name, entry in targets.items():
        shutil.copytree(entry.out, folder / name)
    if source is not None:
        for path in sorted(source.out.iterdir()):
            if path.is_file() and path.name not in MODEL_FILES:
                shutil.copyfile(path, folder / path.name)
    (folder / "recipe.json").write_text(json.dumps(recipe, indent=1, sort_keys=True) + "\n")
    _, files = digest_tree(folder)
    for name, text in papers(files).items():
        (folder / name).write_text(text, encoding="utf-8")
        files[name] = hashlib.sha256(text.encode()).hexdigest()
    manifest = {
        "format": FORMAT,
        "name": recipe["name"],
        "edgec": __version__,
        "targets": {name: describe(Artifact.open(folder / name)) for name in targets},
        "files": files,
    }
    (folder / "bundle.json").write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")


def describe(artifact: Artifact) -> dict[str, Any]:
    """An artefact's entry in bundle.json."""
    return {
        "bytes": artifact.bytes,
        "files": [asdict(f) for f in artifact.files],
        "signatures": [asdict(s) for s in artifact.signatures],
        "proof": artifact.proof,
        "proof_command": artifact.proof_command,
    }
