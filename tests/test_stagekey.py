"""A stage's key follows its own source, and no other's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from edgec import stagekey


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "keyed"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "stage.py").write_text("def run():\n    from keyed.helper import f\n    return f\n")
    (folder / "helper.py").write_text("from . import deep\n\ndef f(): ...\n")
    (folder / "deep.py").write_text("X = 1\n")
    (folder / "unrelated.py").write_text("Y = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [m for m in sys.modules if m.split(".")[0] == "keyed"]:
        del sys.modules[name]


def digest() -> str:
    stagekey._imports.cache_clear()
    stagekey._file.cache_clear()
    stagekey._spec.cache_clear()
    return stagekey.source_digest(["keyed.stage"])


@pytest.mark.parametrize(("file", "changes"), [("stage", True), ("helper", True), ("deep", True), ("unrelated", False)])
def test_a_change_in_what_a_stage_imports_changes_its_key(package: Path, file: str, changes: bool) -> None:
    before = digest()
    (package / f"{file}.py").write_text((package / f"{file}.py").read_text() + "\nNEW = 2\n")
    assert (digest() != before) == changes


@pytest.mark.parametrize(
    ("file", "changes"), [("core/src/a.cpp", True), ("core/b.inc", True), ("core/tests/t.cpp", False)]
)
def test_what_a_module_compiles_is_its_source(
    package: Path, monkeypatch: pytest.MonkeyPatch, file: str, changes: bool
) -> None:
    monkeypatch.setattr(stagekey, "FOLDERS", {"keyed.deep": "core"})
    path = package / file
    path.parent.mkdir(parents=True)
    path.write_text("int x = 1;")
    before = digest()
    path.write_text("int x = 2;")
    assert (digest() != before) == changes


def test_the_native_target_s_key_follows_the_core() -> None:
    from edgec.runtime import compile as core

    ((module, folder),) = stagekey.FOLDERS.items()
    assert module == core.__name__ and Path(core.__file__).parent / folder == core.NATIVE
    assert module in stagekey.source_modules(["edgec.targets.native"])


def test_finding_what_a_stage_imports_imports_nothing(package: Path) -> None:
    (package / "helper.py").write_text("raise RuntimeError('imported')\n")
    digest()
    assert "keyed.helper" not in sys.modules


def test_the_digest_of_a_real_pass_covers_its_helpers() -> None:
    seen = stagekey._imports("edgec.passes.export")
    assert any(module.startswith("edgec.passes.export_") for module in seen)


def test_a_change_in_how_targets_are_measured_does_not_train_again() -> None:
    """edgec.stages imports everything; a pass's key must follow only what that pass runs."""
    from edgec.plan import COMMON_MODULES, RUNS_EVERY_STAGE

    seen = stagekey.source_modules(
        [*COMMON_MODULES, "edgec.passes.distill", "edgec.tasks.image_classification"], alone=[RUNS_EVERY_STAGE]
    )
    assert "edgec.passes.training" in seen and RUNS_EVERY_STAGE in seen
    assert not {m for m in seen if m == "edgec.measure" or m.startswith(("edgec.targets", "edgec.report"))}
