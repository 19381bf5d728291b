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


def save(model: Any, path: Path, work: Path) -> None:
    """Write a coremltools MLModel to `path`, reproducibly.

    Only what a device reads goes along (coremltools leaves a map of torch's debug handles beside it), with ordinary
    permissions (some of its files come from private temporary ones).
    """
    model._mil_program.validate()
    raw = work / f"raw-{path.name}"
    model.save(str(raw))
    path.mkdir()
    shutil.copytree(raw / "Data", path / "Data")
    shutil.copyfile(raw / "Manifest.json", path / "Manifest.json")
    shutil.rmtree(raw)
    for file in path.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)
    _without_date(path / "Data" / "com.apple.CoreML" / "model.mlmodel")
    _stable_manifest(path)


def join(models: dict[str, Any]) -> Any:
    """One MLModel with a function for each of `models`; equal weights are stored once. The first is the default.

    This is coremltools' `save_multifunction` on programs in memory. That one takes saved packages and parses them
    again, which costs as much as half a conversion.
    """
    import coremltools as ct
    from coremltools.converters.mil.converter import mil_convert
    from coremltools.converters.mil.mil import Program as MilProgram
    from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY
    from coremltools.proto import Model_pb2

    from .coreml_convert import lean, quiet

    joined, functions = MilProgram(), []
    for name, model in models.items():
        joined.add_function(name, model._mil_program.functions["main"])
        spec = model.get_spec()
        description = spec.description
        functions.append(
            Model_pb2.FunctionDescription(
                name=name, input=description.input, output=description.output, state=description.state
            )
        )
    first = next(iter(models))
    joined.default_function_name = first
    joined.skip_all_passes = True  # each function has been through them
    joined.export_as_multifunction = True
    with quiet(), lean():
        PASS_REGISTRY["common::const_deduplication"]._deduplicate_const_across_functions(joined)
        return mil_convert(
            joined,
            convert_from="milinternal",
            convert_to="mlprogram",
            compute_units=ct.ComputeUnit.CPU_ONLY,
            specification_version=max(m.get_spec().specificationVersion for m in models.values()),
            model_description=Model_pb2.ModelDescription(functions=functions, defaultFunctionName=first),
            skip_model_load=True,
        )


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
