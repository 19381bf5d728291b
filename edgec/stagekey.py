"""What a stage's cache key is made of: its own source, its options, its inputs' digests, data, versions and platform.

"Its own source" is the stage's module and every module of this package that it imports, however deep, found by reading
the import statements: changing a helper rebuilds the stages that use it, and only those. What such a module compiles
counts as its source.
"""

from __future__ import annotations

import ast
import hashlib
import platform
import sys
from collections.abc import Iterable
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

# Libraries whose version can change what a stage makes.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "source": ("torch", "transformers", "gguf", "safetensors", "tokenizers"),
    "pass": ("torch", "torchao", "torch-pruning", "litert-torch"),
    "export": ("torch", "torchao", "onnx", "onnxscript", "onnxruntime"),
    "onnxruntime": ("onnx", "onnxruntime"),
    "tflite": ("torch", "torchao", "litert-torch", "litert-converter", "ai-edge-litert", "tensorflow-cpu"),
    "coreml": ("torch", "torchao", "coremltools"),
    "tvm": ("torch", "onnx", "apache-tvm", "apache-tvm-ffi"),
}
FALLBACK_LIBRARIES = ("torch", "onnx", "onnxruntime")  # a third party's target

# A folder beside a module, of which it compiles a library or copies files into bundles; its tests are in neither.
FOLDERS = {"edgec.runtime.compile": "native"}


def installed_version(package: str) -> str | None:
    """Version of an installed package, without importing it; None when it isn't installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def library_versions(kind: str) -> tuple[tuple[str, str | None], ...]:
    """`(library, version)` of what the stage kind depends on; None where it isn't installed."""
    return tuple((name, installed_version(name)) for name in (*LIBRARIES.get(kind, FALLBACK_LIBRARIES), "numpy"))


def platform_facts() -> dict[str, str]:
    """The parts of the platform that artefacts depend on."""
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }


@cache
def _spec(module: str) -> ModuleSpec | None:
    """None for `edgec.x.function`: looking it up would import `edgec.x`, and with it torch, to find it is no module."""
    parent = module.rpartition(".")[0]
    if parent and ((above := _spec(parent)) is None or above.submodule_search_locations is None):
        return None
    try:
        return find_spec(module)
    except ModuleNotFoundError:
        return None


@cache
def _file(module: str) -> Path | None:
    spec = _spec(module)
    return Path(spec.origin) if spec and spec.origin and spec.has_location else None


@cache
def _imports(module: str) -> frozenset[str]:
    """Modules of the same top-level package that a module's import statements name, wherever they stand."""
    path = _file(module)
    if path is None:
        return frozenset()
    top = module.split(".")[0]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return frozenset(m for m in found if m.split(".")[0] == top and _file(m) is not None)


def folder_digest(folder: Path) -> str:
    """SHA-256 over names and contents of the folder's files, without those in its `tests`."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and name.parts[0] != "tests":
            total.update(f"{name.as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def source_modules(modules: Iterable[str], *, alone: Iterable[str] = ()) -> set[str]:
    """The modules and all that they import from their own package; those in `alone` without what they import."""
    todo, seen = list(modules), set(alone)
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            todo.extend(_imports(module))
    return seen


def source_digest(modules: Iterable[str], *, alone: Iterable[str] = ()) -> str:
    """SHA-256 over the source of the modules and of all that they import from their own package.

    Modules in `alone` count without what they import: one that runs every kind of stage would tie all of them together.
    """
    total = hashlib.sha256()
    for module in sorted(source_modules(modules, alone=alone)):
        if path := _file(module):
            total.update(f"{module} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
            if folder := FOLDERS.get(module):
                total.update(f"{module} {folder_digest(path.parent / folder)}\n".encode())
    return total.hexdigest()
