"""Finds the compiled core, or compiles it, and loads it.

The host runs the core of the edgec that is installed: compiled once per state of its sources and kept in the store,
under `<root>/runtime/<digest>/`. Where there is no compiler, a bundle's own library for this platform does as well, if
it has the same ABI. `$EDGEC_LIBRARY` names a library to use instead (one with sanitizers, say).
"""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
from functools import cache
from pathlib import Path

from edgec.errors import ToolMissing
from edgec.runtime import compile as core
from edgec.runtime.abi import ABI_VERSION, Status, declare
from edgec.runtime.failures import EngineError
from edgec.store import default_root, store_error


def load(path: Path | None = None) -> ctypes.CDLL:
    """The core, with the functions of edgec.h declared; the same object for the same file.

    Args:
        path: a library's file; None takes `$EDGEC_LIBRARY`, or compiles the installed core when that has not been done.

    Raises:
        ToolMissing: the core is not compiled yet, and there is no compiler.
        EngineError: the library has another ABI than this binding.
    """
    return _load(Path(path or os.environ.get("EDGEC_LIBRARY") or compiled()).resolve())


def load_for(bundle: Path) -> ctypes.CDLL:
    """The core with which to open a bundle's `native` folder: the installed one, else the bundle's own.

    Raises:
        EngineError: the bundle was made for another ABI.
    """
    wanted = bundle_abi(bundle)
    if wanted is not None and wanted != ABI_VERSION:
        raise EngineError(
            Status.VERSION_MISMATCH,
            f"{bundle} was built for version {wanted} of the runtime's ABI; this edgec has version {ABI_VERSION}",
            hint="build the recipe again with this edgec, or run the bundle with the edgec that built it",
        )
    try:
        return load()
    except ToolMissing as error:
        here = core.host()
        own = bundle / "lib" / here.name / here.library
        if not own.is_file():
            held = sorted(p.name for p in (bundle / "lib").glob("*")) if (bundle / "lib").is_dir() else []
            raise ToolMissing(
                f"{error.message}, and {bundle} has no library for {here.name} (it has {', '.join(held) or 'none'})",
                hint=error.hint,
            ) from error
        return load(own)


def bundle_abi(bundle: Path) -> int | None:
    """The ABI version that a bundle's manifest names; None when that can't be read (the core says why, on opening)."""
    try:
        manifest = json.loads((bundle / "manifest.json").read_bytes())
        return int(manifest["abi"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def is_compiled() -> bool:
    """Whether `load` finds a library that is ready."""
    return "EDGEC_LIBRARY" in os.environ or _place().is_file() or core.compiler(core.host()) is None


def _place() -> Path:
    return default_root() / "runtime" / core.source_digest()[:24] / core.host().library


def compiled() -> Path:
    """The installed core's library, compiled now when it is not in the store yet."""
    while not (library := _place()).is_file():
        folder = library.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Compiled beside its place and moved there whole: another process may be at the same, and either's will do.
            with tempfile.TemporaryDirectory(dir=folder) as work:
                made = core.build_library(Path(work))
                if _place() == library:  # else someone edited the sources meanwhile: it is made of both, and nobody's
                    made.replace(library)
        except OSError as error:
            raise store_error(error, "compiling the runtime into") from error
    return library


@cache
def _load(path: Path) -> ctypes.CDLL:
    if not path.is_file():
        raise ToolMissing(f"there is no runtime library at {path}", hint="unset EDGEC_LIBRARY, or correct it")
    try:
        library = ctypes.CDLL(str(path))
        found = int(library.edgec_abi_version())
    except (OSError, AttributeError) as error:
        raise EngineError(
            Status.VERSION_MISMATCH,
            f"{path} can't be loaded as edgec's runtime: {error}",
            hint="it is for another platform, or not edgec's; build the bundle again on this machine",
        ) from error
    if found != ABI_VERSION:
        raise EngineError(
            Status.VERSION_MISMATCH,
            f"{path} has version {found} of the runtime's ABI; this edgec has version {ABI_VERSION}",
            hint="build the bundle again with this edgec",
        )
    declare(library)
    return library
