"""edgec/runtime/abi.py says what include/edgec.h says: sizes, offsets, constants and functions."""

from __future__ import annotations

import re
import shutil
import subprocess
from enum import IntEnum
from pathlib import Path

import pytest

from edgec.runtime import abi
from edgec.runtime.compile import NATIVE

HEADER = (NATIVE / "include/edgec.h").read_text()
ENUMS: dict[str, type[IntEnum]] = {
    "EDGEC_": abi.Status,
    "EDGEC_LOG_": abi.LogLevel,
    "EDGEC_KV_": abi.KvType,
    "EDGEC_BATCHING_": abi.Batching,
    "EDGEC_STEP_": abi.StepOutcome,
    "EDGEC_FINISH_": abi.Finish,
    "EDGEC_EVENT_": abi.EventKind,
    "EDGEC_TRIM_": abi.Trim,
    "EDGEC_SPECULATION_": abi.Speculation,
    "EDGEC_SPECULATE_": abi.Speculate,
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """sizeof, offsetof and constants, as a C compiler sees them."""
    folder = tmp_path_factory.mktemp("abi")
    lines = [f'P("{name}", sizeof({name}));' for name in abi.STRUCTS]
    for name, struct in abi.STRUCTS.items():
        for field in struct._fields_:
            lines.append(f'P("{name}.{field[0]}", offsetof({name}, {field[0]}));')
            lines.append(f'P("{name}.{field[0]} size", sizeof((({name}*)0)->{field[0]}));')
    constants = [f"{prefix}{member.name}" for prefix, enum in ENUMS.items() for member in enum]
    lines += [f'P("{constant}", {constant});' for constant in [*constants, "EDGEC_ABI_VERSION"]]
    source = folder / "layout.c"
    source.write_text(
        '#include <stdio.h>\n#include "edgec.h"\n'
        '#define P(name, value) printf("%s=%lld\\n", name, (long long)(value))\n'
        "int main(void) {\n" + "\n".join(lines) + "\nreturn 0;\n}\n"
    )
    program = folder / "layout"
    compiler = shutil.which("gcc") or "cc"
    subprocess.run([compiler, f"-I{NATIVE / 'include'}", str(source), "-o", str(program)], check=True)
    output = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, _, value in (line.rpartition("=") for line in output.splitlines())}


@pytest.mark.parametrize("name", sorted(abi.STRUCTS))
def test_struct_has_the_header_s_layout(measured: dict[str, int], name: str) -> None:
    import ctypes

    struct = abi.STRUCTS[name]
    ours = {name: ctypes.sizeof(struct)}
    for field in struct._fields_:
        ours[f"{name}.{field[0]}"] = getattr(struct, field[0]).offset
        ours[f"{name}.{field[0]} size"] = getattr(struct, field[0]).size
    assert ours == {key: value for key, value in measured.items() if key.split(".")[0].split(" ")[0] == name}


@pytest.mark.parametrize("name", sorted(abi.STRUCTS))
def test_struct_names_every_field_of_the_header(name: str) -> None:
    body = re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", HEADER, re.DOTALL)
    assert body is not None
    text = re.sub(r"/\*.*?\*/|\[\d+\]", "", body[1], flags=re.DOTALL)
    declared = [
        re.sub(r"[^\w]", "", part.split()[-1]) for decl in text.split(";") for part in decl.split(",") if part.split()
    ]
    assert declared == [field[0] for field in abi.STRUCTS[name]._fields_]


@pytest.mark.parametrize("prefix", sorted(ENUMS))
def test_constants_have_the_header_s_values(measured: dict[str, int], prefix: str) -> None:
    enum = ENUMS[prefix]
    assert {member.name: measured[f"{prefix}{member.name}"] for member in enum} == {m.name: m.value for m in enum}
    if prefix != "EDGEC_":
        named = set(re.findall(rf"\b{prefix}([A-Z0-9_]+) = ", HEADER))
        assert named == {member.name for member in enum}


def test_abi_version_is_the_header_s(measured: dict[str, int]) -> None:
    assert measured["EDGEC_ABI_VERSION"] == abi.ABI_VERSION


def test_every_function_of_the_header_is_declared() -> None:
    named = re.findall(r"EDGEC_API [\w\s\*]*?\b(edgec_\w+)\(", HEADER)
    assert sorted(named) == sorted(abi.FUNCTIONS)


def test_every_function_has_the_header_s_number_of_arguments() -> None:
    for name, (_, arguments) in abi.FUNCTIONS.items():
        declared = re.search(rf"\b{name}\(([^;]*)\);", HEADER)
        assert declared is not None
        count = 0 if declared[1].strip() == "void" else declared[1].count(",") + 1
        assert count == len(arguments), name


def test_headers_compile_as_c_and_as_cpp(tmp_path: Path) -> None:
    for suffix, standard in (("c", "-std=c99"), ("cpp", "-std=c++17")):
        source = tmp_path / f"include.{suffix}"
        source.write_text('#include "edgec.h"\n')
        command = ["g++" if suffix == "cpp" else "gcc", standard, "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
        subprocess.run([*command, f"-I{NATIVE / 'include'}", str(source)], check=True)
