"""icefall#2003, tensorflow#58451: a model quantised all one way loses half its accuracy.

A part can be left in float, by hand or under a budget; here one layer is made so that INT8 ruins it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from edgec.passes.quantize import QuantizeOptions, quantize

from edgec.model import Model
from tests.passes.tiny import TinyTask, context, tiny_cnn

pytestmark = pytest.mark.slow


class Fidelity(TinyTask):
    """1 − relative error of the logits: continuous, so that a budget can be met to a fine degree."""

    metric = "fidelity"

    def evaluate(self, runner, reference, *, limit=None):  # type: ignore[no-untyped-def]
        got = self.reference(runner)["logits"]
        want = reference["logits"]
        error = float(((got - want) ** 2).sum() ** 0.5 / (want**2).sum() ** 0.5)
        return {"fidelity": 1 - error}


def ruined_by_int8() -> Model:
    module = tiny_cnn()
    pointwise = module.features[4][3]  # type: ignore[index]
    pointwise.weight.data[:, 0] += 60.0  # one weight in each channel dwarfs the rest …
    module.features[4][0].weight.data[0] *= 1e-3  # … and its input is next to nothing  # type: ignore[index]
    module.features[4][1].weight.data[0] *= 1e-3  # type: ignore[index]
    module.features[4][1].bias.data[0] = 0.0  # type: ignore[index]
    return Model(module, Fidelity(), {})


def loss_of(model: Model, options: QuantizeOptions, folder: Path) -> tuple[float, Model]:
    result = quantize(model, options, context(folder))
    images = torch.cat([model.task.inputs(9000 + i)[0] for i in range(16)])  # type: ignore[attr-defined]
    with torch.no_grad():
        a, b = model.module(images), result.module(images)
    return float((a - b).norm() / a.norm()), result


def test_one_part_in_float_restores_the_model(tmp_path: Path) -> None:
    model = ruined_by_int8()
    everything, _ = loss_of(model, QuantizeOptions(sensitivity=False), tmp_path / "a")
    without, _ = loss_of(model, QuantizeOptions(sensitivity=False, exclude=("features.4.3",)), tmp_path / "b")
    assert everything > 3 * without


def test_max_drop_finds_that_part_by_itself(tmp_path: Path) -> None:
    model = ruined_by_int8()
    _, result = loss_of(model, QuantizeOptions(max_drop=0.03, max_trials=6), tmp_path)
    assert result.quantization is not None
    floats = {x.name: x.reason for x in result.quantization.layers if x.dtype == "float32"}
    assert floats.get("features.4.3") == "max_drop"
    assert len(floats) < len(result.quantization.layers) / 2
