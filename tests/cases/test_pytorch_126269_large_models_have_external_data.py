"""pytorch#126269: a model over 2 GB becomes an ONNX file that nothing can parse.

Weights go to a file of their own from a limit on, which the test lowers; signatures share that file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from edgec.passes.export import ExportOptions, export_program
from edgec.passes.export_onnx import WEIGHTS
from torch import nn

from edgec.golden import OnnxRunner
from edgec.model import Model, Signature, TensorSpec
from tests.passes.tiny import TinyTask, context


def signature(name: str, rows: int) -> Signature:
    return Signature(name, (TensorSpec("x", (rows, 64), "float32"),), (TensorSpec("y", (rows, 256), "float32"),))


class TwoSizes(TinyTask):
    def example(self, signature: Signature) -> tuple[torch.Tensor, ...]:
        return (torch.randn(signature.inputs[0].sized({})),)


@pytest.mark.slow
def test_weights_lie_in_one_file_beside_both_signatures(tmp_path: Path) -> None:
    task = TwoSizes((signature("one", 1), signature("four", 4)), make=lambda g: (torch.randn((1, 64), generator=g),))
    module = nn.Linear(64, 256).eval()
    options = ExportOptions(external_data_over=10_000)
    program = export_program(Model(module, task, {}), options, context(tmp_path), baseline=None)
    weight_bytes = 64 * 256 * 4
    assert program.onnx_path("one").stat().st_size < weight_bytes / 10
    assert weight_bytes <= (program.path / WEIGHTS).stat().st_size < 1.5 * weight_bytes, "equal weights are stored once"
    for name, rows in (("one", 1), ("four", 4)):
        onnx.checker.check_model(str(program.onnx_path(name)))
        x = np.random.default_rng(0).standard_normal((rows, 64)).astype(np.float32)
        got = OnnxRunner({name: program.onnx_path(name)}).run(name, {"x": x})["y"]
        np.testing.assert_allclose(got, module(torch.from_numpy(x)).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_small_models_are_one_file(tmp_path: Path) -> None:
    task = TwoSizes((signature("one", 1),), make=lambda g: (torch.randn((1, 64), generator=g),))
    model = Model(nn.Linear(64, 256).eval(), task, {})
    program = export_program(model, ExportOptions(), context(tmp_path), baseline=None)
    assert not (program.path / WEIGHTS).exists()
