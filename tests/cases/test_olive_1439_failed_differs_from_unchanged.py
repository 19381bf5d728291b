"""Olive#1439: users couldn't tell "failed" from "kept the original".

Here: each stage reports changed, unchanged or failed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Edgec


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "verdict"),
    [("scale: {factor: 2.0}", "changed"), ("scale: {factor: 1.0}", "unchanged"), ("misbehave: {}", "failed")],
)
def test_each_stage_says_which(edgec: Edgec, write_recipe: Callable[..., Path], line: str, verdict: str) -> None:
    done = edgec("build", write_recipe(("scale: {factor: 2.0}", line)), "--json", "--until", line.split(":")[0])
    assert done.json["ledger"][1]["verdict"] == verdict
