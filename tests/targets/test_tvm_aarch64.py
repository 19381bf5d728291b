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

from edgec.context import Context
from edgec.errors import ParityError
from edgec.model import Artifact, Program
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


def _build(program: Program, folder: Path, cache: Path) -> tuple[Artifact, Context]:
    folder.mkdir(exist_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    (folder / "cache").symlink_to(cache)
    return build(program, folder, triples=BOTH)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Program, Artifact, Context]:
    folder = tmp_path_factory.mktemp("decoder-arm")
    program = decoder_program(folder / "program", layers=1)
    return program, *_build(program, folder / "out", cache)


def test_int8_cnn_on_arm_gives_the_golden(tmp_path: Path, cache: Path) -> None:
    artifact, context = _build(cnn_program(tmp_path / "program"), tmp_path / "out", cache)
    library = artifact.details["report_libraries"][1]
    assert library["proof"] == "executed under qemu-user", context.log.warnings
    assert library["relative_error"] < 1e-6


def test_decoder_on_arm_continues_from_filled_pools(decoder: tuple[Program, Artifact, Context]) -> None:
    _, artifact, context = decoder
    library = artifact.details["report_libraries"][1]
    assert library["proof"] == "executed under qemu-user", context.log.warnings
    assert set(library["proven_signatures"]) == {"decode", "prefill"} and library["relative_error"] < 1e-5


def test_a_signature_that_would_take_too_long_is_unproven(decoder: tuple[Program, Artifact, Context]) -> None:
    program, artifact, context = decoder
    library = dict(artifact.details["report_libraries"][1])
    options = target.TvmOptions.model_validate({"verify_seconds": 0.0})
    prove_aarch64(artifact, library, program, options, context)
    assert library["proof"] == "partly executed under qemu-user"
    assert len(library["proven_signatures"]) == 1
    assert any("is unproven here" in warning for warning in context.log.warnings)


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
