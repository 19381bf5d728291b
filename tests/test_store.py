"""The store keeps whole results, once, and survives being killed."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from edgec.errors import Reason, StoreError
from edgec.store import Store, digest_tree, store_error

KEY = "ab" * 32


def put(store: Store, key: str = KEY, text: str = "weights") -> None:
    with store.lock(key), store.writing(key) as folder:
        (folder / "out" / "file.txt").write_text(text)
        store.commit(key, folder, {"stage": "s"})


def test_a_result_is_found_with_the_digest_of_its_files(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.find(KEY) is None
    put(store)
    entry = store.find(KEY)
    assert entry is not None
    assert (entry.out / "file.txt").read_text() == "weights"
    assert entry.result["digest"] == digest_tree(entry.out)[0]


def test_a_failure_is_never_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(RuntimeError), store.lock(KEY), store.writing(KEY) as folder:
        (folder / "out" / "half.txt").write_text("half")
        raise RuntimeError
    assert store.find(KEY) is None
    assert list((tmp_path / "tmp").iterdir()) == []


def test_what_a_killed_builder_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    store = Store(tmp_path)
    stale = tmp_path / "tmp" / f"{KEY}-dead"
    stale.mkdir()
    with store.lock(KEY):
        assert not stale.exists()


def test_commit_forgets_the_checkpoints_of_the_stage(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (store.work(KEY) / "epoch-3").write_text("state")
    put(store)
    assert not (tmp_path / "work" / KEY).exists()


def test_a_second_commit_replaces_the_first(tmp_path: Path) -> None:
    store = Store(tmp_path)
    put(store, text="old")
    put(store, text="new")
    entry = store.find(KEY)
    assert entry is not None and (entry.out / "file.txt").read_text() == "new"


def _hold(root: str, mark: str) -> None:
    store = Store(Path(root))
    with store.lock(KEY):
        Path(mark).touch()
        time.sleep(0.5)
        put_order = Path(root) / "order"
        put_order.write_text("first")


def test_the_second_builder_of_a_key_waits_for_the_first(tmp_path: Path) -> None:
    mark = tmp_path / "held"
    child = multiprocessing.get_context("spawn").Process(target=_hold, args=(str(tmp_path), str(mark)))
    child.start()
    while not mark.exists():
        time.sleep(0.01)
    with Store(tmp_path).lock(KEY):
        assert (tmp_path / "order").read_text() == "first"
    child.join()


def test_a_full_disk_says_so_and_what_to_do() -> None:
    error = store_error(OSError(28, "No space left on device", "/x"), "writing")
    assert error.reason == Reason.DISK_FULL
    assert "cache prune" in error.hint


def test_a_store_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StoreError, match="opening the store"):
        Store(blocked / "store")


def test_entries_come_least_recently_used_first(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for i, key in enumerate(["aa" * 32, "bb" * 32, "cc" * 32]):
        put(store, key)
        os.utime(store._object(key), (1000 + i, 1000 + i))
    os.utime(store._object("aa" * 32), (2000, 2000))
    assert [e.key[:2] for e in store.entries()] == ["bb", "cc", "aa"]
