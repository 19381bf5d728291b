"""coremltools#2370, #2022: flexible shapes move a model from 3 ms to 60 ms, and nothing says so.

A dynamic dimension exists only where the recipe declares it, and the Core ML target warns of each one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from edgec.targets.coreml import CoreMLOptions, convert, open_artifact

from edgec.model import Signature, TensorSpec
from tests.targets.coreml_programs import context, torch_program

pytestmark = pytest.mark.slow


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).softmax(-1)


def signature(batch: int | str) -> Signature:
    dynamic = ((batch, 1, 8),) if isinstance(batch, str) else ()
    x, y = TensorSpec("x", (batch, 4), "float32"), TensorSpec("y", (batch, 3), "float32")
    return Signature("main", (x,), (y,), dynamic=dynamic)


def test_flexible_dimension_is_warned_of_and_still_computes_at_every_size(tmp_path: Path) -> None:
    net = Net()
    rng = np.random.default_rng(0)
    inputs = [{"x": rng.standard_normal((n, 4)).astype(np.float32)} for n in (1, 3, 8)]
    program = torch_program(tmp_path / "p", net, (torch.zeros(3, 4),), signature("batch"), inputs)
    surroundings = context(tmp_path / "c")
    artifact = convert(program, CoreMLOptions(precision="float32"), surroundings)
    warning = next(w for w in surroundings.log.warnings if "flexible" in w)
    assert "`batch`" in warning and "1–8" in warning
    runner = open_artifact(artifact)
    for step in program.recording().steps:
        got = runner.run("main", step.inputs)["y"]
        np.testing.assert_allclose(got, step.outputs["y"], rtol=1e-5, atol=1e-6)


def test_fixed_shapes_are_not_warned_of(tmp_path: Path) -> None:
    x = np.zeros((2, 4), np.float32)
    program = torch_program(tmp_path / "p", Net(), (torch.zeros(2, 4),), signature(2), [{"x": x}])
    surroundings = context(tmp_path / "c")
    convert(program, CoreMLOptions(), surroundings)
    assert not surroundings.log.warnings
