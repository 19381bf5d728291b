"""The aarch64 libraries, executed: TVM's Arm runtime (from its aarch64 wheels) under qemu-user."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from edgec.targets import tvm as target
from edgec.targets.tvm_cross import qemu
from edgec.targets.tvm_prove import prove_aarch64

from edgec.errors import ParityError
from edgec.model import Program
from tests.targets.programs import cnn_program, decoder_program
from tests.targets.test_tvm import build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.network,
    pytest.mark.skipif(qemu() is None or shutil.which("aarch64-linux-gnu-g++") is None, reason="needs qemu and g++"),
]
BOTH = ["host", "aarch64-linux-gnu"]


@pytest.fixture(scope="module")
def cache() -> Path:
    """Kept between runs: the runtime is a download of 97 MB."""
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return base / "edgec" / "tests"


def _build(program: Program, folder: Path, cache: Path, **options: object) -> tuple[target.Artifact, target.Context]:
    folder.mkdir(exist_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    (folder / "cache").symlink_to(cache)
    return build(program, folder, triples=BOTH, **options)


def test_int8_cnn_on_arm_gives_the_golden(tmp_path: Path, cache: Path) -> None:
    artifact, context = _build(cnn_program(tmp_path / "program"), tmp_path / "out", cache)
    library = artifact.details["report_libraries"][1]
    assert library["proof"] == "executed under qemu-user", context.log.warnings
    assert library["relative_error"] < 1e-6


def test_decoder_on_arm_carries_its_pools_over_all_steps(tmp_path: Path, cache: Path) -> None:
    program = decoder_program(tmp_path / "program", layers=1)
    steps = len(program.recording().steps)
    artifact, context = _build(program, tmp_path / "out", cache, verify_steps=steps)
    library = artifact.details["report_libraries"][1]
    assert library["proof"] == "executed under qemu-user", context.log.warnings
    assert library["steps"] == steps and library["relative_error"] < 1e-5


def test_a_wrong_weight_is_caught_on_arm(tmp_path: Path, cache: Path) -> None:
    from safetensors.numpy import load_file, save_file

    program = cnn_program(tmp_path / "program", quantized=False)
    artifact, context = _build(program, tmp_path / "out", cache)
    arrays = load_file(artifact.path / target.PARAMS)
    largest = max(arrays, key=lambda n: arrays[n].size)
    save_file(arrays | {largest: np.ascontiguousarray(arrays[largest] * 1.02)}, artifact.path / target.PARAMS)
    library = dict(artifact.details["report_libraries"][1])
    with pytest.raises(ParityError, match="under qemu differs from the golden"):
        prove_aarch64(artifact, library, program, target.TvmOptions(), context)
