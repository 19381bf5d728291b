"""Ctrl-C in the middle of a stage: nothing half-done and nothing running is left, and the next build goes on."""

from __future__ import annotations

import gzip
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Edgec

Write = Callable[..., Path]

TASK = """\
  image-classification:
    classes: 4
    preprocessing: {size: [12, 12], channels: 3}
    train: {images: [{from: "*.png"}], labels: {from: labels.gz}, batch: 4}
    evaluation: {images: [{from: "*.png"}], labels: {from: labels.gz}}
"""


@pytest.fixture
def recipe(edgec: Edgec, write_recipe: Write) -> Callable[[str], Path]:
    """The tiny recipe with this pass, on sixteen images."""
    from PIL import Image

    random = np.random.default_rng(0)
    for i in range(16):
        Image.fromarray(random.integers(0, 256, (12, 12, 3), dtype=np.uint8)).save(edgec.folder / f"{i:02}.png")
    labels = struct.pack(">HBBI", 0, 8, 1, 16) + random.integers(0, 4, 16, dtype=np.uint8).tobytes()
    (edgec.folder / "labels.gz").write_bytes(gzip.compress(labels))
    task = "  tensors:\n    inputs: {image: [1, 3, 12, 12]}\n"
    return lambda what: write_recipe((task, TASK), ("- scale: {factor: 2.0}", f"- {what}"))


def start(edgec: Edgec, path: Path) -> subprocess.Popen[str]:
    """In a session of its own, as from a terminal; a test run in the background hands on that Ctrl-C is ignored."""
    return subprocess.Popen(
        [sys.executable, "-m", "edgec", "build", str(path)],
        cwd=edgec.folder,
        env=edgec.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def wait_for(process: subprocess.Popen[str], there: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not there():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)


def of_this_store(edgec: Edgec) -> list[int]:
    """Processes that were started with this test's store: the build, its stages, and what they started."""
    mark = f"EDGEC_CACHE={edgec.store}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def check_interrupted(edgec: Edgec, process: subprocess.Popen[str]) -> None:
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stdout == ""
    last = stderr.strip().splitlines()[-1]
    assert last == "edgec: interrupted; finished stages are kept, the same command goes on from there"
    assert "Traceback" not in stderr and "Abort" not in stderr
    assert of_this_store(edgec) == []
    assert not list((edgec.folder / "out").rglob("*bundle*"))
    assert not list(edgec.store.glob("tmp/*")), "what the stage had half-written"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_training_that_was_interrupted_goes_on_where_it_was(edgec: Edgec, recipe: Callable[[str], Path]) -> None:
    path = recipe("train: {epochs: 100000, checkpoint_every: 4}")
    process = start(edgec, path)
    wait_for(process, lambda: list(edgec.store.glob("work/*/train.training.pt")))
    os.killpg(process.pid, signal.SIGINT)
    check_interrupted(edgec, process)
    (checkpoint,) = edgec.store.glob("work/*/train.training.pt")
    again = start(edgec, path)
    before = checkpoint.stat().st_mtime_ns
    wait_for(again, lambda: checkpoint.stat().st_mtime_ns != before)
    os.killpg(again.pid, signal.SIGINT)
    _, stderr = again.communicate(timeout=60)
    assert "✓ source: cached" in stderr
    assert "train: goes on at step" in stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_same_command_finishes_what_was_interrupted(edgec: Edgec, write_recipe: Write) -> None:
    path = write_recipe(("- scale: {factor: 2.0}", "- misbehave: {how: hang-once}"))
    process = start(edgec, path)
    wait_for(process, lambda: list(edgec.store.glob("work/*/started")))
    assert len(of_this_store(edgec)) == 3, "the build, its stage, and a program that the stage has started"
    process.send_signal(signal.SIGINT)  # the build alone: the rest must end with it
    check_interrupted(edgec, process)
    done = edgec("build", path, "--json")
    assert done.code == 0, done.stderr
    assert done.json["cached_stages"] == ["source"]
    assert (edgec.folder / done.json["bundle"] / "bundle.json").is_file()
