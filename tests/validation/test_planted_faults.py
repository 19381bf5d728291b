"""`edgec validate` finds faults that were planted, and says where to look."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Done
from tests.validation.planted import BIASED, OFF_BY_ONE, OTHER_NUMBERS, Patch, patched_core, put_library, scale_layer

pytestmark = pytest.mark.slow  # cores are compiled

Validate = Callable[..., Done]


def verdicts(done: Done) -> dict[str, str]:
    """Of the native engine's checks against the reference with its weights, or itself."""
    findings = done.json["targets"]["native"]["findings"]
    return {f["check"]: f["verdict"] for f in findings if f["reference"] != "float"}


def test_a_good_bundle_passes(good: Path, validate: Validate) -> None:
    done = validate(good, "--model", good, "--json")
    assert done.code == 0, done.stderr
    assert set(verdicts(done).values()) <= {"pass", "reported", "unproven"}
    unproven = {name for name, verdict in verdicts(done).items() if verdict == "unproven"}
    assert unproven == {"weights"}  # they would be held against themselves


def test_one_layers_scale_is_named(good: Path, broken: Path, validate: Validate) -> None:
    scale_layer(broken, "layers.1.mlp.down_proj", 1.05)
    done = validate(broken, "--model", good, "--json")
    assert done.code == 6
    assert "layers.1.mlp.down_proj: its scales are 1.05× the reference's" in done.stderr
    found = verdicts(done)
    assert found["weights"] == "fail"
    assert found["draws"] == found["batching"] == "pass"


def test_rope_off_by_one_is_named(good: Path, broken: Path, validate: Validate, tmp_path: Path) -> None:
    put_library(broken, patched_core(tmp_path, OFF_BY_ONE))
    done = validate(broken, "--model", good, "--json")
    assert done.code == 6
    assert "whose queries are rotated one position further" in done.stderr
    assert "RoPE is off by one" in done.stderr
    found = verdicts(done)
    assert found["kl"] == "fail"
    assert found["draws"] == found["preemption"] == "pass"


@pytest.mark.parametrize(
    ("patch", "says"),
    [(BIASED, "the sampler is biased"), (OTHER_NUMBERS, "it draws other numbers")],
    ids=["biased", "other-numbers"],
)
def test_a_wrong_sampler_is_named(
    patch: Patch, says: str, good: Path, broken: Path, validate: Validate, tmp_path: Path
) -> None:
    put_library(broken, patched_core(tmp_path, patch))
    done = validate(broken, "--model", good, "--json")
    assert done.code == 6
    assert "the logits agree" in done.stderr and says in done.stderr
    found = verdicts(done)
    assert found["kl"] == found["greedy"] == found["requests"] == "pass"
    assert found["draws"] == "fail"
