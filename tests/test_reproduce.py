"""The same recipe gives the same bytes, converters included: twice in a process, and in another with its own store."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from edgec.store import digest_tree
from tests.conftest import Edgec

MODEL = """
import torch
from torch import nn

def tiny() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.Conv2d(8, 16, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    )
"""

RECIPE = """\
version: 1
name: tiny
model:
  factory: model.py:tiny
task:
  tensors:
    inputs: {image: [1, 3, 16, 16]}
passes:
  - quantize: {scheme: static}
targets:
  onnxruntime: {}
  tflite: {}
measure: {latency_runs: 2}
gates:
  max_drop: null
"""


def digests(document: Any) -> dict[str, str]:
    assert document["status"] == "built", document["error"]
    return {stage["stage"]: stage["digest"] for stage in document["ledger"]}


@pytest.mark.slow
def test_static_int8_gives_the_same_bytes_twice_and_in_another_process_and_store(edgec: Edgec, tmp_path: Path) -> None:
    (edgec.folder / "model.py").write_text(MODEL)
    (edgec.folder / "recipe.yaml").write_text(RECIPE)
    first = edgec("build", "recipe.yaml", "--check-reproducible", "--json", PYTHONHASHSEED="1")
    assert first.code == 0, first.stderr
    assert "reproducible: 6 digests are the same" in first.stderr
    kept = shutil.move(edgec.folder / "out", tmp_path / "first")
    second = edgec("build", "recipe.yaml", "--json", EDGEC_CACHE=str(tmp_path / "another"), PYTHONHASHSEED="2")
    assert second.code == 0, second.stderr
    assert second.json["cached_stages"] == []
    assert set(digests(first.json)) == {"source", "quantize", "export", "onnxruntime", "tflite"}
    assert digests(first.json) == digests(second.json)
    bundles = [Path(kept) / "tiny" / "bundle", edgec.folder / second.json["bundle"]]
    assert digest_tree(bundles[0])[1] == digest_tree(bundles[1])[1]
