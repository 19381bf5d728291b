"""The header of a GGUF file (version 2 or 3): metadata and tensor descriptions, without touching the weights.

Follows the GGUF specification (ggml/docs/gguf.md): magic, version, counts, then key-value pairs, then tensor infos.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from edgec.errors import Reason, SourceError

# ggml type → (name, weights per block, bytes per block)
TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONGEST = 64 * 2**20  # no string or array of a real file comes near; a damaged count does


@dataclass(frozen=True)
class GgufTensor:
    """`shape` in the order of PyTorch: the innermost dimension last (GGUF writes it first). `offset` is in the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    bytes: int
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    version: int
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]

    @property
    def parameters(self) -> int:
        return sum(math.prod(t.shape) for t in self.tensors)


class _Damaged(Exception):
    pass


def read_gguf_header(path: Path) -> GgufHeader:
    """Parse the header and check that the file is long enough for the tensors that it describes.

    Raises:
        SourceError: BAD_CHECKPOINT for a file that isn't GGUF, is truncated, or is damaged.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            return _parse(file, size)
    except (_Damaged, struct.error, UnicodeDecodeError) as cause:
        raise SourceError(
            f"{path} is not a GGUF file that can be read: {cause}",
            hint="is it complete? compare its size and SHA-256 with the original's",
            reason=Reason.BAD_CHECKPOINT,
        ) from cause


def _parse(file: IO[bytes], size: int) -> GgufHeader:
    if file.read(4) != b"GGUF":
        raise _Damaged("it does not begin with `GGUF`")
    version, tensors, pairs = struct.unpack("<IQQ", _read(file, 20))
    if version not in (2, 3):
        raise _Damaged(f"version {version} is not known")
    if tensors > 1_000_000 or pairs > 1_000_000:
        raise _Damaged("its counts are damaged")
    metadata = {}
    for _ in range(pairs):
        key = _string(file)
        metadata[key] = _value(file, struct.unpack("<I", _read(file, 4))[0])
    infos, end = [], 0
    for _ in range(tensors):
        name = _string(file)
        rank = struct.unpack("<I", _read(file, 4))[0]
        if rank > 8:
            raise _Damaged(f"`{name}` has {rank} dimensions")
        dims = struct.unpack(f"<{rank}Q", _read(file, 8 * rank))
        kind, offset = struct.unpack("<IQ", _read(file, 12))
        if kind not in TYPES:
            raise _Damaged(f"`{name}` has the unknown type {kind}")
        label, block, block_bytes = TYPES[kind]
        length = math.prod(dims) // block * block_bytes
        end = max(end, offset + length)
        infos.append(GgufTensor(name, label, tuple(reversed(dims)), length, offset))
    alignment = int(metadata.get("general.alignment", 32)) or 32
    start = -(-file.tell() // alignment) * alignment
    if infos and start + end > size:
        raise _Damaged(f"it has {size:,} bytes, and its tensors end at {start + end:,}")
    return GgufHeader(version, metadata, tuple(replace(t, offset=start + t.offset) for t in infos))


def _read(file: IO[bytes], count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise _Damaged("it ends within its header")
    return data


def _string(file: IO[bytes]) -> str:
    length = struct.unpack("<Q", _read(file, 8))[0]
    if length > _LONGEST:
        raise _Damaged("a string's length is damaged")
    return _read(file, length).decode("utf-8", errors="replace")


def _value(file: IO[bytes], kind: int) -> Any:
    if kind in _SCALARS:
        form = "<" + _SCALARS[kind]
        return struct.unpack(form, _read(file, struct.calcsize(form)))[0]
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        raise _Damaged(f"a value of unknown type {kind}")
    inner, count = struct.unpack("<IQ", _read(file, 12))
    if count > _LONGEST:
        raise _Damaged("an array's length is damaged")
    if inner in _SCALARS:
        form = f"<{count}{_SCALARS[inner]}"
        return list(struct.unpack(form, _read(file, struct.calcsize(form))))
    return [_value(file, inner) for _ in range(count)]
