"""GGUF files, by their header."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from edgec.inspection.facts import Inspection, Tally, size_of
from edgec.sources.gguf_header import TYPES, read_gguf_header

_BLOCKS = {name: block for name, block, _ in TYPES.values()}


def inspect_gguf(path: Path) -> Inspection:
    """Read a GGUF header. Raises SourceError when it is damaged or the file is truncated."""
    header = read_gguf_header(path)
    tally = Tally()
    for tensor in header.tensors:
        count = math.prod(tensor.shape)
        tally.weight(tensor.type, count, tensor.bytes)
        if _BLOCKS[tensor.type] > 1:
            # Scales are packed into the blocks, so their range is not in the header.
            tally.quantized("weights", tensor.type, f"per block of {_BLOCKS[tensor.type]}", count)
    metadata = {"version": str(header.version), **{k: _short(v) for k, v in header.metadata.items()}}
    return Inspection(str(path), "gguf", size_of(path), (), tally.weights(), tally.quantized_groups(), metadata)


def _short(value: Any) -> str:
    """A value as one line: the tokenizer's lists have tens of thousands of entries."""
    if isinstance(value, list):
        return f"[{len(value):,} values]" if len(value) > 8 else str(value)
    text = " ".join(str(value).split())
    return text if len(text) <= 100 else f"{text[:97]}…"
