"""Which format a path is, and its inspection."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgec.errors import Reason, SourceError
from edgec.inspection import folders
from edgec.inspection.facts import Inspection

KNOWN = ".onnx, .ort, .tflite, .mlpackage, .mlmodel, .so (TVM), .gguf, .safetensors, or a folder that edgec made"


def inspect_path(path: Path) -> Inspection:
    """Inspect a model file, package, or one of edgec's folders. Formats are told by name, then by first bytes.

    Raises:
        SourceError: it isn't there, is of no known format, or is damaged.
    """
    if not path.exists():
        raise SourceError(f"{path} does not exist", hint="check the path")
    if path.is_dir():
        for name, inspect in (
            ("program.json", folders.inspect_program),
            ("artifact.json", folders.inspect_artifact),
            ("bundle.json", folders.inspect_bundle),
        ):
            if (path / name).is_file():
                return inspect(path, inspect_path)
        if path.suffix == ".mlpackage" or (path / "Manifest.json").is_file():
            return _reader(".mlmodel")(path)
        raise SourceError(f"{path} is no folder that edgec knows", hint=f"known: {KNOWN}", reason=Reason.BAD_CHECKPOINT)
    suffix = path.suffix.lower()
    kind = suffix if suffix in _SUFFIXES else _by_content(path)
    if kind is None:
        raise SourceError(
            f"{path} is of no format that edgec can inspect", hint=f"known: {KNOWN}", reason=Reason.BAD_CHECKPOINT
        )
    return _reader(kind)(path)


_SUFFIXES = (".onnx", ".ort", ".tflite", ".lite", ".mlmodel", ".so", ".dylib", ".gguf", ".safetensors")


def _by_content(path: Path) -> str | None:
    with path.open("rb") as file:
        head = file.read(16)
    if head[:4] == b"GGUF":
        return ".gguf"
    if head[4:8] == b"TFL3":
        return ".tflite"
    if head[4:8] == b"ORTM":
        return ".ort"
    if head[:4] in (b"\x7fELF", b"\xcf\xfa\xed\xfe"):
        return ".so"
    return ".safetensors" if head[8:9] == b"{" else None


def _reader(kind: str) -> Callable[[Path], Inspection]:
    if kind == ".onnx":
        from edgec.inspection.onnx import inspect_onnx

        return inspect_onnx
    if kind == ".ort":
        from edgec.inspection.ort import inspect_ort

        return inspect_ort
    if kind in (".tflite", ".lite"):
        from edgec.inspection.tflite import inspect_tflite

        return inspect_tflite
    if kind == ".mlmodel":
        from edgec.inspection.coreml import inspect_coreml

        return inspect_coreml
    if kind == ".gguf":
        from edgec.inspection.gguf import inspect_gguf

        return inspect_gguf
    if kind == ".safetensors":
        from edgec.inspection.safetensors import inspect_safetensors

        return inspect_safetensors
    from edgec.inspection.tvm import inspect_tvm

    return inspect_tvm
