"""TVM libraries: the machine that they are for, and the kernels inside, by their exported names.

TVM exports each function as `__tvm_ffi_<name>`; the name of a fused kernel lists what was fused into it
(`fused_conv2d1_add1_relu`), so that operations can be counted without running the library's code.
"""

from __future__ import annotations

import re
from pathlib import Path

from edgec.inspection.elf import read_library
from edgec.inspection.facts import Graph, Inspection, by_count, damaged, size_of

_PREFIX = "__tvm_ffi_"
_OWN = ("_library_bin", "_library_ctx", "_mod", "_metadata")  # of the library itself, not of a function


def inspect_tvm(path: Path) -> Inspection:
    """Read a TVM library.

    Raises:
        SourceError: it isn't a library, is truncated, or has no TVM functions.
    """
    library = read_library(path)
    names = [s.removeprefix(_PREFIX) for s in library.symbols if s.startswith(_PREFIX)]
    names = [n for n in names if not n.startswith("_") and f"_{n}" not in _OWN]
    if library.container == "ELF" and not any(s.startswith((_PREFIX, "__tvm_")) for s in library.symbols):
        raise damaged(path, "a TVM library", "it exports no TVM function")
    kernels = by_count(re.sub(r"\d+(?=_|$)", "", name) for name in names)
    metadata = {"container": library.container, "machine": library.machine, "needs": ", ".join(library.needed)}
    return Inspection(str(path), "tvm", size_of(path), (Graph("kernels", (), (), kernels),), metadata=metadata)
