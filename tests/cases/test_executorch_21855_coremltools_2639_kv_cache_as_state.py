"""executorch#21855, coremltools#2639: a KV cache kept as state breaks where the same cache as input and output works.

edgec writes both forms and checks both; a form that parts from the golden fails the build.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from edgec.targets.coreml import CoreMLOptions, convert, open_artifact
from edgec.targets.coreml_counts import read_functions
from edgec.targets.coreml_runner import open_package
from edgec.targets.coreml_state import check_stateful

from edgec.context import Context
from edgec.errors import ParityError
from edgec.golden import Recording, replay
from edgec.model import Artifact, Program
from tests.targets.coreml_programs import context
from tests.targets.programs import decoder_program

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return decoder_program(tmp_path_factory.mktemp("case") / "decoder", layers=1)


@pytest.fixture(scope="module")
def built(decoder: Program, tmp_path_factory: pytest.TempPathFactory) -> tuple[Artifact, Context]:
    surroundings = context(tmp_path_factory.mktemp("case") / "built")
    return convert(decoder, CoreMLOptions(), surroundings), surroundings


def packages(artifact: Artifact) -> dict[str, Path]:
    return {s: artifact.path / p for s, p in artifact.details["stateful_packages"].items()}


def test_both_forms_are_written_and_checked(built: tuple[Artifact, Context], decoder: Program) -> None:
    artifact, surroundings = built
    assert [f.role for f in artifact.files] == ["model", "stateful-model", "recording"]
    assert surroundings.log.metrics["stateful_sqnr_db"] > 50
    kinds = [n.kind for n in read_functions(artifact.file("stateful-model"))["decode"]]
    assert kinds.count("read_state") >= 2  # before the step, and again after each write
    assert kinds.count("write_state") == 2


def test_both_forms_give_the_same_tokens(built: tuple[Artifact, Context], decoder: Program) -> None:
    artifact, _ = built
    steps = decoder.recording().steps
    pools = replay(open_artifact(artifact), decoder.signatures, steps)
    states = replay(open_package(packages(artifact), decoder.signatures, stateful=True), decoder.signatures, steps)
    for a, b in zip(pools, states, strict=True):
        np.testing.assert_array_equal(a["logits"], b["logits"])
        assert not {"k_0_out", "v_0_out"} & set(b)


def test_a_state_that_is_lost_between_steps_fails_the_build(
    built: tuple[Artifact, Context], decoder: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgec.targets.mil_evaluator import MilEvaluator

    artifact, surroundings = built
    run = MilEvaluator.run

    def forgetful(self, function, inputs):  # type: ignore[no-untyped-def]
        self.reset()
        return run(self, function, inputs)

    monkeypatch.setattr(MilEvaluator, "run", forgetful)
    with pytest.raises(ParityError, match="KV pools as states"):
        check_stateful(packages(artifact), decoder, surroundings, strict=True)


def test_the_state_form_alone_can_be_shipped(decoder: Program, tmp_path: Path) -> None:
    artifact = convert(decoder, CoreMLOptions(kv_cache="state"), context(tmp_path / "state"))
    assert [f.role for f in artifact.files] == ["model", "recording"]
    runner = open_artifact(artifact)
    assert runner.stateful
    steps = decoder.recording().steps
    first = replay(runner, decoder.signatures, steps)
    second = replay(runner, decoder.signatures, steps)  # replay resets: nothing is left over from before
    np.testing.assert_array_equal(first[-1]["logits"], second[-1]["logits"])
    assert np.abs(first[-1]["logits"] - steps[-1].outputs["logits"]).max() < 0.02


def test_recording_in_the_artifact_has_no_pools(built: tuple[Artifact, Context]) -> None:
    steps = Recording.load(built[0].file("recording")).steps
    assert all(set(s.outputs) == {"logits", "hidden"} for s in steps)
    assert replace(steps[0]).signature == "prefill"
