"""Training with quantisation in the loop."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from edgec.passes.quantize import QatOptions, QuantizeOptions, quantize
from torch import nn

from tests.passes.tiny import context, tiny_model


@pytest.mark.slow
def test_conversion_folds_batchnorm_with_its_own_epsilon(tmp_path: Path) -> None:
    """torchao's patterns convert with ε = 1e-5. With ε = 0.1 that would be another model."""
    model = tiny_model()
    for module in model.module.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 0.1
    model.task.teacher = copy.deepcopy(model.module)  # type: ignore[attr-defined]
    surroundings = context(tmp_path)
    still = QatOptions(epochs=1, lr=1e-9, freeze_batchnorm=1, freeze_ranges=1)  # trains nothing: float = converted
    result = quantize(model, QuantizeOptions(qat=still, sensitivity=False, exclude=("head",)), surroundings)
    images = torch.cat([model.task.inputs(9000 + i)[0] for i in range(16)])  # type: ignore[attr-defined]
    with torch.no_grad():
        a, b = model.module(images), result.module(images)
    assert float((a - b).norm() / a.norm()) < 0.05
    assert {"float_agreement", "ptq_agreement", "qat_agreement"} <= set(surroundings.log.metrics)
    assert not [n for n in result.module.graph.nodes if "batch_norm" in str(n.target)]  # type: ignore[union-attr]
    assert result.quantization is not None
    assert {x.name for x in result.quantization.layers if x.dtype == "float32"} == {"head"}


@pytest.mark.slow
def test_training_lowers_the_loss_of_the_quantised_model(tmp_path: Path) -> None:
    model = tiny_model()
    teacher = copy.deepcopy(model.module)
    model.task.teacher = teacher  # type: ignore[attr-defined]
    model.module.head.weight.data.mul_(0.3)  # type: ignore[union-attr, operator]
    result = quantize(
        model,
        QuantizeOptions(qat=QatOptions(epochs=4, lr=5e-3, freeze_batchnorm=4), sensitivity=False),
        context(tmp_path),
    )
    images = torch.cat([model.task.inputs(9000 + i)[0] for i in range(16)])  # type: ignore[attr-defined]
    with torch.no_grad():
        before, after = (float((m(images) - teacher(images)).norm()) for m in (model.module, result.module))
    assert after < 0.7 * before
