"""onnx2tf#444: constants such as −1e38, for masking or padding, destroy an activation's range."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from edgec.passes.export import ExportOptions, export_program
from edgec.passes.quantize import QuantizeOptions, quantize
from torch import nn

from edgec.errors import ConversionError, Reason
from edgec.model import Model, Signature, TensorSpec
from tests.passes.tiny import TinyTask, context

pytestmark = pytest.mark.slow


class Masked(nn.Module):
    """Attention over eight positions, the last three of which are masked by adding −1e38."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(16, 16)
        self.head = nn.Linear(16, 16)
        mask = torch.zeros(8)
        mask[5:] = -1e38
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.matmul(self.query(x), x.transpose(1, 2)) + self.mask
        return self.head(torch.matmul(scores.softmax(-1), x))


class Padded(nn.Module):
    """Max pooling over a picture padded with −1e38."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padded = nn.functional.pad(self.conv(x), (1, 1, 1, 1), value=-1e38)
        return self.head(self.pool(padded))


def model(module: nn.Module, shape: tuple[int, ...], out: tuple[int, ...]) -> Model:
    signature = Signature("main", (TensorSpec("x", shape, "float32"),), (TensorSpec("y", out, "float32"),))
    task = TinyTask((signature,), make=lambda g: (torch.randn(shape, generator=g),))
    return Model(module.eval(), task, {})


def masked() -> Model:
    torch.manual_seed(0)
    return model(Masked(), (1, 8, 16), (1, 8, 16))


def padded() -> Model:
    torch.manual_seed(0)
    return model(Padded(), (1, 3, 8, 8), (1, 4, 5, 5))


@pytest.mark.parametrize(("make", "name"), [(masked, "mask"), (padded, "value=-1e38")])
def test_they_are_named_clipped_and_ruin_nothing(tmp_path: Path, make: object, name: str) -> None:
    float_model = make()  # type: ignore[operator]
    surroundings = context(tmp_path / "q")
    result = quantize(float_model, QuantizeOptions(sensitivity=False), surroundings)
    assert any("constant -1e+38" in w and name in w and "clipped" in w for w in surroundings.log.warnings)
    (x,) = float_model.task.inputs(77)
    with torch.no_grad():
        a, b = float_model.module(x), result.module(x)
    assert float((a - b).norm() / a.norm()) < 0.05
    assert result.quantization is not None
    assert any(layer.dtype == "int8" for layer in result.quantization.layers)
    export_program(result, ExportOptions(), context(tmp_path / "p"), baseline=None)  # softmax sums to 1


def test_they_can_be_refused(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"-1e\+38 at mask") as caught:
        quantize(masked(), QuantizeOptions(extreme_constants="refuse"), context(tmp_path))
    assert caught.value.reason is Reason.EXTREME_CONSTANT


def test_the_bounds_of_a_clamp_are_no_such_constants(tmp_path: Path) -> None:
    class Clamps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).clamp(-1e38, 1e38)

    surroundings = context(tmp_path)
    quantize(model(Clamps(), (1, 16), (1, 16)), QuantizeOptions(sensitivity=False), surroundings)
    assert not surroundings.log.warnings
