"""safetensors files, by their header."""

from __future__ import annotations

import math
from pathlib import Path

from edgec.inspection.facts import Inspection, Tally, size_of
from edgec.sources.checkpoints import read_safetensors_header

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
           "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}  # fmt: skip


def inspect_safetensors(path: Path) -> Inspection:
    """Read a safetensors header. Raises SourceError when it is damaged or the file is truncated."""
    header = read_safetensors_header(path)
    tally = Tally()
    for _, dtype, shape, size in header.tensors:
        tally.weight(_DTYPES.get(dtype, dtype.lower()), math.prod(shape), size)
    return Inspection(str(path), "safetensors", size_of(path), (), tally.weights(), (), dict(header.metadata))
