"""The training loop: deterministic, resumable after kill -9, data-parallel under torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from edgec.passes.training import train
from torch import nn

from edgec.errors import ConversionError, Reason, SourceError
from tests.passes.tiny import TinyTask, context, tiny_cnn
from tests.passes.training_script import ShardedTask, digest

REPOSITORY = Path(__file__).parent.parent.parent
SCRIPT = ["-m", "tests.passes.training_script"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def trained(folder: Path, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    module = nn.Sequential(tiny_cnn(), nn.Dropout(0.1))
    history = train(module, ShardedTask(), context=context(folder), **{"epochs": 2, "lr": 1e-2, **options})
    return module, history


def script(*arguments: str | Path, processes: int = 1) -> Any:
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [*launcher, *SCRIPT, *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as run:
        try:
            stdout, stderr = run.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)  # the launcher's workers, too
            raise
    assert run.returncode == 0, stderr[-2000:]
    return [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]


def test_the_loss_falls_and_the_module_ends_in_evaluation_mode(tmp_path: Path) -> None:
    module, history = trained(tmp_path, epochs=4)
    assert history.losses[-1] < 0.8 * history.losses[0]
    assert len(history.losses) == 4 and history.steps == 64
    assert not any(part.training for part in module.modules())


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    assert digest(trained(tmp_path / "a")[0]) == digest(trained(tmp_path / "b")[0])


def test_weights_come_back_in_the_usual_layout(tmp_path: Path) -> None:
    module, _ = trained(tmp_path)
    assert all(p.is_contiguous() for p in module.parameters())


class Stop(Exception):
    """Stands for a killed process."""


def test_a_run_that_was_interrupted_ends_with_the_same_weights(tmp_path: Path) -> None:
    steps = 0

    def stop() -> None:
        nonlocal steps
        steps += 1
        if steps == 21:  # in the middle of the second epoch, two steps after a checkpoint
            raise Stop

    with pytest.raises(Stop):
        trained(tmp_path / "killed", after_step=stop, checkpoint_every=19)
    module, history = trained(tmp_path / "killed", checkpoint_every=19)
    whole, through = trained(tmp_path / "whole", checkpoint_every=19)
    assert history.resumed_at == 19
    assert digest(module) == digest(whole)
    assert history.losses == through.losses


def test_a_checkpoint_of_other_options_is_not_resumed(tmp_path: Path) -> None:
    trained(tmp_path, epochs=1)
    _, history = trained(tmp_path, epochs=1, lr=1e-3)
    assert history.resumed_at == 0


def test_a_loss_that_is_not_finite_stops_the_stage(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="loss became") as caught:
        trained(tmp_path, loss=lambda _inputs, outputs, _labels: outputs.sum() * float("nan"))
    assert caught.value.reason == Reason.NOT_FINITE


def test_empty_training_data_is_named(tmp_path: Path) -> None:
    class Empty(TinyTask):
        def training(self, epoch: int, *, rank: int = 0, world: int = 1) -> Iterator[tuple[Any, Any]]:
            yield from ()

    with pytest.raises(SourceError, match="empty"):
        train(tiny_cnn(), Empty(), epochs=1, lr=0.1, context=context(tmp_path))


def test_epoch_hooks_run_again_for_epochs_that_were_done(tmp_path: Path) -> None:
    trained(tmp_path, epochs=2)
    seen: list[int] = []
    _, history = trained(tmp_path, epochs=2, before_epoch=seen.append)
    assert seen == [0, 1] and history.resumed_at == history.steps


@pytest.mark.slow
def test_two_processes_train_one_model_and_the_same_each_time(tmp_path: Path) -> None:
    first = script(tmp_path / "a", processes=2)
    second = script(tmp_path / "b", processes=2)
    assert len(first) == 2 and first[0]["digest"] == first[1]["digest"], "both ranks end with the same weights"
    assert first[0]["digest"] == second[0]["digest"]
    assert first[0]["losses"][-1] < first[0]["losses"][0]
    again = script(tmp_path / "a", processes=2)  # only the first rank has the checkpoint
    assert [run["resumed_at"] for run in again] == [24, 24]
    assert again[0]["digest"] == again[1]["digest"] == first[0]["digest"]


@pytest.mark.slow
def test_a_killed_process_resumes_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    command = [sys.executable, *SCRIPT, str(tmp_path / "killed"), "--slow"]
    process = subprocess.Popen(command, cwd=REPOSITORY, env=ENVIRONMENT, stdout=subprocess.PIPE)
    checkpoint = tmp_path / "killed" / "first" / "stage" / "train.training.pt"
    deadline = time.monotonic() + 60
    while not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    resumed = script(tmp_path / "killed")[0]
    whole = script(tmp_path / "whole")[0]
    assert resumed["resumed_at"] > 0
    assert resumed["digest"] == whole["digest"]
