"""The bundle: written whole or not at all, and not written again when it is there already."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgec.bundle import assemble
from edgec.errors import StoreError
from edgec.model import Artifact, artifact_file
from edgec.plan import local_digest
from edgec.store import Entry, Store, digest_tree

Assemble = Callable[..., tuple[Path, str]]


def target(store: Store, key: str, content: bytes) -> Entry:
    with store.writing(key) as folder:
        out = folder / "out"
        (out / "more").mkdir()
        (out / "model.bin").write_bytes(content)
        (out / "more" / "weights.bin").write_bytes(content * 2)
        files = (artifact_file(out, "model.bin", "model"), artifact_file(out, "more", "weights"))
        Artifact("copy", out, files, ()).save()
        return store.commit(key, folder, {})


@pytest.fixture
def make(tmp_path: Path) -> Assemble:
    """Assembles `tmp_path/out/bundle` of two targets and a tokenizer; `again` makes the first target anew."""
    store = Store(tmp_path / "store")
    with store.writing("source") as folder:
        (folder / "out" / "weights.safetensors").write_bytes(b"not for the bundle")
        (folder / "out" / "tokenizer.json").write_text("{}")
        source = store.commit("source", folder, {})
    entries = {"one": target(store, "one", b"1234"), "two": target(store, "two", b"56789")}

    def run(recipe: dict[str, Any] | None = None, first: bytes | None = None) -> tuple[Path, str]:
        if first is not None:
            entries["one"] = target(store, f"one-{first.hex()}", first)
        papers = lambda files: {"edgec.lock": json.dumps(files, sort_keys=True)}  # noqa: E731
        return assemble(tmp_path / "out", {"name": "tiny"} | (recipe or {}), entries, source, papers)

    return run


def state(bundle: Path) -> dict[str, tuple[int, int]]:
    """Every file by inode and time: the same when nothing was written."""
    return {str(p): (p.stat().st_ino, p.stat().st_mtime_ns) for p in [bundle, *bundle.rglob("*")]}


def test_the_digest_is_that_of_the_folder_and_the_manifest_lists_every_other_file(make: Assemble) -> None:
    bundle, digest = make()
    whole, files = digest_tree(bundle)
    assert digest == whole
    assert json.loads((bundle / "bundle.json").read_text())["files"] == {
        name: sha for name, sha in files.items() if name != "bundle.json"
    }
    assert {"one/model.bin", "two/more/weights.bin", "tokenizer.json", "recipe.json", "edgec.lock"} <= set(files)
    assert "weights.safetensors" not in files


def test_an_unchanged_bundle_is_neither_copied_nor_read(make: Assemble, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, digest = make()
    before = state(bundle)
    for name in ("copytree", "copyfile"):
        monkeypatch.setattr(shutil, name, lambda *_, **__: pytest.fail("copied"))
    monkeypatch.setattr("edgec.bundle.digest_tree", lambda _: pytest.fail("read"))
    assert make() == (bundle, digest)
    assert state(bundle) == before


def later(path: Path, than: Path) -> None:
    """What was written after `than` may have the same time on a coarse clock."""
    time = than.stat().st_mtime_ns + 1
    os.utime(path, ns=(time, time))


def damage_size(bundle: Path) -> None:
    (bundle / "one" / "model.bin").write_bytes(b"123")


def damage_content(bundle: Path) -> None:
    changed = bundle / "one" / "more" / "weights.bin"
    changed.write_bytes(b"12341235")
    later(changed, bundle / "bundle.json")


def damage_missing(bundle: Path) -> None:
    (bundle / "two" / "model.bin").unlink()


def damage_extra(bundle: Path) -> None:
    (bundle / "two" / "stray").write_text("")


def damage_paper(bundle: Path) -> None:
    (bundle / "recipe.json").write_text("{}")


def damage_tokenizer(bundle: Path) -> None:
    (bundle / "tokenizer.json").write_text("[]")


def damage_manifest(bundle: Path) -> None:
    (bundle / "bundle.json").write_text('{"files": []')


def damage_manifest_shape(bundle: Path) -> None:
    (bundle / "bundle.json").write_text('{"files": ["one/model.bin"]}')


@pytest.mark.parametrize("damage", [f for n, f in sorted(globals().items()) if n.startswith("damage_")])
def test_a_damaged_bundle_is_made_again(make: Assemble, damage: Callable[[Path], None]) -> None:
    bundle, digest = make()
    damage(bundle)
    assert digest_tree(bundle)[0] != digest
    assert make() == (bundle, digest)
    assert digest_tree(bundle)[0] == digest
    assert [p.name for p in bundle.parent.iterdir()] == ["bundle"]


def test_another_result_and_another_recipe_make_another_bundle(make: Assemble) -> None:
    bundle, first = make()
    _, second = make(first=b"1235")
    assert (bundle / "one" / "model.bin").read_bytes() == b"1235"
    _, third = make({"seed": 1})
    assert len({first, second, third}) == 3
    assert digest_tree(bundle)[0] == third


def test_a_result_that_was_changed_in_the_store_is_not_bundled(make: Assemble, tmp_path: Path) -> None:
    bundle, _ = make()
    (tmp_path / "store" / "objects" / "on" / "one" / "out" / "model.bin").write_bytes(b"4321")
    shutil.rmtree(bundle)
    with pytest.raises(StoreError, match="`one` was changed"):
        make()
    assert list(bundle.parent.iterdir()) == []


def test_an_interrupted_or_killed_bundling_leaves_the_old_one_and_no_half_one(
    make: Assemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, _ = make()
    before = state(bundle)
    killed = bundle.parent / f".bundle-{2**22 + 1}"  # above the greatest process number there is
    killed.mkdir()

    def interrupt(*_: Any) -> None:
        (bundle.parent / f".bundle-{os.getpid()}" / "one").mkdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copytree", interrupt)
        with pytest.raises(KeyboardInterrupt):
            make({"seed": 2})
    assert state(bundle) == before
    assert [p.name for p in bundle.parent.iterdir()] == ["bundle"]


def test_a_local_input_is_read_once_and_again_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib

    opened: list[str] = []
    original = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda f, name: (opened.append(f.name), original(f, name))[1])
    (tmp_path / "folder").mkdir()
    for name in ("weights.bin", "folder/weights.bin"):
        (tmp_path / name).write_bytes(b"12")
        reference = name.partition("/")[0]
        first = local_digest(tmp_path, reference)
        assert local_digest(tmp_path, reference) == first
        assert len(opened) == 1
        (tmp_path / name).write_bytes(b"34")
        later(tmp_path / name, tmp_path / name)
        assert local_digest(tmp_path, reference) != first
        opened.clear()
