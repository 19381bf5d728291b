"""`edgec validate` from a shell: bad input, exit codes, the document, JUnit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from junitparser import JUnitXml

from tests.conftest import Done, Edgec

pytestmark = pytest.mark.slow  # each test starts a command that loads PyTorch

DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--target", "natif"], "did you mean `native`"),
        (["--target", "tvm"], "no such engine"),
        (["--require", "batch"], "did you mean `batching`"),
        (["--max-kl", "0"], "--max-kl"),
        (["--min-top1", "2"], "--min-top1"),
        (["--device", "tpu"], "--device tpu"),
        (["--reference", "localhost"], "must be the URL"),
        (["--text", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(good: Path, edgec: Edgec, arguments: list[str], word: str) -> None:
    done = edgec("validate", good, *arguments)
    assert done.code == 2 and word in done.stderr and "Traceback" not in done.stderr and done.stdout == ""


def test_what_is_no_bundle_is_refused(edgec: Edgec) -> None:
    for folder, word in (("nowhere", "there is no bundle"), (".", "has no bundle.json")):
        done = edgec("validate", folder)
        assert done.code == 2 and word in done.stderr


def test_a_bundle_without_a_recipe_needs_a_text(good: Path, edgec: Edgec) -> None:
    done = edgec("validate", good)
    assert done.code == 2 and "--text" in done.stderr


def test_cuda_that_is_not_here_is_a_missing_tool(good: Path, edgec: Edgec) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    done = edgec("validate", good, "--device", "cuda")
    assert done.code == 4 and "CUDA" in done.stderr


@pytest.mark.slow
def test_document_and_junit_say_the_same(good: Path, validate: Callable[..., Done], tmp_path: Path) -> None:
    done = validate(good, "--model", good, "--json", "--junit", tmp_path / "junit.xml")
    assert done.code == 0, done.stderr
    schema = json.loads((DOCS / "validation.schema.json").read_text())
    jsonschema.validate(done.json, schema)
    assert done.json["status"] == "valid" and "error" not in done.json
    findings = done.json["targets"]["native"]["findings"]
    [suite] = list(JUnitXml.fromfile(str(tmp_path / "junit.xml")))
    cases = {case.name: case for case in suite}
    assert len(cases) == len(findings)
    assert [type(r).__name__ for r in cases["weights against int8"].result] == ["Skipped"]
    assert not cases["kl against int8"].result


@pytest.mark.slow
def test_unproven_fails_when_it_was_required(good: Path, validate: Callable[..., Done], tmp_path: Path) -> None:
    done = validate(good, "--model", good, "--json", "--require", "weights", "--junit", tmp_path / "junit.xml")
    assert done.code == 3 and done.json["error"]["reason"] == "unproven"
    assert "weights" in done.stderr and "read from the bundle itself" in done.stderr
    [suite] = list(JUnitXml.fromfile(str(tmp_path / "junit.xml")))
    assert [c.name for c in suite if any(type(r).__name__ == "Failure" for r in c.result)] == ["weights against int8"]


@pytest.mark.slow
def test_a_missing_library_is_said(good: Path, broken: Path, validate: Callable[..., Done]) -> None:
    shutil.rmtree(broken / "bundle/native/lib", ignore_errors=True)
    done = validate(broken, "--model", good, "--json", "--tokens", "50", "--prompts", "1", "--samples", "0")
    assert "the bundle has none for" in done.json["targets"]["native"]["library"]
