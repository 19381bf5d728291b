"""Compiles the C++ core: for this host, for other platforms whose compilers are here, and with sanitizers for tests.

`python -m edgec.runtime.compile --out DIR` is the command. The flags here and those of `native/CMakeLists.txt`, which
an app uses, are the same; what each kernel file needs stands in `native/src/kernels/flags.txt`, which both read.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform as machine
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from edgec.errors import ConversionError, EdgecError, Reason, ToolMissing

NATIVE = Path(__file__).parent / "native"
LIBRARY = {"linux": "libedgec.so", "android": "libedgec.so", "macos": "libedgec.dylib"}

# Fused multiply-adds would round once where another CPU rounds twice (see src/vector_math.h).
COMMON = ("-std=c++17", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi")
RELEASE = ("-O3", "-DNDEBUG", "-ffunction-sections", "-fdata-sections")
DEBUG = ("-O1", "-g", "-fno-omit-frame-pointer")


@dataclass(frozen=True)
class Platform:
    """Where a library runs: `system` is linux, macos or android; `processor` x86_64 or aarch64."""

    system: str
    processor: str

    @property
    def name(self) -> str:
        return f"{self.system}-{self.processor}"

    @property
    def library(self) -> str:
        return LIBRARY[self.system]


def host() -> Platform:
    """This machine."""
    processor = {"AMD64": "x86_64", "arm64": "aarch64"}.get(machine.machine(), machine.machine())
    return Platform({"darwin": "macos"}.get(sys.platform, "linux"), processor)


LINUX_AARCH64 = Platform("linux", "aarch64")
LINUX_X86_64 = Platform("linux", "x86_64")
MACOS_AARCH64 = Platform("macos", "aarch64")
ANDROID_AARCH64 = Platform("android", "aarch64")
PLATFORMS = (LINUX_X86_64, LINUX_AARCH64, ANDROID_AARCH64, MACOS_AARCH64)


def sources() -> list[Path]:
    """The core's C++ files, in the order they are linked."""
    return sorted((NATIVE / "src").rglob("*.cpp"))


def source_digest() -> str:
    """SHA-256 over everything that a library is compiled from, these flags included."""
    digest = hashlib.sha256()
    files = [p for p in (NATIVE / "src").rglob("*") if p.is_file()] + list((NATIVE / "include").iterdir())
    for path in [*sorted(files), Path(__file__)]:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def compiler(target: Platform) -> list[str] | None:
    """The command that compiles C++ for `target` here, or None. `CXX` names the host's."""
    if target == host():
        found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
        return found.split() if found else _zig(target)
    if target == LINUX_AARCH64 and (cross := shutil.which("aarch64-linux-gnu-g++")):
        return [cross]
    if target.system == "android":
        return _android(target)
    return _zig(target)


def compiler_hint(target: Platform) -> str:
    """What to install to compile for `target`."""
    if target == host():
        return "apt-get install g++"
    if target == LINUX_AARCH64:
        return "apt-get install g++-aarch64-linux-gnu"
    if target.system == "android":
        return "install the Android NDK and set ANDROID_NDK_HOME"
    return "pip install ziglang"


def _for_zig(flag: str) -> str:
    """Zig names features after a CPU where others name them after an architecture."""
    if not flag.startswith("-march="):
        return flag
    _, *features = flag.removeprefix("-march=").split("+")
    return "+".join(["-mcpu=baseline", *features])


def _zig(target: Platform) -> list[str] | None:
    from importlib.util import find_spec

    if find_spec("ziglang") is None:
        return None
    triple = {"linux": "linux-gnu.2.28", "macos": "macos"}[target.system]
    return [sys.executable, "-m", "ziglang", "c++", "-target", f"{target.processor}-{triple}"]


def _android(target: Platform) -> list[str] | None:
    root = os.environ.get("ANDROID_NDK_HOME") or os.environ.get("ANDROID_NDK_ROOT")
    found = (
        sorted(Path(root).glob(f"toolchains/llvm/prebuilt/*/bin/{target.processor}-linux-android26-clang++"))
        if root
        else []
    )
    return [str(found[-1])] if found else None


