"""Writing .mlpackage folders whose bytes depend on their content only.

coremltools puts random UUIDs into Manifest.json and the date of conversion into the model's metadata. Here the UUIDs
are derived from the digests of the items that they name, and the date is left out.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from pathlib import Path
from typing import Any

# Namespace of our name-based UUIDs (RFC 4122, version 5); any fixed value does.
_NAMESPACE = uuid.UUID("6f9619ff-8b86-d011-b42d-00c04fc964ff")
_DATE = "com.github.apple.coremltools.conversion_date"


def finish(source: Path, path: Path) -> None:
    """Copy a package that coremltools wrote to `path`, and make it reproducible.

    Only what a device reads goes along (coremltools leaves a map of torch's debug handles beside it), with ordinary
    permissions (some files come from private temporary ones).
    """
    path.mkdir()
    shutil.copytree(source / "Data", path / "Data")
    shutil.copyfile(source / "Manifest.json", path / "Manifest.json")
    for file in path.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)
    _without_date(path / "Data" / "com.apple.CoreML" / "model.mlmodel")
    _stable_manifest(path)


def join(parts: dict[str, Path], path: Path) -> None:
    """One package with a function for each part; equal weights are stored once. The first function is the default."""
    from coremltools.models.utils import MultiFunctionDescriptor, save_multifunction

    from .coreml_convert import _quiet

    descriptor = MultiFunctionDescriptor()
    for name, part in parts.items():
        descriptor.add_function(str(part), src_function_name="main", target_function_name=name)
    descriptor.default_function_name = next(iter(parts))
    joined = next(iter(parts.values())).with_name(f"joined-{path.name}")
    with _quiet():
        save_multifunction(descriptor, str(joined))
    finish(joined, path)
    shutil.rmtree(joined)


def _without_date(model: Path) -> None:
    from coremltools.proto import Model_pb2

    spec: Any = Model_pb2.Model()
    spec.ParseFromString(model.read_bytes())
    spec.description.metadata.userDefined.pop(_DATE, None)
    attributes = spec.mlProgram.attributes
    if "buildInfo" in attributes:
        entries = attributes["buildInfo"].immediateValue.dictionary.values
        for i in reversed(range(len(entries))):
            if _DATE in entries[i].key.immediateValue.tensor.strings.values:
                del entries[i]
    model.write_bytes(spec.SerializeToString(deterministic=True))


def _stable_manifest(path: Path) -> None:
    """Replace each item's random UUID by one made from the item's path and content."""
    manifest = json.loads((path / "Manifest.json").read_text())
    names = {}
    for old, item in manifest["itemInfoEntries"].items():
        digest = hashlib.sha256(item["path"].encode())
        root = path / "Data" / item["path"]
        for file in sorted(root.rglob("*")) if root.is_dir() else [root]:
            if file.is_file():
                digest.update(file.relative_to(path).as_posix().encode() + hashlib.sha256(file.read_bytes()).digest())
        names[old] = str(uuid.uuid5(_NAMESPACE, digest.hexdigest()))
    manifest["itemInfoEntries"] = {names[k]: v for k, v in manifest["itemInfoEntries"].items()}
    manifest["rootModelIdentifier"] = names[manifest["rootModelIdentifier"]]
    (path / "Manifest.json").write_text(json.dumps(manifest, indent=4, sort_keys=True) + "\n")
