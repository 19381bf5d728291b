"""coremltools#1798, #1135: "convert function for op X not implemented", and nothing else.

edgec's error names the operation, the user's source line, and what to do.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from edgec.targets.coreml import CoreMLOptions, convert

from edgec.errors import ConversionError, ExitCode, Reason
from edgec.model import Signature, TensorSpec
from tests.targets.coreml_programs import context, torch_program

pytestmark = pytest.mark.slow

SIGNATURE = Signature("main", (TensorSpec("x", (3, 3), "float32"),), (TensorSpec("y", (3, 3), "float32"),))


class Unsupported(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.special.i1(x + 1)  # the line that the error must name
        return torch.special.i0(x)  # and this one, in the same message


class Failing(torch.nn.Module):
    """Convertible by name, but not with a scale that is computed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ops = torch.ops.quantized_decomposed
        scale, zero = x.abs().max() / 127, torch.zeros((), dtype=torch.int64)
        return ops.quantize_per_tensor.tensor(x, scale, zero, -128, 127, torch.int8).float()


def convert_error(folder: Path, module: torch.nn.Module) -> ConversionError:
    x = np.eye(3, dtype=np.float32)
    program = torch_program(folder / "p", module, (torch.from_numpy(x),), SIGNATURE, [{"x": x}])
    with pytest.raises(ConversionError) as caught:
        convert(program, CoreMLOptions(), context(folder / "c"))
    return caught.value


def line_of(text: str) -> int:
    return next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line)


def test_error_names_every_operation_its_line_and_what_to_do(tmp_path: Path) -> None:
    error = convert_error(tmp_path, Unsupported())
    assert error.reason == Reason.UNSUPPORTED_OP
    assert error.exit_code == ExitCode.CONVERSION_FAILED
    name = Path(__file__).name
    assert f"{name}:{line_of('the line that the error must name')}" in error.message
    assert f"{name}:{line_of('and this one, in the same message')}" in error.message
    assert "special_i1" in error.message and "special_i0" in error.message
    assert "\n" not in error.message
    assert "--target" in error.hint


def test_operation_that_fails_while_converting_is_located_too(tmp_path: Path) -> None:
    import torch.ao.quantization.fx._decomposed  # noqa: F401 (defines the operations)

    error = convert_error(tmp_path, Failing())
    assert f"{Path(__file__).name}:{line_of('ops.quantize_per_tensor.tensor')}" in error.message
    assert "quantize_per_tensor" in error.message
    assert error.__cause__ is not None
