"""Relax module → library: fusion, schedules, LLVM, linker. The same module gives the same bytes."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edgec.errors import ConversionError, Reason, RecipeError
from edgec.registry import suggest

from .tvm_schedule import schedule_all

HOST = "host"
AARCH64 = "aarch64-linux-gnu"
ALIASES = re.compile(r"arm64e?|armv\d.*|thumbv\d.*|i[3-6]86|amd64|riscv(32|64).*|ppc(64(le)?)?")
LINK = ("-shared", "-fPIC", "-Wl,--build-id=none", "-Wl,-s", "-lm")  # no build id, no symbol table: the bytes repeat


@dataclass(frozen=True)
class Machine:
    """What a library is compiled for.

    Attributes:
        name: as in the recipe: "host" or an LLVM triple.
        triple: the LLVM triple; empty for this machine's own.
        cpu: LLVM's name of the CPU; empty for the triple's baseline.
        linker: the command that links for it, or None when there is none here.
    """

    name: str
    triple: str
    cpu: str
    linker: tuple[str, ...] | None

    def target(self, cores: int | None = None) -> Any:
        """The TVM target; `cores` matters to tuning only.

        Raises:
            RecipeError: LLVM doesn't know the triple's architecture or the CPU. Left to itself it ends the process
                for the former, and compiles for another CPU for the latter.
        """
        import tvm
        from tvm.target import codegen

        triple = self.triple or codegen.llvm_get_system_triple()
        architecture = triple.split("-")[0]
        known = {str(name) for name in codegen.llvm_get_targets()}
        if architecture not in known and not ALIASES.fullmatch(architecture):
            raise RecipeError(
                f"tvm: LLVM has no architecture `{architecture}` (triple `{self.name}`)",
                hint="write triples as LLVM does, e.g. aarch64-linux-android or x86_64-linux-gnu",
            )
        fields: dict[str, Any] = {"kind": "llvm"}
        fields |= {"mtriple": self.triple} if self.triple else {}
        fields |= {"num-cores": cores} if cores else {}
        if self.cpu:
            cpus = [str(c) for c in codegen.llvm_get_cpu_archlist(tvm.target.Target(fields | {"mtriple": triple}))]
            if self.cpu not in cpus:
                raise RecipeError(
                    f"tvm: LLVM knows no CPU `{self.cpu}` for `{self.name}`{suggest(self.cpu, cpus)}",
                    hint="leave the CPU out for the triple's baseline",
                )
            fields["mcpu"] = self.cpu
        return tvm.target.Target(fields)


def machine(name: str, cpu: str | None) -> Machine:
    """The machine of a triple; `cpu` None takes the default for it."""
    if name == HOST:
        return Machine(name, "", host_cpu() if cpu is None else cpu, linker(name))
    return Machine(name, name, cpu or "", linker(name))


def host_cpu() -> str:
    """x86-64-v3 (AVX2, FMA) where the CPU has it: a named level, so that equal machines get equal bytes."""
    if platform.machine() != "x86_64":
        return ""
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text().split()) if info.is_file() else set()
    return "x86-64-v3" if {"avx2", "fma", "bmi2", "f16c"} <= flags else ""


def linker(name: str) -> tuple[str, ...] | None:
    """A compiler driver that links shared libraries for a machine: the system's, or zig from its Python package."""
    zig: tuple[str, ...]
    if name == HOST:
        found = next((path for c in ("g++", "c++", "gcc", "clang") if (path := shutil.which(c))), None)
        zig = ("-m", "ziglang", "cc")
    else:
        found = next((path for c in ("g++", "gcc") if (path := shutil.which(f"{name}-{c}"))), None)
        zig = ("-m", "ziglang", "cc", "-target", name)
        if not name.endswith("-linux-gnu"):
            zig = ()
    if found:
        return (found,)
    return (sys.executable, *zig) if zig and find_spec("ziglang") else None


def optimise(module: Any, target: Any, inputs: dict[str, int]) -> Any:
    """Legalise and fuse; `inputs` says how many of each function's arguments are not parameters.

    Afterwards a function takes its inputs and one tuple of parameters.

    Raises:
        ConversionError: TVM can't lower an operation.
    """
    import tvm
    from tvm import relax

    module = module.clone()
    for name, count in inputs.items():
        module[name] = module[name].with_attr("num_input", count)
    passes = [
        relax.transform.DeadCodeElimination(),
        relax.transform.EliminateCommonSubexpr(),
        relax.transform.CanonicalizeBindings(),
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        relax.transform.BundleModelParams(),
        relax.transform.DeadCodeElimination(),
    ]
    try:
        with target, tvm.transform.PassContext(opt_level=3):
            return tvm.transform.Sequential(passes)(module)
    except Exception as error:
        raise _failed("lowering", error) from error


def compile_module(module: Any, target: Any) -> Any:
    """Schedule what has no schedule yet and compile; gives TVM's executable.

    Raises:
        ConversionError: TVM or LLVM refuses the module.
    """
    import tvm
    from tvm.relax.backend.cpu_generic import pipeline as lower

    pipeline = tvm.transform.Sequential(
        [schedule_all(target), *lower.dataflow_lower_passes(target), *lower.finalize_passes(target)]
    )
    try:
        with target, tvm.transform.PassContext(opt_level=3):
            return tvm.compile(module, target=target, relax_pipeline=pipeline)
    except Exception as error:
        raise _failed("compiling", error) from error


def write_library(executable: Any, folder: Path, stem: str, made_for: Machine, scratch: Path) -> list[Path]:
    """Link `<stem>.so`, or leave the object files `<stem>-<i>.o` where nothing links for the machine.

    Raises:
        ConversionError: the linker failed.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    written: list[Path] = []

    def finish(output: str, objects: list[str], **_: Any) -> None:
        names = [Path(o).name for o in objects]
        if made_for.linker is None:
            for i, name in enumerate(names):
                written.append(folder / f"{stem}-{i}.o")
                shutil.copyfile(scratch / name, written[-1])
            return
        # Relative names, run in the scratch folder: no path of this machine gets into the library.
        command = [*made_for.linker, *LINK[:2], "-o", "linked.so", *names, *LINK[2:]]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConversionError(
                f"tvm: linking for {made_for.name} failed: {done.stderr.strip().splitlines()[-1:]}",
                hint=f"run `{' '.join(made_for.linker)} --version`; the compiler or its C library may be incomplete",
                reason=Reason.CONVERTER_FAILED,
            )
        shutil.copyfile(scratch / "linked.so", output)
        written.append(Path(output))

    executable.export_library(str(folder / f"{stem}.so"), fcompile=finish, workspace_dir=str(scratch))
    shutil.rmtree(scratch)
    return written


def last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _failed(what: str, error: Exception) -> ConversionError:
    return ConversionError(
        f"tvm: {what} failed: {last_line(error)}",
        hint="run again with --debug for TVM's own message; leave this target out with --target",
    )
