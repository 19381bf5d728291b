"""`edgec doctor`: what is here, what is missing, and whether it works."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest

from edgec import doctor, probes, registry
from edgec.doctor import Diagnosis, Probe, Subject, diagnose, package, program, require
from edgec.errors import ExitCode, ToolMissing
from edgec.registry import Tool
from tests.conftest import Edgec

REAL_RUN = subprocess.run
HERE = Tool("a", "1.0", "pip install a")
GONE = Tool("b", None, "pip install b", "everything")
EXTRA = Tool("c", None, "pip install c", "a part", required=False)


def found(*targets: Subject) -> Diagnosis:
    return Diagnosis({}, Subject("edgec", ()), targets)


@pytest.mark.parametrize(
    ("subject", "state"),
    [
        (Subject("t", (HERE,)), "ready"),
        (Subject("t", (HERE, EXTRA)), "partly"),
        (Subject("t", (HERE, GONE)), "missing"),
        (Subject("t", (), problem="ImportError: no"), "missing"),
        (Subject("t", (HERE,), probe=Probe(True, "ran")), "ready"),
        (Subject("t", (HERE,), probe=Probe(False, "llvm is not enabled")), "missing"),
    ],
)
def test_the_state_of_a_target(subject: Subject, state: str) -> None:
    assert subject.state == state


def test_what_is_missing_comes_with_what_installs_it() -> None:
    require(found(Subject("t", (HERE, EXTRA))))
    with pytest.raises(ToolMissing, match=r"`t` needs b") as caught:
        require(found(Subject("s", (HERE,)), Subject("t", (HERE, GONE))))
    assert caught.value.hint == "pip install b"
    assert caught.value.exit_code == ExitCode.TOOL_MISSING


def test_a_tool_that_is_here_and_does_not_work_is_as_good_as_missing() -> None:
    with pytest.raises(ToolMissing, match="llvm is not enabled"):
        require(found(Subject("tvm", (HERE,), probe=Probe(False, "llvm is not enabled"))))


def test_packages_and_programs_are_looked_up() -> None:
    assert package("numpy", needed_for="x").version == version("numpy")
    assert package("surely-no-such-package", needed_for="x").version is None
    assert program("sh", needed_for="x", install="").version
    assert program("surely-no-such-program", needed_for="x", install="").version is None


def test_a_target_that_does_not_load_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(name: str) -> Any:
        raise ImportError("libbroken.so: cannot open")

    monkeypatch.setattr(registry, "get_target", get)
    subjects = diagnose(["one", "two"]).targets
    assert [s.problem for s in subjects] == ["ImportError: libbroken.so: cannot open"] * 2


def run_probe(monkeypatch: pytest.MonkeyPatch, script: str) -> Probe:
    monkeypatch.setitem(probes.PROBES, "t", lambda: "")

    def run(command: list[str], **options: Any) -> Any:
        return REAL_RUN([sys.executable, "-c", script], **options)

    monkeypatch.setattr(subprocess, "run", run)
    result = doctor._probe("t")
    assert result is not None
    return result


def test_a_probe_that_crashes_its_process_is_a_failed_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_probe(monkeypatch, "print('fine')") == Probe(True, "fine")
    assert run_probe(monkeypatch, "raise RuntimeError('no LLVM')") == Probe(False, "RuntimeError: no LLVM")
    crash = run_probe(monkeypatch, "import os; os.kill(os.getpid(), 11)")
    assert crash == Probe(False, "its process was killed by signal 11")


def test_a_probe_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PROBE_SECONDS", 1)
    assert run_probe(monkeypatch, "import time; time.sleep(60)").passed is False


def test_every_target_of_ours_has_a_probe() -> None:
    assert set(probes.PROBES) == set(registry.TARGETS)


@pytest.mark.slow
def test_the_command_and_its_exit_codes(edgec: Edgec) -> None:
    done = edgec("doctor", "--json")
    assert done.code == 0
    assert done.json["edgec"]["state"] in ("ready", "partly")
    assert set(registry.TARGETS) <= set(done.json["targets"])
    assert done.json["targets"]["absent"]["state"] == "missing"
    done = edgec("doctor", "--target", "absent")
    assert done.code == 4
    assert "unobtainium" in done.stderr and "unobtainium" in done.stdout
    done = edgec("doctor", "--target", "onnxruntimme")
    assert done.code == 2
    assert "did you mean `onnxruntime`" in done.stderr


def test_looking_imports_nothing_heavy() -> None:
    script = (
        "import sys; from edgec.doctor import diagnose; diagnose(); "
        "print([m for m in ('torch', 'tensorflow', 'tvm', 'coremltools', 'onnxruntime') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(probes.PROBES))
def test_the_probes_pass_where_the_lock_file_is_installed(name: str) -> None:
    result = doctor._probe(name)
    assert result is not None and result.passed, result
