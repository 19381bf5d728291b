"""Gates: each can fail, each can be unproven, and the exit code follows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError
from report_samples import sample

from edgec.errors import ExitCode, Reason, RecipeError
from edgec.gates import Gates, exit_code, gate_error, judge
from edgec.report.document import complete


def verdicts(section: dict[str, Any], **more: Any) -> dict[str, str]:
    return {v.name: v.verdict for v in judge(Gates.model_validate(section), sample(**more))}


@pytest.mark.parametrize(
    ("section", "name", "limits"),
    [
        ("max_bytes", "max_bytes.tflite", ("84 kB", "83 kB")),
        ("max_bytes", "max_bytes.tflite", ({"tflite": 83_333}, {"tflite": 83_332})),
        ("min_compression", "min_compression.tflite", (90, 97)),
        ("min_metric", "min_metric.top1.tflite", ({"top1": 0.9}, {"top1": 0.91})),
        ("max_metric", "max_metric.top1.model", ({"top1": 0.91}, {"top1": 0.9})),
        ("max_drop", "max_drop.tflite", (0.013, 0.012)),
        ("max_drop", "max_drop.model", ("2 %", "1 %")),
        ("min_speedup", "min_speedup.tflite", (2.0, 2.1)),
        ("max_latency_ratio", "max_latency_ratio.tflite", (0.5, 0.4)),
        ("parity", "parity.cosine.tflite", ({"cosine": 0.999}, {"cosine": 1.0})),
        ("parity", "parity.sqnr_db.tflite", ({"sqnr_db": 70}, {"sqnr_db": 90})),
        ("parity", "parity.relative_error.tflite", ({"relative_error": 1e-4}, {"relative_error": 1e-5})),
        ("max_layout_ops", "max_layout_ops.tflite", (2, 1)),
        ("max_undelegated_ops", "max_undelegated_ops.tflite", ({"all": 0, "tflite": 1}, 0)),
    ],
)
def test_each_limit_passes_on_one_side_and_fails_on_the_other(section: str, name: str, limits: tuple[Any, Any]) -> None:
    assert [verdicts({section: limit})[name] for limit in limits] == ["pass", "fail"]


def test_a_target_may_have_parity_limits_of_its_own() -> None:
    section = {
        "parity": {"off_by_n": 3, "cosine": None, "targets": {"tflite": {"off_by_n": 0}, "coreml": {"off_by_n": None}}}
    }
    gates = Gates.model_validate(section)
    assert gates.parity is not None
    assert gates.parity.limits("tflite") == {"off_by_n": 0}
    assert gates.parity.limits("coreml") == {}
    assert gates.parity.limits("onnxruntime") == {"off_by_n": 3}


def test_int8_slower_than_float_fails_a_gate_on_the_ratio() -> None:
    document = sample()
    slow = document.targets["tflite"]
    assert slow.latency_ms is not None
    slow.latency_ms.p50 = 0.6
    judged = {v.name: v for v in judge(Gates.model_validate({"min_speedup": 1.0}), document)}
    assert judged["min_speedup.tflite"].verdict == "fail"
    assert judged["min_speedup.tflite"].value == pytest.approx(0.7)
    assert judged["min_speedup.coreml"].verdict == "unproven"  # never timed here


def test_a_collapsed_metric_fails_without_any_gate_in_the_recipe() -> None:
    document = sample()
    document.targets["tflite"].metric = 0.0009
    document.targets["tflite"].drop = 0.92 - 0.0009
    judged = judge(Gates(), document)
    assert {v.name for v in judged if not v.holds} == {"max_drop.tflite"}
    assert exit_code(judged) == ExitCode.GATE_FAILED


def test_a_broken_converter_fails_without_any_gate_in_the_recipe() -> None:
    document = sample()
    parity = document.targets["tvm"] = document.targets["tflite"].model_copy(deep=True)
    assert parity.parity is not None
    parity.parity.cosine = 0.3
    judged = judge(Gates(), document)
    assert exit_code(judged) == ExitCode.PARITY_FAILED
    error = gate_error(judged)
    assert error is not None and error.reason == Reason.PARITY and "parity.cosine.tvm" in error.message


def test_defaults_can_be_switched_off_only_by_saying_so() -> None:
    assert not [n for n in verdicts({"max_drop": None}) if n.startswith("max_drop")]
    assert not [n for n in verdicts({"parity": None}) if n.startswith("parity")]
    with_default = [n for n in verdicts({}) if n.startswith(("max_drop", "parity"))]
    assert len(with_default) == 7  # the model and three targets; cosine of three


def test_an_artefacts_drop_is_judged_on_its_own_samples() -> None:
    document = sample()
    document.targets["tflite"].source_metric = 0.96
    complete(document)
    judged = {v.name: v for v in judge(Gates.model_validate({"max_drop": "5 %"}), document)}
    assert judged["max_drop.tflite"].limit == pytest.approx(0.048)
    assert judged["max_drop.tflite"].value == pytest.approx(0.0526) and not judged["max_drop.tflite"].holds
    assert judged["max_drop.onnxruntime"].holds


def test_parity_without_numbers_still_asks() -> None:
    document = sample()
    document.targets["tflite"].parity = None
    assert exit_code(judge(Gates.model_validate({"parity": {}}), document)) == ExitCode.GATE_FAILED
    assert exit_code(judge(Gates(), document)) == ExitCode.OK


def test_a_default_without_anything_to_measure_is_reported_and_does_not_fail() -> None:
    document = sample(metric=None)
    judged = judge(Gates(), document)
    [drop] = [v for v in judged if v.name.startswith("max_drop")]
    assert (drop.verdict, drop.required, drop.holds) == ("unproven", False, True)
    [asked] = [v for v in judge(Gates.model_validate({"max_drop": 0.1}), document) if v.name.startswith("max_drop")]
    assert not asked.holds and exit_code([asked]) == ExitCode.GATE_FAILED


def test_skipped_is_unproven_and_fails_the_gate_that_asked() -> None:
    document = sample({"proven": ["coreml", "tflite"]})
    by_name = {g.name: g for g in document.gates}
    assert by_name["proven.tflite"].verdict == "pass"
    assert by_name["proven.coreml"].verdict == "unproven"
    assert "edgec diff" in by_name["proven.coreml"].note  # the command that proves it
    assert document.exit_code == ExitCode.GATE_FAILED
    assert document.error is not None and document.error.reason == Reason.UNPROVEN


def test_a_target_left_out_by_hand_is_not_proven_and_does_not_fail() -> None:
    judged = judge(Gates.model_validate({"proven": ["tvm"]}), sample())
    [verdict] = [v for v in judged if v.name == "proven.tvm"]
    assert verdict.verdict == "unproven" and verdict.holds and "--target" in verdict.note


def test_parity_asked_for_and_not_measured_fails() -> None:
    document = sample()
    document.targets["tflite"].parity = None
    judged = judge(Gates.model_validate({"parity": {"cosine": 0.9}}), document)
    assert exit_code(judged) == ExitCode.GATE_FAILED
    assert [v.name for v in judged if not v.holds] == ["parity.cosine.tflite"]


def test_no_flex_counts_custom_operations_too() -> None:
    assert verdicts({"no_flex": True})["no_flex.tflite"] == "pass"
    document = sample()
    document.targets["tflite"].counts["custom_ops"] = 1
    assert {v.name: v.verdict for v in judge(Gates(no_flex=True), document)}["no_flex.tflite"] == "fail"
    del document.targets["tflite"].counts["custom_ops"]
    assert {v.name: v.verdict for v in judge(Gates(no_flex=True), document)}["no_flex.tflite"] == "unproven"


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("distill.top1 > distill.alone_top1", "pass"),
        ("distill.alone_top1 >= distill.top1", "fail"),
        ("distill.alone_top1 >= distill.top1 - 0.02", "pass"),
        ("tflite.top1 >= 0.9", "pass"),
        ("tflite.bytes < source.bytes", "pass"),
        ("prune.compression > 1e2", "fail"),
        ("distill.nothing > 0.5", "unproven"),
    ],
)
def test_comparisons_between_stages(text: str, verdict: str) -> None:
    assert verdicts({"compare": [text]})[f"compare.{text}"] == verdict


def test_a_comparison_with_a_target_left_out_by_hand_does_not_fail() -> None:
    judged = judge(Gates.model_validate({"compare": ["tflite.top1 >= tvm.top1"]}), sample())
    [verdict] = [v for v in judged if v.name.startswith("compare")]
    assert verdict.verdict == "unproven" and verdict.holds and "`tvm`" in verdict.note


@pytest.mark.parametrize(
    "text", ["__import__('os').system('x') > 0", "distill.top1", "a.b > c.d > e.f", "a.b == c.d", "a.b > c.d * 2", ""]
)
def test_a_comparison_is_not_code(text: str) -> None:
    with pytest.raises(ValidationError, match="not a comparison"):
        Gates.model_validate({"compare": [text]})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"max_bytes": "3 parsecs"}, "not a size"),
        ({"max_bytes": True}, "not a size"),
        ({"max_bytes": 0}, "greater than 0"),
        ({"max_drop": "a lot"}, "not a drop"),
        ({"max_drop": -1}, "greater than or equal to 0"),
        ({"max_layout_ops": -1}, "greater than or equal to 0"),
        ({"parity": {"cosine": 2}}, "less than or equal to 1"),
        ({"parity": {"cosin": 0.9}}, "Extra inputs are not permitted"),
        ({"max_byte": 3}, "Extra inputs are not permitted"),
    ],
)
def test_wrong_limits_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Gates.model_validate(section)


def test_names_are_checked_against_the_recipe() -> None:
    targets, stages = ["tflite", "tvm"], ["distill"]
    Gates.model_validate({"max_bytes": {"all": 1, "tvm": 2}, "compare": ["distill.a > 0"]}).check_names(targets, stages)
    with pytest.raises(RecipeError, match=r"`tflight`.*did you mean `tflite`"):
        Gates.model_validate({"max_bytes": {"tflight": 1}}).check_names(targets, stages)
    with pytest.raises(RecipeError, match="`coreml`, which the recipe doesn't have"):
        Gates.model_validate({"proven": ["coreml"]}).check_names(targets, stages)
    with pytest.raises(RecipeError, match=r"`distil`.*did you mean `distill`"):
        Gates.model_validate({"compare": ["distil.top1 > 0"]}).check_names(targets, stages)


def test_parity_decides_the_exit_code_before_other_gates() -> None:
    document = sample({"max_bytes": 1, "parity": {"cosine": 1.0}})
    assert document.exit_code == ExitCode.PARITY_FAILED
    assert document.error is not None and "and 5 more" in document.error.message


def test_a_lower_is_better_metric_drops_upwards() -> None:
    from edgec.report.document import MetricInfo, drop

    perplexity = MetricInfo(name="perplexity", higher_is_better=False, source=20.0)
    assert drop(perplexity, 21.0) == pytest.approx(1.0)
    assert drop(perplexity, 19.0) == pytest.approx(-1.0)


def test_the_schema_shows_both_ways_to_write_a_limit() -> None:
    schema = Gates.model_json_schema()
    json.dumps(schema)
    assert "3 MB" in json.dumps(schema["properties"]["max_bytes"])
