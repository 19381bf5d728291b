"""pytorch_quantization#5, tensorflow#57745: per-tensor weights collapse a MobileNet.

After BatchNorm is folded, the channels of a depthwise weight differ a hundredfold. One scale for all rounds the small
ones to nothing; a scale for each keeps them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from edgec.passes.quantize import QuantizeOptions, quantize
from edgec.passes.quantize_layers import is_quantize

from tests.passes.tiny import context, tiny_model


def test_depthwise_channels_of_different_size_survive(tmp_path: Path) -> None:
    model = tiny_model()
    depthwise, norm = model.module.features[3][0], model.module.features[3][1]  # type: ignore[index, union-attr]
    depthwise.weight.data[::2] *= 0.01  # BatchNorm undoes it, so that the small channels count as much
    norm.running_var[::2] *= 1e-4
    norm.running_mean[::2] *= 0.01
    norm.eps = 1e-9
    weight = depthwise.weight.data / torch.sqrt(norm.running_var).view(-1, 1, 1, 1) * norm.weight.view(-1, 1, 1, 1)
    result = quantize(model, QuantizeOptions(sensitivity=False), context(tmp_path))
    assert result.quantization is not None
    layer = next(x for x in result.quantization.layers if x.name == "features.3.0")
    assert layer.dtype == "int8" and layer.axis == 0
    edge = next(
        n
        for n in result.module.graph.nodes  # type: ignore[union-attr]
        if is_quantize(n) and str(n.args[0].target) == "features.3.0.weight"
    )
    assert "per_channel" in str(edge.target)
    assert weight.shape[0] == 16
    images = torch.cat([model.task.inputs(9000 + i)[0] for i in range(16)])  # type: ignore[attr-defined]
    with torch.no_grad():
        a, b = model.module(images), result.module(images)
    assert float((a - b).norm() / a.norm()) < 0.03


def test_rows_of_different_size_have_their_own_scales() -> None:
    from edgec.passes.quantize_weights import quantize_rows

    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    weight[::2] *= 100.0
    table = quantize_rows(weight)
    error = (table.weight.float() * table.scale.unsqueeze(-1) - weight).norm(dim=1) / weight.norm(dim=1)
    assert float(error.max()) < 0.02
    one_scale = weight.abs().max() / 127
    collapsed = ((weight / one_scale).round() * one_scale - weight).norm(dim=1) / weight.norm(dim=1)
    assert float(collapsed.max()) > 0.3, "what this test guards against would happen with one scale"
