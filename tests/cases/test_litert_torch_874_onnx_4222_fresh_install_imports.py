"""litert-torch#874, onnx#4222: a fresh install doesn't import, for the protobuf or the numpy that it got.

Here: one lock file names every package; `make test` itself is what installs it from nothing.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import distributions

import pytest

from tests.conftest import REPOSITORY

LOCK = [line for line in (REPOSITORY / "requirements.lock").read_text().splitlines() if not line.startswith("#")]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_package_is_pinned() -> None:
    assert [line for line in LOCK if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line)] == []


def test_what_is_installed_is_what_is_locked() -> None:
    locked = {normal(name): version for name, _, version in (line.partition("==") for line in LOCK)}
    found = {normal(d.metadata["Name"]): d.version.partition("+")[0] for d in distributions()}
    installed = {name: found.get(name) for name in locked}
    assert installed == locked


@pytest.mark.slow
def test_everything_imports_in_one_process() -> None:
    names = "torch torchao onnx onnxscript onnxruntime tensorflow coremltools tvm litert_torch torch_pruning"
    code = "".join(f"import {name}\n" for name in names.split())
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
