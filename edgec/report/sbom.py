"""The bundle's bill of materials: CycloneDX 1.6 JSON, for supply-chain tools.

The model that the bundle holds is the main component (`machine-learning-model`), its files are components with SHA-256
hashes, what it was made from are components too (weights with a package URL and the data), and the converters stand
under `metadata.tools` with their versions and licences. The serial number is drawn from the contents and there is no
time stamp, so that the same build gives the same file.
"""

from __future__ import annotations

import json
import uuid
from importlib.metadata import PackageNotFoundError, metadata
from typing import TYPE_CHECKING, Any

from edgec.report.lock import Input, Lock
from edgec.sources.reference import parse_reference

if TYPE_CHECKING:
    from cyclonedx.model.component import Component
    from packageurl import PackageURL

    from edgec.report.document import BuildDocument

NAME = "sbom.cdx.json"
_PURL_TYPES = {"pypi": "pypi", "npm": "npm", "deb": "deb", "hf": "huggingface"}


def make_sbom(document: BuildDocument, lock: Lock) -> str:
    """The file's text.

    Args:
        document: the finished build.
        lock: what `lock.make_lock` made of it: the SBOM says the same in another vocabulary.
    """
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.model.tool import ToolRepository
    from cyclonedx.output.json import JsonV1Dot6

    text = lock.to_text()
    model = Component(
        name=lock.recipe,
        type=ComponentType.MACHINE_LEARNING_MODEL,
        version=lock.recipe_digest[:12],
        bom_ref=f"model:{lock.recipe}",
        description=_description(document),
        properties=_properties(document),
    )
    tools = [_tool("edgec", lock.edgec), *(_tool(name, version) for name, version in sorted(lock.tools.items()))]
    inputs = [_input(item) for item in lock.inputs]
    files = [_file(name, digest) for name, digest in sorted(lock.files.items())]
    bom = Bom(
        components=[*inputs, *files],
        # Of the contents, so that a rebuild has the same.
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"edgec.lock:{text}"),
    )
    bom.metadata.component = model
    bom.metadata.tools = ToolRepository(components=tools)
    bom.register_dependency(model, [*inputs, *files])
    data: dict[str, Any] = json.loads(JsonV1Dot6(bom).output_as_string())
    data["metadata"].pop("timestamp", None)  # optional in CycloneDX, and the library always writes now
    return json.dumps(data, indent=1, sort_keys=True) + "\n"


def _description(document: BuildDocument) -> str:
    assert document.recipe is not None
    steps = " → ".join(s.stage for s in document.ledger if s.kind == "pass")
    return f"{document.recipe.task} model from {document.recipe.source}{f', {steps}' if steps else ''}"


def _properties(document: BuildDocument) -> list[Any]:
    from cyclonedx.model import Property

    facts = {"task": document.recipe.task if document.recipe else "", "targets": " ".join(document.targets)}
    if document.metric is not None and document.metric.source is not None:
        facts[f"source:{document.metric.name}"] = f"{document.metric.source:.6g}"
    return [Property(name=f"edgec:{name}", value=value) for name, value in facts.items()]


def _tool(name: str, version: str) -> Component:
    from cyclonedx.model.component import Component, ComponentType
    from packageurl import PackageURL

    return Component(
        name=name,
        version=version,
        type=ComponentType.APPLICATION if name == "edgec" else ComponentType.LIBRARY,
        bom_ref=f"tool:{name}@{version}",
        purl=None if name == "edgec" else PackageURL("pypi", name=name, version=version),
        licenses=_licences(name),
    )


def _licences(package: str) -> list[Any]:
    """The licence that an installed package declares as an SPDX expression; nothing is guessed from free text."""
    from cyclonedx.factory.license import LicenseFactory

    try:
        declared = metadata(package)
    except PackageNotFoundError:
        return []
    expression: str | None = declared["License-Expression"]
    if not expression:
        from cyclonedx.spdx import fixup_id

        short = declared["License"] or ""
        expression = fixup_id(short) if "\n" not in short else None
    return [LicenseFactory().make_from_string(expression)] if expression else []


def _input(item: Input) -> Component:
    from cyclonedx.model.component import Component, ComponentType

    kind = ComponentType.MACHINE_LEARNING_MODEL if item.role == "model" else ComponentType.DATA
    purl = _purl(item.reference)
    return Component(
        name=item.reference,
        version=purl.version if purl else None,
        type=kind,
        bom_ref=f"input:{item.role}:{item.reference}",
        hashes=_hashes(item.sha256),
        purl=purl,
        licenses=_licences(purl.name) if purl is not None and purl.type == "pypi" else [],
    )


def _purl(reference: str) -> PackageURL | None:
    from packageurl import PackageURL

    parsed = parse_reference(reference)
    kind = _PURL_TYPES.get(parsed.kind)
    if kind is None:
        return None
    namespace, _, name = parsed.name.rpartition("/")
    if kind == "deb":
        namespace = "debian"
    return PackageURL(kind, namespace or None, name, parsed.version or None, subpath=parsed.path or None)


def _file(name: str, digest: str) -> Component:
    from cyclonedx.model.component import Component, ComponentType

    return Component(name=name, type=ComponentType.FILE, bom_ref=f"file:{name}", hashes=_hashes(digest))


def _hashes(sha256: str) -> list[Any]:
    from cyclonedx.model import HashAlgorithm, HashType

    return [HashType(alg=HashAlgorithm.SHA_256, content=sha256)] if sha256 else []
