"""onnxruntime#10503, #21979: calibration stores every activation, 200 GB of them."""

from __future__ import annotations

import pickle

import pytest
import torch
from edgec.passes.quantize_observers import range_observer


def observer(calibrator: str) -> torch.nn.Module:
    return range_observer()(
        calibrator=calibrator,
        percentile=99.0,
        dtype=torch.int8,
        quant_min=-128,
        quant_max=127,
        qscheme=torch.per_tensor_affine,
    )


def held_bytes(module: torch.nn.Module) -> int:
    """Everything that an observer keeps, attributes and buffers."""
    state = {k: v for k, v in vars(module).items() if not k.startswith("_")}
    return len(pickle.dumps([state, dict(module.named_buffers())]))


@pytest.mark.parametrize("calibrator", ["min-max", "percentile", "mse"])
def test_what_is_kept_does_not_grow_with_the_number_of_samples(calibrator: str) -> None:
    generator = torch.Generator().manual_seed(0)
    watching = observer(calibrator)
    watching(torch.randn(1000, generator=generator))
    after_one = held_bytes(watching)
    for i in range(300):
        watching(torch.randn(1000, generator=generator) * (1 + i))  # the range keeps growing, too
    assert abs(held_bytes(watching) - after_one) <= 64


def test_the_histogram_loses_no_value_when_its_range_grows() -> None:
    watching = observer("mse")
    watching(torch.linspace(0, 1, 100))
    watching(torch.linspace(-50, 50, 1000))
    assert float(watching.counts.sum()) == 1100
    assert watching.low <= -50 and watching.low + watching.width > 50


def test_percentile_and_mse_ignore_what_min_max_can_not() -> None:
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    values[0] = 1000.0
    ranges = {}
    for calibrator in ("min-max", "percentile", "mse"):
        watching = observer(calibrator)
        watching(values)
        ranges[calibrator] = watching.chosen_range()
    assert ranges["min-max"][1] == 1000.0
    assert ranges["percentile"][1] < 5
    assert ranges["mse"][1] < 1000.0


def test_mse_finds_the_range_with_the_least_error() -> None:
    values = torch.randn(50_000, generator=torch.Generator().manual_seed(1))
    values[:5] = 60.0

    def error(low: float, high: float) -> float:
        step = (high - low) / 255
        return float((((values.clamp(low, high) - low) / step).round() * step + low - values).square().mean())

    watching = observer("mse")
    watching(values)
    chosen = error(*watching.chosen_range())
    candidates = [error(watching.least * k / 20, watching.greatest * k / 20) for k in range(1, 21)]
    assert chosen <= min(candidates) * 1.05
