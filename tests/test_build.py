"""The chain as its users meet it: through the command line, in a process of its own, with exit codes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edgec.report.document import schema
from edgec.store import digest_tree
from tests.conftest import Edgec

Write = Callable[..., Path]


@pytest.mark.slow
def test_a_build_leaves_a_bundle_a_report_and_one_json_document(edgec: Edgec, write_recipe: Write) -> None:
    import jsonschema

    done = edgec("build", write_recipe(), "--json")
    assert done.code == 0, done.stderr
    document = done.json
    jsonschema.validate(document, schema())
    assert document["status"] == "built" and document["exit_code"] == 0
    assert [s["stage"] for s in document["ledger"]] == ["source", "scale", "export", "copy"]
    assert document["targets"]["copy"]["proven"] is True
    assert document["targets"]["copy"]["parity"]["cosine"] > 0.999
    bundle = edgec.folder / document["bundle"]
    manifest = json.loads((bundle / "bundle.json").read_text())
    _, files = digest_tree(bundle)
    assert manifest["files"] == {k: v for k, v in files.items() if k != "bundle.json"}
    for name in ("report.html", "build.json", "junit.xml", "summary.md"):
        assert (bundle.parent / name).stat().st_size > 0

    again = edgec("build", "recipe.yaml", "--json")
    assert again.json["cached_stages"] == ["source", "scale", "export", "copy"]
    assert digest_tree(bundle)[0] == digest_tree(edgec.folder / again.json["bundle"])[0]

    # Only what depends on a changed option runs again.
    changed = edgec("build", "recipe.yaml", "--json", "--set", "passes.scale.factor=3")
    assert changed.json["cached_stages"] == ["source"]

    plan = edgec("plan", "recipe.yaml", "--json").json
    assert [s["cached"] for s in plan["stages"]] == [True] * 4


@pytest.mark.slow
def test_until_stops_after_its_stage_and_makes_no_bundle(edgec: Edgec, write_recipe: Write) -> None:
    done = edgec("build", write_recipe(), "--until", "scale", "--json")
    assert done.code == 0, done.stderr
    assert [s["stage"] for s in done.json["ledger"]] == ["source", "scale"]
    assert done.json["bundle"] is None
    assert not (edgec.folder / "out" / "tiny" / "bundle").exists()


def test_until_an_unknown_stage_is_refused(edgec: Edgec, write_recipe: Write) -> None:
    done = edgec("build", write_recipe(), "--until", "scal")
    assert done.code == 2
    assert "did you mean `scale`" in done.stderr


@pytest.mark.slow
def test_check_reproducible_passes_for_a_reproducible_recipe_and_catches_one_that_is_not(
    edgec: Edgec, write_recipe: Write
) -> None:
    good = edgec("build", write_recipe(), "--check-reproducible")
    assert good.code == 0, good.stderr
    assert "reproducible" in good.stderr
    bad = edgec("build", write_recipe(("copy: {}", "copy: {spoil: random}")), "--check-reproducible", "--json")
    assert bad.code == 3
    assert "`copy` is not reproducible" in bad.stderr


@pytest.mark.slow
def test_a_killed_build_leaves_no_half_results_and_the_next_goes_on(edgec: Edgec, write_recipe: Write) -> None:
    path = write_recipe(("- scale: {factor: 2.0}", "- misbehave: {how: hang}"))
    process = edgec.start("build", path)
    deadline = time.monotonic() + 120
    while not (started := list(edgec.store.glob("work/*/started"))):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    worker = int(started[0].read_text())
    process.kill()
    process.wait()
    for _ in range(100):  # the worker dies with its parent
        if not Path(f"/proc/{worker}").exists() or "Z" in Path(f"/proc/{worker}/stat").read_text().split()[2]:
            break
        time.sleep(0.1)
    else:
        os.kill(worker, signal.SIGKILL)
        pytest.fail("the worker outlived its killed parent")
    done = edgec("build", write_recipe(), "--json")
    assert done.code == 0, done.stderr
    assert done.json["cached_stages"] == ["source"]


@pytest.mark.slow
def test_ctrl_c_ends_with_130_and_kills_the_stage(edgec: Edgec, write_recipe: Write) -> None:
    process = edgec.start("build", write_recipe(("- scale: {factor: 2.0}", "- misbehave: {how: hang}")))
    deadline = time.monotonic() + 120
    while not (started := list(edgec.store.glob("work/*/started"))):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    worker = int(started[0].read_text())
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in stderr and "Traceback" not in stderr
    assert not Path(f"/proc/{worker}").exists()


@pytest.mark.slow
def test_two_builds_at_once_share_the_work(edgec: Edgec, write_recipe: Write) -> None:
    path = write_recipe()
    first = edgec.start("build", path, "--out", "out/a", "--json")
    second = edgec.start("build", path, "--out", "out/b", "--json")
    documents = []
    for process in (first, second):
        stdout, stderr = process.communicate(timeout=300)
        assert process.returncode == 0, stderr
        documents.append(json.loads(stdout))
    cached = [set(d["cached_stages"]) for d in documents]
    stages = {"source", "scale", "export", "copy"}
    assert cached[0] | cached[1] == stages, (
        "each stage ran in one of the two, and was taken from the store by the other"
    )
    digests = [digest_tree(edgec.folder / d["bundle"])[0] for d in documents]
    assert digests[0] == digests[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "code", "says"),
    [
        ("model.py:tiny", "model.py:tiny\n  args: {bad: true}", 2, "not-finite"),
        ("model.py:tiny", "model.py:nothing", 2, "nothing"),
        ("model.py:tiny", "missing.py:tiny", 2, "missing.py"),
        ("[1, 3, 12, 12]", "[1, 5, 12, 12]", 5, ""),
    ],
)
def test_a_bad_model_is_one_line_and_nothing_is_left(
    edgec: Edgec, write_recipe: Write, old: str, new: str, code: int, says: str
) -> None:
    done = edgec("build", write_recipe((old, new)))
    assert done.code == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not (edgec.folder / "out" / "tiny" / "bundle").exists()


@pytest.mark.slow
def test_a_full_disk_in_a_stage_says_so(edgec: Edgec, write_recipe: Write) -> None:
    done = edgec("build", write_recipe(("- scale: {factor: 2.0}", "- misbehave: {how: disk-full}")), "--json")
    assert done.code == 2
    assert done.json["error"]["reason"] == "disk-full"


def test_a_store_that_cannot_be_written_says_so(edgec: Edgec, write_recipe: Write, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = edgec("build", write_recipe(), EDGEC_CACHE=str(tmp_path / "file" / "store"))
    assert done.code == 2
    assert "EDGEC_CACHE" in done.stderr
