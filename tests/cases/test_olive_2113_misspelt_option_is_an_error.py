"""Olive#2113: a misspelt option was ignored with a warning, and the build "succeeded".

Here: an unknown key anywhere in a recipe is an error with a place and a suggestion, before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Edgec


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "factor: 2.0",
            "facter: 2.0",
            "recipe.yaml:9:13: unknown option `facter` of pass `scale`; did you mean `factor`?",
        ),
        ("latency_runs: 2", "latency_run: 2", "did you mean `latency_runs`?"),
        ("max_drop: null", "max_dropp: null", "did you mean `max_drop`?"),
    ],
)
def test_a_misspelt_option_names_the_right_one(
    edgec: Edgec, write_recipe: Callable[..., Path], old: str, new: str, says: str
) -> None:
    done = edgec("build", write_recipe((old, new)))
    assert done.code == 2
    assert says in done.stderr
    assert not list(edgec.store.glob("objects/*/*"))
