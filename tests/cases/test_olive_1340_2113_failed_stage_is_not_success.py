"""Olive#1340, #2113: a stage raised, the log showed it, and the exit code was 0.

Here: any failed stage gives a non-zero exit code, no bundle, and one line that says why.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Edgec


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "reason", "says"),
    [
        ("raise", 5, "converter-failed", "the converter choked on node_17"),
        ("kill", 5, "out-of-memory", "killed"),
        ("exit", 5, "converter-crashed", "exit code 7"),
        ("memory", 5, "out-of-memory", "memory ran out"),
    ],
)
def test_a_failed_stage_fails_the_build(
    edgec: Edgec, write_recipe: Callable[..., Path], how: str, code: int, reason: str, says: str
) -> None:
    done = edgec("build", write_recipe(("- scale: {factor: 2.0}", f"- misbehave: {{how: {how}}}")), "--json")
    assert done.code == code
    document = done.json
    assert document["status"] == "failed" and document["bundle"] is None
    assert document["error"]["code"] == code and document["error"]["reason"] == reason
    assert says in document["error"]["message"] and "\n" not in document["error"]["message"]
    assert document["ledger"][-1] | {"stage": "misbehave", "verdict": "failed"} == document["ledger"][-1]
    assert not (edgec.folder / "out" / "tiny" / "bundle").exists()
    assert "Traceback" not in done.stderr
