"""mlc-llm#2910: an artefact and a runtime of different versions crash.

Here: bundle, library and binding each name the version of the ABI, and what differs is refused before anything is
called: in one line that names both versions, with an exit code of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edgec.errors import Reason, ToolMissing
from edgec.runtime import Engine, compile, library
from edgec.runtime.abi import ABI_VERSION
from edgec.runtime.failures import EngineError
from tests.conftest import Edgec
from tests.fake_engine import compile_fake, write_bundle

OTHER = ABI_VERSION + 1


@pytest.fixture(autouse=True)
def no_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDGEC_LIBRARY", raising=False)


def test_a_bundle_for_another_abi_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=rf"version {OTHER}.*version {ABI_VERSION}") as refused:
        Engine(write_bundle(tmp_path / "out", abi=OTHER))
    assert refused.value.reason is Reason.VERSION_MISMATCH and "build the recipe again" in refused.value.hint


def test_a_library_of_another_abi_is_refused(tmp_path: Path) -> None:
    other = compile_fake(tmp_path, f"-DFAKE_ABI_VERSION={OTHER}")
    with pytest.raises(EngineError, match=f"version {OTHER} of the runtime's ABI"):
        library.load(other)


def test_a_library_of_something_else_is_refused(tmp_path: Path) -> None:
    nonsense = tmp_path / "libedgec.so"
    nonsense.write_bytes(b"\x7fELF and no more")
    with pytest.raises(EngineError, match="can't be loaded"):
        library.load(nonsense)
    (tmp_path / "empty.c").write_text("int nothing;\n")
    foreign = tmp_path / "libforeign.so"
    subprocess.run(["gcc", "-shared", str(tmp_path / "empty.c"), "-o", str(foreign)], check=True)
    with pytest.raises(EngineError, match="can't be loaded"):
        library.load(foreign)


@pytest.mark.parametrize("command", [["run", "hi"], ["bench"], ["serve", "--port", "0"]])
def test_each_command_says_it_in_one_line_and_exits_with_4(edgec: Edgec, tmp_path: Path, command: list[str]) -> None:
    bundle = write_bundle(tmp_path / "out", abi=OTHER)
    done = edgec(command[0], bundle, *command[1:])
    assert done.code == 4 and "[version-mismatch]" in done.stderr and "Traceback" not in done.stderr


def test_a_library_of_another_abi_ends_a_command_cleanly(edgec: Edgec, tmp_path: Path) -> None:
    """The library would be called with structs that it doesn't know: it must not even be asked to open the bundle."""
    other = compile_fake(tmp_path, f"-DFAKE_ABI_VERSION={OTHER}")
    done = edgec("run", write_bundle(tmp_path / "out"), "hi", EDGEC_LIBRARY=str(other))
    assert done.code == 4 and "[version-mismatch]" in done.stderr


def test_without_a_compiler_the_bundle_s_own_library_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEC_CACHE", str(tmp_path / "store"))
    monkeypatch.setattr(compile, "compiler", lambda _: None)
    bundle = write_bundle(tmp_path / "out")
    native = bundle / "bundle/native"
    with pytest.raises(ToolMissing, match=r"no C\+\+ compiler.*no library for"):
        Engine(bundle)
    place = native / "lib" / compile.host().name
    place.mkdir(parents=True)
    shutil.copy(compile_fake(tmp_path), place / compile.host().library)
    with Engine(bundle) as engine:
        assert "".join(engine.stream("hi")) == "hi"
    compile_fake(place, f"-DFAKE_ABI_VERSION={OTHER}").rename(place / compile.host().library)
    # In a process of its own: a library, once loaded from a path, stays the one at that path.
    code = (
        "import sys; from edgec.runtime import Engine, compile; compile.compiler = lambda _: None\n"
        "from edgec.runtime.failures import EngineError\n"
        "try: Engine(sys.argv[1])\nexcept EngineError as error: print(error.reason)"
    )
    environment = os.environ | {"EDGEC_CACHE": str(tmp_path / "store")}
    done = subprocess.run([sys.executable, "-c", code, str(bundle)], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "version-mismatch", done.stderr
