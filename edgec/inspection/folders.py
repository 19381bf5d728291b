"""edgec's own folders: a program, an artefact, a bundle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgec.inspection.facts import Graph, Inspection, Port, damaged, size_of
from edgec.model import Artifact, Program, Signature

Inspect = Callable[[Path], Inspection]


def _graph(signature: Signature, ops: dict[str, int]) -> Graph:
    inputs = tuple(Port(t.name, t.shape, t.dtype) for t in signature.inputs)
    outputs = tuple(Port(t.name, t.shape, t.dtype) for t in signature.outputs)
    return Graph(signature.name, inputs, outputs, ops)


def inspect_program(path: Path, inspect: Inspect) -> Inspection:
    """A Program: its ONNX files, one a signature. Raises SourceError when its description can't be read."""
    program = _read(path, "program.json", Program.open)
    parts = tuple(inspect(program.onnx_path(s.name)) for s in program.signatures)
    metadata = {"task": program.task_kind, "opset": str(program.opset), "parameters": f"{program.parameters:,}"}
    if program.quantization is not None:
        metadata["quantization"] = f"{program.quantization.scheme}, {len(program.quantization.layers)} layers"
    graphs = tuple(_graph(s, p.graphs[0].ops) for s, p in zip(program.signatures, parts, strict=True))
    return Inspection(str(path), "program", size_of(path), graphs, metadata=metadata, parts=parts)


def inspect_artifact(path: Path, inspect: Inspect) -> Inspection:
    """An artefact: what its target said of it, and its model files."""
    artifact = _read(path, "artifact.json", Artifact.open)
    known = [path / f.name for f in artifact.files if f.role == "model" and can_inspect(path / f.name)]
    metadata = {"target": artifact.target, "proof": artifact.proof, **{k: str(v) for k, v in artifact.counts.items()}}
    parts = tuple(inspect(p) for p in known)
    return Inspection(
        str(path),
        "artifact",
        artifact.bytes,
        tuple(_graph(s, {}) for s in artifact.signatures),
        metadata=metadata,
        parts=parts,
    )


def inspect_bundle(path: Path, inspect: Inspect) -> Inspection:
    """A bundle: every artefact in it."""
    data: dict[str, Any] = _read(path, "bundle.json", lambda p: json.loads((p / "bundle.json").read_text()))
    if not isinstance(data, dict):
        raise damaged(path, "a bundle", "bundle.json is not an object")
    folders = sorted(p.parent for p in path.rglob("artifact.json"))
    scalars = {k: str(v) for k, v in data.items() if isinstance(v, str | int | float)}
    parts = tuple(inspect(p) for p in folders)
    return Inspection(str(path), "bundle", size_of(path), (), metadata=scalars, parts=parts)


def can_inspect(path: Path) -> bool:
    return path.exists() and path.suffix in (".onnx", ".tflite", ".mlpackage", ".so", ".dylib", ".gguf", ".safetensors")


def _read(path: Path, name: str, read: Callable[[Path], Any]) -> Any:
    try:
        return read(path)
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise damaged(path / name, "a description of edgec's", f"{type(cause).__name__}: {cause}") from cause
