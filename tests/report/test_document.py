"""The document: what the issue promises is in it, it fits its schema, and it derives what follows."""

from __future__ import annotations

import json

import jsonschema
import pytest
from pydantic import ValidationError
from report_samples import MB, sample, stage

from edgec.report.document import BuildDocument, ParityRecord, complete, schema

PROMISED = {"status", "exit_code", "bundle", "seconds", "cached_stages", "ledger", "targets", "gates"}
LEDGER = {"stage", "verdict", "bytes", "parameters", "metric", "seconds", "peak_memory"}
TARGET = {"proven", "bytes", "parity", "latency_ms", "float_latency_ms"}
GATE = {"name", "limit", "value", "verdict"}
ERROR = {"code", "reason", "message", "hint"}


def test_promised_fields_are_there() -> None:
    data = sample({"max_bytes": 1}).to_json()
    assert PROMISED | {"error"} <= data.keys()
    assert all(line.keys() >= LEDGER for line in data["ledger"])
    assert all(target.keys() >= TARGET for target in data["targets"].values())
    assert data["targets"]["tflite"]["parity"].keys() >= {"cosine", "sqnr_db", "relative_error", "off_by_n"}
    assert data["targets"]["tflite"]["latency_ms"].keys() == {"p50", "p95"}
    assert all(gate.keys() >= GATE for gate in data["gates"])
    assert data["error"].keys() == ERROR and data["error"]["code"] == data["exit_code"] == 3
    assert data["status"] == "failed"


def test_a_build_without_an_error_has_no_error_field() -> None:
    data = sample().to_json()
    assert "error" not in data and data["status"] == "built" and data["exit_code"] == 0


@pytest.mark.parametrize("gates", [{}, {"max_bytes": 1, "proven": ["coreml"]}])
def test_documents_fit_the_published_schema(gates: dict[str, object]) -> None:
    published = schema()
    jsonschema.Draft202012Validator.check_schema(published)
    data = sample(gates).to_json()
    jsonschema.validate(json.loads(json.dumps(data, allow_nan=False)), published)
    del data["exit_code"]
    with pytest.raises(jsonschema.ValidationError, match="exit_code"):
        jsonschema.validate(data, published)


def test_a_document_survives_its_own_json() -> None:
    document = sample({"compare": ["distill.top1 > 0.5"]})
    assert BuildDocument.model_validate_json(document.model_dump_json()) == document


def test_nan_is_refused() -> None:
    with pytest.raises(ValidationError, match="finite"):
        stage("x", "pass", 1, float("nan"))


def test_compression_is_a_running_product_from_the_float_source() -> None:
    by_name = {s.stage: s for s in sample().ledger}
    assert [by_name[n].factor for n in ("source", "distill", "prune", "quantize")] == [1.0, 8.0, 4.0, 4.0]
    assert by_name["quantize"].compression == pytest.approx(1.0 * 8.0 * 4.0 * 4.0)
    assert by_name["tflite"].compression == pytest.approx(8 * MB / (MB // 12))


def test_drops_are_counted_from_the_source() -> None:
    document = sample()
    drops = {s.stage: s.drop for s in document.ledger}
    assert drops["source"] == 0.0 and drops["distill"] == pytest.approx(0.008) and drops["export"] is None
    assert document.targets["tflite"].drop == pytest.approx(0.0126)


def test_drops_are_counted_from_the_model_that_was_trained() -> None:
    """A recipe that trains its teacher starts from random weights, from which nothing drops."""
    document = sample()
    document.ledger.insert(1, stage("train", "pass", 8 * MB, 0.93))
    document.ledger[0].metric = 0.1
    assert document.metric is not None
    document.metric.source, document.metric.stage = 0.93, "train"
    complete(document)
    drops = {s.stage: s.drop for s in document.ledger}
    assert drops["source"] is None and drops["train"] == 0.0
    assert drops["distill"] == pytest.approx(0.018) and drops["tflite"] == pytest.approx(0.0226)


def test_an_artefact_drops_from_the_source_on_its_own_samples() -> None:
    document = sample()
    document.targets["tflite"].samples, document.targets["tflite"].source_metric = 8, 1.0
    complete(document)
    tflite = document.stage("tflite")
    assert tflite is not None
    assert document.targets["tflite"].drop == tflite.drop == pytest.approx(1.0 - 0.9074)
    assert document.targets["onnxruntime"].drop == pytest.approx(0.92 - 0.9073)


def test_sizes_that_surprise_are_warned_of_once() -> None:
    document = sample()
    assert document.targets["tflite"].warnings == []
    tflite = document.stage("tflite")
    assert tflite is not None and tflite.predicted_bytes == MB // 16
    tflite.bytes = document.targets["tflite"].bytes = 2 * MB
    document.targets["tflite"].float_bytes = 2 * MB
    complete(document)
    complete(document)
    assert (
        tflite.warnings
        == document.targets["tflite"].warnings
        == [
            "the result has 2,000,000 bytes, where 62,500 were predicted",
            "the artefact has 2,000,000 bytes, and its float twin 2,000,000",
        ]
    )


def test_four_wastes_are_numbers() -> None:
    wastes = sample().wastes
    assert wastes is not None
    assert wastes.size.by["tflite"] == pytest.approx(1 - (MB // 16) / (MB // 12))
    assert wastes.size.share == pytest.approx(1 - (MB // 16) / (MB // 10))
    assert wastes.compute.share == pytest.approx(2 / 40)
    assert wastes.idle.share == pytest.approx(1 - 5 * 12.5 / 101.0)  # the cached stage took no time in this build
    assert wastes.memory.share == pytest.approx(1 - 8 / 900)


def test_what_was_not_measured_is_not_a_number() -> None:
    document = BuildDocument(status="failed", exit_code=5)
    complete(document)
    assert document.wastes is not None
    assert {w.share for w in (document.wastes.memory, document.wastes.compute, document.wastes.size)} == {None}


def test_completing_twice_changes_nothing() -> None:
    document = sample()
    before = document.model_dump_json()
    complete(document)
    assert document.model_dump_json() == before


def test_parity_fits_the_record_with_its_rows() -> None:
    record = sample().targets["tflite"].parity
    assert isinstance(record, ParityRecord) and record.worst is not None
    assert len(record.rows) == 2 and record.off_by_n == 0