def kernel_flags(processor: str) -> dict[str, list[str]]:
    """Extra flags by file name; the files of other processors are absent, and are compiled to nothing."""
    flags = {}
    for line in (NATIVE / "src/kernels/flags.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, wanted, *rest = line.split()
            if wanted == processor:
                flags[name] = rest
    return flags


def build_library(
    out: Path, target: Platform | None = None, *, sanitize: Sequence[str] = (), debug: bool = False
) -> Path:
    """Compile and link `libedgec` into `out`.

    Args:
        target: the platform; this machine when None.
        sanitize: of "address", "undefined" and "thread".
        debug: with assertions, among them the pool's self-check after every step.

    Raises:
        ToolMissing: there is no compiler for `target` here.
        ConversionError: compiling failed; the message has the compiler's first error.
    """
    target = target or host()
    command = _command(target)
    flags = _flags(sanitize, debug)
    library = out / target.library
    link = ["-shared", *flags]
    if target.system == "macos":
        link += ["-Wl,-dead_strip"]
    else:
        link += ["-Wl,--gc-sections", f"-Wl,--version-script={NATIVE / 'src/exports.map'}", "-Wl,-z,relro,-z,now"]
        if not sanitize and not debug:
            link += ["-s", "-static-libgcc", "-static-libstdc++"]
    _compile_and_link(command, sources(), flags, link, library, target)
    return library


def build_tests(
    out: Path, target: Platform | None = None, *, sanitize: Sequence[str] = (), main: str | None = None
) -> Path:
    """Compile the core with its C++ tests into one executable `check` in `out`; asserts are on.

    `main` names a file of `native/tests` with a `main` of its own (a fuzzer), built instead of the tests.
    """
    target = target or host()
    tests = NATIVE / "tests"
    if main:
        files = [tests / main, tests / "tiny_bundle.cpp"]
    else:
        files = [p for p in sorted(tests.glob("*.cpp")) if not p.name.startswith("fuzz")]
    program = out / (Path(main).stem if main else "check")
    flags = [*_flags(sanitize, True), f"-I{tests}"]
    link = list(flags) if sanitize else [*flags, *([] if target == host() else ["-static"])]
    _compile_and_link(_command(target), [*sources(), *files], flags, link, program, target)
    return program


def _command(target: Platform) -> list[str]:
    command = compiler(target)
    if command is None:
        raise ToolMissing(f"there is no C++ compiler for {target.name} here", hint=compiler_hint(target))
    return command


def _flags(sanitize: Sequence[str], debug: bool) -> list[str]:
    flags = [*COMMON, *(DEBUG if debug or sanitize else RELEASE), "-pthread"]
    flags += [f"-I{NATIVE / 'include'}", f"-I{NATIVE / 'src'}"]
    # Objects name no folder of this machine, so that equal sources give equal bytes.
    flags += [f"-ffile-prefix-map={NATIVE}=."]
    if sanitize:
        flags += [f"-fsanitize={','.join(sanitize)}", "-fno-sanitize-recover=all"]
    return flags


def _compile_and_link(
    command: list[str], files: list[Path], flags: list[str], link: list[str], output: Path, target: Platform
) -> None:
    extra = kernel_flags(target.processor)
    if "ziglang" in command:
        extra = {name: [_for_zig(flag) for flag in own] for name, own in extra.items()}
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        objects = [Path(folder) / f"{i:02}-{path.stem}.o" for i, path in enumerate(files)]

        def compile_one(job: tuple[Path, Path]) -> None:
            path, made = job
            _run(
                [*command, *flags, *extra.get(path.name, []), "-c", path.name, "-o", str(made)], path.parent, path.name
            )

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(compile_one, zip(files, objects, strict=True)))
        linked = Path(folder) / output.name
        _run([*command, *map(str, objects), *link, "-o", str(linked)], Path(folder), output.name)
        shutil.move(linked, output)


def _run(command: list[str], folder: Path, what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, cwd=folder)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        first = next((line for line in lines if "error" in line), lines[0] if lines else f"exit code {done.returncode}")
        raise ConversionError(
            f"compiling {what} failed: {first[:300]}",
            hint="the command was: " + " ".join(command)[:600],
            reason=Reason.CONVERTER_FAILED,
        )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m edgec.runtime.compile", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for what is made")
    parser.add_argument("--target", choices=[p.name for p in PLATFORMS], help="platform; default: this machine")
    parser.add_argument("--sanitize", default="", help="address,undefined or thread")
    parser.add_argument("--debug", action="store_true", help="with assertions")
    parser.add_argument("--tests", action="store_true", help="the C++ tests too")
    given = parser.parse_args(arguments)
    target = next((p for p in PLATFORMS if p.name == given.target), None)
    sanitize = [s for s in given.sanitize.split(",") if s]
    try:
        print(build_library(given.out, target, sanitize=sanitize, debug=given.debug))
        if given.tests:
            print(build_tests(given.out, target, sanitize=sanitize))
    except EdgecError as error:
        print(f"{error.message}\n  {error.hint}".rstrip(), file=sys.stderr)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
