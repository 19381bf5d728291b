"""A store that the cases share: what they have in common is built once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Done, Edgec

INT8 = ("- scale: {factor: 2.0}", "- quantize: {scheme: static, sensitivity: false}")


@pytest.fixture(scope="session")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared") / "store"


@pytest.fixture
def build_int8(edgec: Edgec, write_recipe: Callable[..., Path], shared_store: Path) -> Callable[..., Done]:
    """Build the tiny recipe in INT8 for the target `copy`, spoilt as told, with the gates given as YAML."""

    def run(spoil: str, **gates: Any) -> Done:
        lines = "".join(f"\n  {name}: {value}" for name, value in {"max_drop": "null", **gates}.items())
        recipe = write_recipe(
            INT8,
            ("copy: {}", f"copy: {{spoil: {spoil}}}" if spoil else "copy: {}"),
            ("\n  max_drop: null", lines),
            ("latency_runs: 2", "latency_runs: 5"),
        )
        return edgec("build", recipe, "--json", EDGEC_CACHE=str(shared_store))

    return run
