"""coremltools#2115, #1798, #1135: "convert function for op X not implemented", and not a word on where X comes from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from edgec.passes.export import ExportOptions, export_program
from torch import nn

from edgec.errors import ConversionError, ExitCode, Reason
from edgec.model import Model, Signature, TensorSpec
from tests.passes.tiny import TinyTask, context


class Exotic(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        return torch.special.bessel_j0(doubled)  # ONNX has no Bessel functions


@pytest.mark.slow
def test_the_error_names_the_operator_the_user_s_line_and_what_to_do(tmp_path: Path) -> None:
    x = TensorSpec("x", (2, 8), "float32")
    signature = Signature("main", (x,), (TensorSpec("y", (2, 8), "float32"),))
    task = TinyTask((signature,), make=lambda g: (torch.randn((2, 8), generator=g),))
    with pytest.raises(ConversionError) as caught:
        export_program(Model(Exotic().eval(), task, {}), ExportOptions(), context(tmp_path), baseline=None)
    error = caught.value
    assert error.reason is Reason.UNSUPPORTED_OP and error.exit_code is ExitCode.CONVERSION_FAILED
    assert "special_bessel_j0" in error.message
    assert f"{Path(__file__).name}:20: return torch.special.bessel_j0(doubled)" in error.message
    assert error.hint
