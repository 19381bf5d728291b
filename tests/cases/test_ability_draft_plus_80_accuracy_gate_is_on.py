"""ability-draft-plus#80: quantisation took 99.5 % accuracy to 0.09 %, and the pipeline was content.

Here: a limit on the metric's drop stands without being asked for. (That weights are quantised per channel is shown in
the quantise pass's tests.)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Edgec


@pytest.mark.slow
def test_a_collapsed_metric_fails_a_recipe_without_gates(
    edgec: Edgec, write_recipe: Callable[..., Path], shared_store: Path
) -> None:
    recipe = write_recipe(("- scale: {factor: 2.0}", "- misbehave: {how: forget}"), ("gates:\n  max_drop: null\n", ""))
    done = edgec("build", recipe, "--json", EDGEC_CACHE=str(shared_store))
    assert done.code == 3
    failed = {g["name"]: g for g in done.json["gates"] if g["verdict"] == "fail"}
    assert failed.keys() == {"max_drop.model", "max_drop.copy"}  # parity holds: the artefact is what the model became
    assert not failed["max_drop.model"]["required"] and failed["max_drop.model"]["limit"] == pytest.approx(0.05)
    assert done.json["bundle"] is None
