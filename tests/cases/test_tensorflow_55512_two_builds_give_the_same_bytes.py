"""tensorflow#55512, mlx-lm#1759: the same input gave different artefacts.

Here: `edgec build --check-reproducible` builds twice from nothing and compares; the passing and the failing case are in
tests/test_build.py, and each target's own bytes are compared in tests/targets/. What is tested here is that the bundle
holds nothing that depends on when, where or how fast it was built.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edgec.store import digest_tree
from tests.conftest import Edgec


@pytest.mark.slow
def test_bundles_of_two_stores_and_two_folders_are_equal(
    edgec: Edgec, write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = write_recipe()
    first = edgec("build", recipe, "--json", "--out", tmp_path / "first")
    second = edgec("build", recipe, "--json", "--out", tmp_path / "second", EDGEC_CACHE=str(tmp_path / "other"))
    assert first.code == second.code == 0
    assert digest_tree(Path(first.json["bundle"]))[1] == digest_tree(Path(second.json["bundle"]))[1]
