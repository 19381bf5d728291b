"""Shared libraries: what machine an ELF or Mach-O file is for, and which symbols a 64-bit ELF exports (gABI 4)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from edgec.inspection.facts import damaged

_MACHINES = {3: "x86", 40: "arm", 62: "x86-64", 183: "aarch64", 243: "riscv"}
_MACHO = {0x01000007: "x86-64", 0x0100000C: "aarch64", 7: "x86", 12: "arm"}
_DYNSYM, _UNDEFINED = 11, 0


@dataclass(frozen=True)
class Library:
    """`symbols` are exported names, sorted; `needed` the libraries that it loads. Read from 64-bit ELF only."""

    container: str  # ELF or Mach-O
    machine: str
    symbols: tuple[str, ...]
    needed: tuple[str, ...]


def read_library(path: Path) -> Library:
    """Read a shared library's header and dynamic symbols.

    Raises:
        SourceError: it is neither ELF nor Mach-O, or is truncated.
    """
    data = path.read_bytes()
    if data[:4] == b"\xcf\xfa\xed\xfe" and len(data) >= 8:
        return Library("Mach-O", _MACHO.get(struct.unpack_from("<I", data, 4)[0], "unknown"), (), ())
    if data[:4] != b"\x7fELF":
        raise damaged(path, "a shared library", "it is neither ELF nor Mach-O")
    try:
        return _elf(data)
    except (struct.error, IndexError, ValueError) as cause:
        raise damaged(path, "an ELF library", f"its tables point outside of it ({cause})") from cause


def _elf(data: bytes) -> Library:
    order = "<" if data[5] == 1 else ">"
    machine = _MACHINES.get(struct.unpack_from(f"{order}H", data, 18)[0], "unknown")
    if data[4] != 2:  # 32-bit: sizes of everything below differ
        return Library("ELF", machine, (), ())
    table = struct.unpack_from(f"{order}Q", data, 40)[0]
    entry, count = struct.unpack_from(f"{order}HH", data, 58)
    sections = [struct.unpack_from(f"{order}IIQQQQIIQQ", data, table + i * entry) for i in range(count)]
    symbols: set[str] = set()
    needed: list[str] = []
    for _, kind, _, _, offset, size, link, _, _, each in sections:
        if kind not in (_DYNSYM, 6) or not each:
            continue
        strings = sections[link][4]
        if offset + size > len(data):
            raise ValueError("a section ends behind the file")
        for at in range(offset, offset + size, each):
            if kind == _DYNSYM:
                name, _, _, section = struct.unpack_from(f"{order}IBBH", data, at)
                if section != _UNDEFINED:
                    symbols.add(_string(data, strings + name))
            else:  # SHT_DYNAMIC: tag 1 is DT_NEEDED
                tag, value = struct.unpack_from(f"{order}qQ", data, at)
                if tag == 1:
                    needed.append(_string(data, strings + value))
    return Library("ELF", machine, tuple(sorted(s for s in symbols if s)), tuple(needed))


def _string(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode(errors="replace")
