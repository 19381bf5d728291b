"""pytorch#169178, #168224, #166797: an exported ResNet gives 0 % accuracy, or a bias of the wrong shape.

Here ONNX is held against PyTorch right after the export, relative to the output's own scale: outputs of 1e-9 are
compared as strictly as outputs of 1.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from edgec.passes import export_check, export_onnx
from edgec.passes.export import ExportOptions, export_program
from torch import nn

from edgec.errors import ParityError, Reason
from edgec.golden import OnnxRunner
from edgec.model import Model
from tests.passes.tiny import TinyTask, context, tiny_cnn

pytestmark = pytest.mark.slow


class Small(nn.Module):
    """The CNN with outputs of the order of 1e-9."""

    def __init__(self) -> None:
        super().__init__()
        self.body = tiny_cnn()

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.body(image) * 1e-9


def test_tiny_outputs_do_not_hide_a_lost_bias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simplify = export_onnx.simplify

    def lose_bias(model: object) -> None:
        import onnx_ir as ir

        simplify(model)  # type: ignore[arg-type]
        assert isinstance(model, ir.Model)
        bias = model.graph.initializers["body.head.bias"]
        assert bias.const_value is not None
        bias.const_value = ir.tensor(np.zeros_like(bias.const_value.numpy()), name=bias.name)

    model = Model(Small().eval(), TinyTask(), {})
    export_program(model, ExportOptions(), context(tmp_path / "right"), baseline=None)
    monkeypatch.setattr(export_onnx, "simplify", lose_bias)
    with pytest.raises(ParityError) as caught:
        export_program(model, ExportOptions(), context(tmp_path / "wrong"), baseline=None)
    assert caught.value.reason is Reason.PARITY


def test_a_wrong_shape_is_no_parity() -> None:
    ones = np.ones((2, 3), np.float32)
    with pytest.raises(ParityError):
        export_check.check_parity({"y": ones}, {"y": np.ones((2, 1), np.float32)}, None, "here")


def test_grouped_query_attention_of_fixed_shape_keeps_its_reshapes(tmp_path: Path) -> None:
    """onnxscript's `_broadcast_to_matmul` makes another model of this block without a word."""
    from edgec.architectures.llama import Llama, LlamaConfig
    from edgec.model import Signature, TensorSpec

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, layers=1, heads=4, kv_heads=2, head_dim=8)
    ids = TensorSpec("ids", (1, 12), "int64")
    signature = Signature("main", (ids,), (TensorSpec("logits", (1, 12, 64), "float32"),))
    task = TinyTask((signature,), make=lambda g: (torch.randint(0, 64, (1, 12), generator=g),))
    module = Llama(config).eval()
    program = export_program(Model(module, task, {}), ExportOptions(), context(tmp_path), baseline=None)
    (x,) = task.inputs(7)
    got = OnnxRunner({"main": program.onnx_path("main")}).run("main", {"ids": x.numpy()})["logits"]
    with torch.no_grad():
        np.testing.assert_allclose(got, module(x).numpy(), rtol=1e-3, atol=1e-5)
