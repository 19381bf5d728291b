"""`torchrun … -m edgec build`: every rank trains, the first one builds, and the result is a build like any other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edgec.ranks import without_ranks
from tests.conftest import Edgec
from tests.tasks.test_image_classification import write_idx

MODEL = """
from torch import nn

def net(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 3),
    )
"""

RECIPE = """\
version: 1
name: ranks
threads: 1
model:
  factory: model.py:net
  args: {width: 8}
task:
  image-classification:
    classes: 3
    preprocessing: {size: [8, 8], channels: 1, mean: [128], std: [64], fit: exact}
    train:
      images: [{from: images.gz}]
      labels: {from: labels.gz}
      batch: 16
    evaluation:
      images: [{from: images.gz}]
      labels: {from: labels.gz}
passes:
  - distill:
      student: {factory: model.py:net, args: {width: 4}}
      epochs: 1
      baseline: false
targets:
  copy: {}
measure: {latency_runs: 2}
gates: {max_drop: null}
"""


def test_a_stage_of_one_rank_does_not_see_the_others() -> None:
    assert without_ranks({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1", "HOME": "/h"}) == {"HOME": "/h"}


@pytest.mark.slow
def test_a_build_under_torchrun_trains_on_every_rank_and_builds_once(edgec: Edgec) -> None:
    folder: Path = edgec.folder
    random = np.random.default_rng(0)
    write_idx(folder / "images.gz", random.integers(0, 256, (64, 8, 8), dtype=np.uint8))
    write_idx(folder / "labels.gz", random.integers(0, 3, 64, dtype=np.uint8))
    (folder / "model.py").write_text(MODEL)
    (folder / "recipe.yaml").write_text(RECIPE)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "edgec"]
    done = subprocess.run(
        [*launch, "build", "recipe.yaml", "--json"],
        cwd=folder,
        env=edgec.environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads(done.stdout)  # one document: the other rank says nothing
    assert [s["stage"] for s in document["ledger"]] == ["source", "distill", "export", "copy"]
    assert (folder / document["bundle"] / "bundle.json").is_file()
    assert list((edgec.store / "tmp").iterdir()) == []
    again = edgec("build", "recipe.yaml", "--json")
    assert again.json["cached_stages"] == ["source", "distill", "export", "copy"]
