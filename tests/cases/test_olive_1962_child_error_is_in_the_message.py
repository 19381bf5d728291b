"""Olive#1962: a child process failed, and only "failed" was shown.

Here: the child's own error is in the message; and when it died without one, its last words are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Edgec


@pytest.mark.slow
def test_the_exception_of_the_child_is_in_the_message(edgec: Edgec, write_recipe: Callable[..., Path]) -> None:
    done = edgec("build", write_recipe(("- scale: {factor: 2.0}", "- misbehave: {how: raise}")))
    assert done.code == 5
    assert "ValueError: the converter choked on node_17" in done.stderr

    debug = edgec("--debug", "build", "recipe.yaml")
    assert "Traceback" in debug.stderr and "misbehave.py" in debug.stderr


@pytest.mark.slow
def test_the_last_words_of_a_crashed_child_are_in_the_message(edgec: Edgec, write_recipe: Callable[..., Path]) -> None:
    done = edgec("build", write_recipe(("- scale: {factor: 2.0}", "- misbehave: {how: exit}")))
    assert done.code == 5
    assert "the tool's own last words" in done.stderr
