"""rf-detr#1142: a backend was not installed in CI, its parity test was skipped, and CI was green.

Here: what was not run is reported as unproven, a gate that asks for it fails, and a missing tool stops the build.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Edgec


@pytest.mark.slow
def test_unproven_fails_the_gate_that_asked_for_it_and_no_other(
    edgec: Edgec, write_recipe: Callable[..., Path]
) -> None:
    unproven = ("copy: {}", "copy: {spoil: proof}")
    without = edgec("build", write_recipe(unproven), "--json")
    assert without.code == 0
    assert without.json["targets"]["copy"]["proven"] is False
    asked = edgec("build", write_recipe(unproven, ("max_drop: null", "max_drop: null\n  proven: [copy]")), "--json")
    assert asked.code == 3
    assert asked.json["error"]["reason"] == "unproven"
    assert [g["verdict"] for g in asked.json["gates"] if g["name"] == "proven.copy"] == ["unproven"]


def test_a_missing_tool_stops_the_build_before_it_costs_anything(
    edgec: Edgec, write_recipe: Callable[..., Path]
) -> None:
    done = edgec("build", write_recipe(("copy: {}", "absent: {}")))
    assert done.code == 4
    assert "unobtainium-compiler" in done.stderr and "apt-get install unobtainium" in done.stderr
    assert not list(edgec.store.glob("objects/*/*"))
