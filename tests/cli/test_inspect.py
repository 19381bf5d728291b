"""`edgec inspect` from a shell: exit codes, one JSON document, one line for a damaged file."""

from __future__ import annotations

import pytest

from tests.conftest import Edgec
from tests.onnx_samples import qdq


def test_json_is_one_document_with_what_was_found(edgec: Edgec) -> None:
    done = edgec("inspect", qdq(edgec.folder / "q.onnx"), "--json")
    assert done.code == 0
    assert done.json["format"] == "onnx"
    assert done.json["graphs"][0]["ops"]["QuantizeLinear"] == 2
    assert {q["granularity"] for q in done.json["quantized"]} == {"per tensor", "per channel"}


def test_people_get_tables(edgec: Edgec) -> None:
    done = edgec("inspect", qdq(edgec.folder / "q.onnx"))
    assert done.code == 0
    assert "per channel" in done.stdout and "Conv × 1" in done.stdout


@pytest.mark.parametrize(
    ("name", "content"), [("cut.onnx", None), ("none.onnx", ""), ("a.tflite", "garbage"), ("a.xyz", "what is this")]
)
def test_a_file_that_cannot_be_read_is_one_line_and_exit_code_2(edgec: Edgec, name: str, content: str | None) -> None:
    if content is None:
        whole = qdq(edgec.folder / "q.onnx").read_bytes()
        (edgec.folder / name).write_bytes(whole[: len(whole) // 2])
    elif content:
        (edgec.folder / name).write_text(content)
    done = edgec("inspect", name, "--json")
    assert done.code == 2
    assert done.json["exit_code"] == 2
    assert name in done.json["error"]["message"]
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 2
