"""Tests of file:// stores whose folder is missing or holds another store: neither is treated as an empty store."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage.chain.records import Chain
from storage.errors import CorruptArtifact, ObjectNotFound, OtherStore, StoreGone
from storage.store import keys
from storage.store.backends.local import LocalBackend
from storage.store.objects import ObjectStore, find_store_id, open_store, store_id
from storage.store.retry import RetryPolicy

Verb = Callable[[ObjectStore], object]
VERBS: dict[str, Verb] = {
    "get": lambda store: store.get("a/b"),
    "get an absent one": lambda store: store.get("a/c"),
    "open": lambda store: store.open("a/b"),
    "exists": lambda store: store.exists("a/b"),
    "list": lambda store: list(store.list()),
    "list an absent folder": lambda store: list(store.list("c/")),
    "folder": lambda store: store.folder(),
    "an absent folder": lambda store: store.folder("c/"),
    "put": lambda store: store.put("a/b", b"2"),
    "put in a new folder": lambda store: store.put("c/d/e", b"2"),
    "put_file": lambda store: store.put_file("a/c", Path(__file__)),
    "put_if_absent": lambda store: store.put_if_absent("a/c", b"2"),
    "put_if_absent of what was there": lambda store: store.put_if_absent("a/b", b"2"),
    "delete": lambda store: store.delete("a/b"),
    "local_path": lambda store: store.local_path("scratch"),
    "now": lambda store: store.now(),
    "store_id": store_id,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> ObjectStore:
    """A store with an id and one object that this process has used."""
    store = opened(folder)
    store_id(store)
    store.put("a/b", b"1")
    return store


def opened(folder: Path) -> ObjectStore:
    return ObjectStore(LocalBackend(folder), retry=RetryPolicy(attempts=2, first_seconds=0.001))


def below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("place", ["no folder", "an empty folder"])
def test_a_store_that_is_gone(store: ObjectStore, folder: Path, tmp_path: Path, verb: str, place: str) -> None:
    own_id = store_id(store)
    folder.rename(tmp_path / "away")
    if place == "an empty folder":
        folder.mkdir()  # a mount point without its disk
    with pytest.raises(StoreGone, match=f"{folder}/store.json with the id {own_id}.*mount its disk") as caught:
        VERBS[verb](store)
    assert caught.value.transient
    assert not folder.exists() or below(folder) == []
    # the disk is back
    if place == "an empty folder":
        folder.rmdir()
    (tmp_path / "away").rename(folder)
    VERBS[verb if verb != "get an absent one" else "get"](store)


@pytest.mark.parametrize("verb", VERBS)
def test_another_store_in_its_place(store: ObjectStore, folder: Path, tmp_path: Path, verb: str) -> None:
    other = opened(tmp_path / "other")
    store_id(other)
    other.put("a/b", b"another's")
    shutil.rmtree(folder)
    (tmp_path / "other").rename(folder)
    before = below(folder)
    with pytest.raises(OtherStore, match="holds another store than before: .* had the id .*, now it has") as caught:
        VERBS[verb](store)
    assert not caught.value.transient
    assert below(folder) == before
    assert (folder / "a/b").read_bytes() == b"another's"


def test_the_same_store_restored_from_a_backup_is_no_other(store: ObjectStore, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "backup")
    shutil.rmtree(folder)
    with pytest.raises(StoreGone):
        store.get("a/b")
    shutil.copytree(tmp_path / "backup", folder)
    assert store.get("a/b") == b"1"
    store.put("a/c", b"2")


def test_a_store_that_has_no_id_yet_is_known_by_its_folder(folder: Path) -> None:
    store = opened(folder)
    store.put("a/b", b"1")
    shutil.rmtree(folder)
    with pytest.raises(StoreGone, match=f"expected the folder {folder}, but there is none"):
        store.put("a/b", b"2")
    assert not folder.exists()


def test_another_process_gives_the_store_its_id(folder: Path) -> None:
    store = opened(folder)
    store.put("a/b", b"1")
    assert find_store_id(store) is None
    assert store_id(opened(folder)) == find_store_id(store)
    assert store.get("a/b") == b"1"


def test_a_store_that_another_thread_begins_meanwhile_is_not_gone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, look = opened(folder), os.stat

    def begun_right_after_it_was_absent(path: Path, *arguments: Any, **options: Any) -> os.stat_result:
        try:
            return look(path, *arguments, **options)
        except FileNotFoundError:
            monkeypatch.setattr(os, "stat", look)
            store_id(store)
            raise

    monkeypatch.setattr(os, "stat", begun_right_after_it_was_absent)
    assert store.local_path("scratch") == folder / "scratch"
    assert find_store_id(store) == store_id(opened(folder))


def test_looking_for_an_id_begins_no_store(folder: Path) -> None:
    assert find_store_id(open_store(folder)) is None
    assert not folder.exists()


@pytest.mark.parametrize("damaged", [b"", b"{", b"[]", b'{"schema_version": 1}'])
def test_a_damaged_store_json(store: ObjectStore, folder: Path, damaged: bytes) -> None:
    (folder / keys.store_json()).write_bytes(damaged)
    for ask in (store_id, find_store_id):
        with pytest.raises(CorruptArtifact, match="store.json does not say which store this is.*restore it"):
            ask(opened(folder))


def test_a_record_that_was_committed_and_is_gone_is_named(store: ObjectStore) -> None:
    with pytest.raises(ObjectNotFound, match="step 3 was taken, but its record .*chains/policy/000003.json is not in"):
        Chain(store, "r", "0-sft", "policy").committed_record(3)
