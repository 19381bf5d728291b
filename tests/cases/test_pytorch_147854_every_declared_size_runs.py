"""pytorch#147854: an export with a dynamic dimension runs only at the exported size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from edgec.passes import export_check, export_onnx
from edgec.passes.export import ExportOptions, export_program
from torch import nn

from edgec.errors import ParityError
from edgec.model import Model, Signature, TensorSpec
from tests.passes.tiny import TinyTask, context

pytestmark = pytest.mark.slow

SIGNATURE = Signature(
    "main",
    (TensorSpec("x", ("batch", "time", 4), "float32"),),
    (TensorSpec("y", ("batch", "time", 4), "float32"),),
    dynamic=(("batch", 1, 3), ("time", 2, 9)),
)


class Mixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x.reshape(-1, 4)).view(x.shape[0], x.shape[1], 4)
        return y - y.mean(1, keepdim=True)


def model() -> Model:
    torch.manual_seed(0)
    return Model(Mixes().eval(), TinyTask((SIGNATURE,), make=lambda g: (torch.randn((2, 5, 4), generator=g),)), {})


def test_least_middle_and_greatest_of_each_dimension_are_tried() -> None:
    sizes = list(export_check.sizes_to_try(SIGNATURE))
    assert {s["batch"] for s in sizes} == {1, 2, 3}
    assert {s["time"] for s in sizes} == {2, 5, 9}
    assert {"batch": 1, "time": 2} in sizes and {"batch": 3, "time": 9} in sizes
    assert len(sizes) == len({tuple(s.items()) for s in sizes})


def test_an_export_that_follows_its_sizes_passes(tmp_path: Path) -> None:
    surroundings = context(tmp_path)
    program = export_program(model(), ExportOptions(), surroundings, baseline=None)
    assert program.signatures[0].outputs[0].shape == ("batch", "time", 4)
    assert any("sizes" in note for note in surroundings.log.notes)


def test_an_export_that_is_tied_to_its_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def frozen(program: object, signature: Signature, path: Path, **options: object) -> None:
        from edgec.graphs import capture

        fixed = Signature("main", (TensorSpec("x", (2, 5, 4), "float32"),), (TensorSpec("y", (2, 5, 4), "float32"),))
        module = model()
        write(capture(module.module, module.task.example(fixed), fixed), fixed, path, **options)  # type: ignore[arg-type]

    write = export_onnx.write_onnx
    monkeypatch.setattr(export_onnx, "write_onnx", frozen)
    with pytest.raises(ParityError, match="at batch="):
        export_program(model(), ExportOptions(), context(tmp_path), baseline=None)
