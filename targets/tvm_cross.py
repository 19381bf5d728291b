"""The aarch64 library, run here: TVM's own runtime for Arm under qemu-user, driven by tvm_host.cpp.

The x86 wheels have no Arm runtime; the aarch64 wheels of the same versions do. They are fetched once, by name and
digest, into edgec's cache, and only their shared libraries are kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgec.errors import ConversionError, ToolMissing
from edgec.golden import Arrays, Step
from edgec.model import Artifact, Signature

from .tvm_build import AARCH64, linker

QEMU = "qemu-aarch64-static"
PLATFORM = "manylinux_2_28_aarch64"
SYSROOT = Path("/usr/aarch64-linux-gnu")
LIBRARIES = {"tvm/lib/libtvm_runtime.so", "tvm_ffi/lib/libtvm_ffi.so"}
WHEELS = {
    "apache-tvm==0.27.0.post1": "4acfdb7653e4e1ba7a707bdf2833db72eb8fda7d04d99141f2a4e1da43171fb7",
    "apache-tvm-ffi==0.1.14.post0": "d1a011a0743acb88ffc650c70bfb1376fa90cb7196b042598c6d0c1e690ce185",
}


@dataclass(frozen=True)
class ArmHost:
    """What runs aarch64 libraries here: the host program, with TVM's runtime beside it, and the emulator."""

    emulator: str
    program: Path


def qemu() -> str | None:
    """The user-mode emulator for aarch64, or None."""
    return shutil.which(QEMU) or shutil.which("qemu-aarch64")


def arm_host(cache: Path) -> ArmHost:
    """Find the emulator, fetch TVM's Arm runtime and compile the host program; the last two are kept in `cache`.

    Raises:
        ToolMissing: the emulator, the compiler or the runtime can't be had; the message says which.
    """
    emulator, compiler = qemu(), linker(AARCH64)
    if emulator is None:
        raise ToolMissing(f"{QEMU} is missing", hint="apt-get install qemu-user-static")
    if compiler is None or not SYSROOT.is_dir():
        raise ToolMissing(f"{AARCH64}-g++ is missing", hint=f"apt-get install g++-{AARCH64}")
    source = Path(__file__).with_name("tvm_host.cpp")
    key = hashlib.sha256("".join([source.read_text(), *WHEELS.values()]).encode()).hexdigest()[:16]
    home = cache / f"tvm-{AARCH64}-{key}"
    if not home.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            _fetch_runtime(Path(temporary))
            _compile(source, compiler, Path(temporary))
            try:
                Path(temporary).rename(home)
                Path(temporary).mkdir()  # for the context manager to remove
            except OSError:
                if not home.is_dir():  # another build was faster
                    raise
    return ArmHost(emulator, home / "tvm_host")


def _fetch_runtime(folder: Path) -> None:
    wheels = folder / "wheels"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    where = ["--only-binary=:all:", "--platform", PLATFORM, "--retries", "1", "--timeout", "20", "--dest", str(wheels)]
    done = subprocess.run([*pip, *where, *WHEELS], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ToolMissing(
            f"TVM's runtime for Arm can't be downloaded: {last}", hint=f"pip download --platform {PLATFORM} apache-tvm"
        )
    for wheel in sorted(wheels.glob("*.whl")):
        if hashlib.sha256(wheel.read_bytes()).hexdigest() not in WHEELS.values():
            raise ToolMissing(f"{wheel.name} isn't the file that edgec knows", hint="check the package index in use")
        with zipfile.ZipFile(wheel) as archive:
            for name in LIBRARIES & set(archive.namelist()):
                (folder / Path(name).name).write_bytes(archive.read(name))
    shutil.rmtree(wheels)


def _compile(source: Path, compiler: tuple[str, ...], folder: Path) -> None:
    import tvm_ffi

    include = ["-isystem", tvm_ffi.libinfo.find_include_path(), "-isystem", tvm_ffi.libinfo.find_dlpack_include_path()]
    link = ["-L.", "-Wl,--no-as-needed", "-ltvm_runtime", "-ltvm_ffi", "-Wl,--allow-shlib-undefined"]
    command = [*compiler, "-std=c++17", "-O1", *include, "-o", "tvm_host", str(source), *link, "-Wl,-rpath,$ORIGIN"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        last = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-200:])
        raise ToolMissing(f"{AARCH64}-g++ can't compile TVM's host program: {last}", hint="see `edgec doctor`")


