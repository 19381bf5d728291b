"""The C++ core's own tests: as they are, under the sanitizers, and for Arm under an emulator."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from edgec.runtime.compile import LINUX_AARCH64, NATIVE, build_library, build_tests, compiler, host
from tests.tiny_bundle import write_tiny_bundle

pytestmark = pytest.mark.slow

QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")


def run(command: list[str], **environment: str) -> None:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=500,
        check=False,
        env=os.environ | environment,
    )
    assert done.returncode == 0, (done.stdout[-3000:] + done.stderr)[-6000:]


def test_core_passes_its_tests(tmp_path: Path) -> None:
    run([str(build_tests(tmp_path))])


def test_core_is_clean_under_address_and_undefined_behaviour_sanitizers(tmp_path: Path) -> None:
    program = build_tests(tmp_path, sanitize=["address", "undefined"])
    run([str(program)], ASAN_OPTIONS="detect_leaks=1:allocator_may_return_null=1")


def test_core_is_clean_under_thread_sanitizer(tmp_path: Path) -> None:
    program = build_tests(tmp_path, sanitize=["thread"])
    run([str(program), "engine", "one_answer_whatever_the_kernels", "one_answer_batched", "threads"])


@pytest.mark.skipif(QEMU is None, reason="qemu-user is not installed: apt-get install qemu-user-static")
@pytest.mark.skipif(
    compiler(LINUX_AARCH64) is None, reason="no compiler for aarch64: apt-get install g++-aarch64-linux-gnu"
)
def test_core_passes_its_tests_on_aarch64(tmp_path: Path) -> None:
    """Among them the digest of one_answer_on_every_platform, which was taken on x86-64."""
    program = build_tests(tmp_path, LINUX_AARCH64)
    wanted = ["one_answer", "kernels", "math", "rope", "engine_s", "sampler", "tokenizer"]
    run([str(QEMU), "-cpu", "max", str(program), *wanted])  # NEON, dotprod and i8mm
    run([str(QEMU), "-cpu", "cortex-a53", str(program), "one_answer_on_every", "kernels"])  # NEON alone


def test_damaged_bundles_and_wild_calls_break_nothing(tmp_path: Path) -> None:
    program = build_tests(tmp_path, sanitize=["address", "undefined"], main="fuzz_bundle.cpp")
    done = subprocess.run([program, "1", "4000"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    iterations, opened, accepted = (int(word) for word in done.stdout.split() if word.isdigit())
    assert opened > iterations // 5
    assert accepted > opened // 2  # the damage is mild enough to get past the first check


def test_the_example_in_c_answers(tmp_path: Path) -> None:
    native = write_tiny_bundle(tmp_path / "bundle") / "bundle/native"
    library = build_library(tmp_path, debug=True)
    program = tmp_path / "chat"
    source = NATIVE / "examples/chat.c"
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{NATIVE / 'include'}"]
    run(["gcc", *flags, str(source), str(library), f"-Wl,-rpath,{tmp_path}", "-o", str(program)])
    said = subprocess.run([program, native, "hello"], capture_output=True, check=True).stdout
    assert len(said) > 1
    refused = subprocess.run([program, tmp_path / "absent", "hello"], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "absent" in refused.stderr


@pytest.mark.parametrize("target", [host(), LINUX_AARCH64], ids=lambda p: p.name)
def test_libraries_are_small_and_export_only_the_abi(target, tmp_path: Path) -> None:
    if compiler(target) is None:
        pytest.skip(f"no compiler for {target.name}")
    library = build_library(tmp_path, target)
    assert library.stat().st_size < 1_000_000
    names = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout.split()[2::3]
    assert names
    assert [name for name in names if not name.startswith("edgec_")] == []
