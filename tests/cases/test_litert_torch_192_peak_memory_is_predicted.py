"""litert-torch#192: a conversion was killed for memory at 80 GB.

Here: the plan predicts each stage's peak memory and the build reports it; a stage that is killed all the same becomes
an error that says so (test_olive_1340_2113_failed_stage_is_not_success.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Edgec

pytestmark = pytest.mark.slow


def test_prediction_and_measurement_are_of_one_size(edgec: Edgec, write_recipe: Callable[..., Path]) -> None:
    recipe = write_recipe()
    plan = edgec("plan", recipe, "--json").json
    predicted = {s["stage"]: s["predicted_peak_memory"] for s in plan["stages"]}
    built = edgec("build", recipe, "--json").json
    measured = {s["stage"]: s["peak_memory"] for s in built["ledger"]}
    assert set(predicted) == set(measured)
    for stage, peak in measured.items():
        assert 0.2 * predicted[stage] < peak < 1.5 * predicted[stage], stage
    assert plan["peak_memory"] == max(predicted.values())


def test_a_larger_model_is_predicted_to_need_more(edgec: Edgec, write_recipe: Callable[..., Path]) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    peaks = []
    for size in (1, 5_000_000):
        save_file({"w": np.zeros(size, np.float32)}, edgec.folder / "weights.safetensors")
        recipe = write_recipe(("factory: model.py:tiny", "factory: model.py:tiny\n  from: weights.safetensors"))
        plan = edgec("plan", recipe, "--json").json
        peaks.append(plan["peak_memory"])
    assert peaks[1] - peaks[0] > 5_000_000 * 4
