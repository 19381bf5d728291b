"""Olive#575: nothing was produced, so packaging was skipped, and the exit code was 0.

Here: a stage that reports success and wrote nothing has failed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Edgec


@pytest.mark.slow
def test_a_target_that_writes_nothing_fails_the_build(edgec: Edgec, write_recipe: Callable[..., Path]) -> None:
    done = edgec("build", write_recipe(("copy: {}", "copy: {spoil: nothing-written}")), "--json")
    assert done.code == 5
    assert done.json["error"]["reason"] == "empty-output"
    assert done.json["bundle"] is None