def run_aarch64(artifact: Artifact, library: str, step: Step, state: Arrays, host: ArmHost, limit: float) -> Arrays:
    """Run one recorded step through an aarch64 library, from a given state; gives its outputs, state included.

    Raises:
        ConversionError: the program failed or took longer than `limit` seconds.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        spec = next(s for s in artifact.signatures if s.name == step.signature)
        _write_script(artifact, spec, step.inputs | state, folder)
        command = [host.emulator, "-L", str(SYSROOT), "-cpu", "max", str(host.program)]
        command += [str(artifact.path / library), str(folder / "script"), str(folder / "output")]
        # One thread: TVM's pool binds threads to cores that the emulator doesn't show.
        environment = {**os.environ, "TVM_NUM_THREADS": "1"}
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit, env=environment)
        except subprocess.TimeoutExpired as error:
            raise ConversionError(
                f"tvm: `{step.signature}` of {library} ran longer than {limit:.0f} s under {QEMU}",
                hint="raise `verify_seconds`, or set `verify_cross: false` and run it on a device",
            ) from error
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ConversionError(f"tvm: {library} failed under {QEMU}: {last}", hint="run it on a device")
        return _read_outputs(folder / "output", spec)


def _write_script(artifact: Artifact, spec: Signature, inputs: Arrays, folder: Path) -> None:
    """The host program's script, and the inputs that it reads. Every output is saved, in order."""
    lines = _parameter_lines(artifact.path / artifact.details["params"])
    data = bytearray()
    for i, t in enumerate(spec.inputs):
        array = np.ascontiguousarray(inputs[t.name])
        lines.append(_tensor_line(f"in{i}", folder / "inputs", len(data), str(array.dtype), array.shape))
        data.extend(array.tobytes())
    function = artifact.details["functions"][spec.name]
    given = [f"in{i}" for i in range(len(spec.inputs))]
    results = [f"out{i}" for i in range(len(spec.outputs))]
    sizes = (len(given), len(function["params"]), len(results))
    lines.append(" ".join(map(str, ("call", function["name"], *sizes, *given, *function["params"], *results))))
    lines += [f"save {name}" for name in results]
    (folder / "inputs").write_bytes(data)
    (folder / "script").write_text("\n".join(lines) + "\n")


def _parameter_lines(path: Path) -> list[str]:
    """One `tensor` line for each parameter: safetensors is a JSON header and then the bytes."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    lines = []
    for name, entry in header.items():
        if name != "__metadata__":
            dtype = {"F32": "float32", "I8": "int8", "U8": "uint8", "I32": "int32", "I64": "int64", "BOOL": "bool"}
            start = 8 + length + entry["data_offsets"][0]
            lines.append(_tensor_line(name, path, start, dtype[entry["dtype"]], tuple(entry["shape"])))
    return lines


def _tensor_line(name: str, path: Path, offset: int, dtype: str, shape: tuple[int, ...]) -> str:
    return " ".join(map(str, ("tensor", name, path, offset, dtype, len(shape), *shape)))


def _read_outputs(path: Path, spec: Signature) -> Arrays:
    outputs: Arrays = {}
    data, offset = path.read_bytes(), 0
    for t in spec.outputs:
        shape = t.sized({})
        size = int(np.prod(shape)) * np.dtype(t.dtype).itemsize
        outputs[t.name] = np.frombuffer(data[offset : offset + size], t.dtype).reshape(shape)
        offset += size
    return outputs
