"""file://: durability, full disks, odd file systems."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from storage.errors import (
    AccessDenied,
    InvalidKey,
    StorageFull,
    StorageUnavailable,
    UnsupportedFilesystem,
)
from storage.store.backends import local
from storage.store.backends.local import LocalBackend
from storage.store.objects import ObjectStore, open_store
from storage.store.retry import RetryPolicy


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(LocalBackend(tmp_path / "store"), retry=RetryPolicy(attempts=3, first_seconds=0.001))


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def failing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *errors: int) -> list[int]:
    """Makes the first calls of a function fail with these errnos. Returns the list of errnos that are left."""
    real, left = getattr(owner, name), list(errors)

    def call(*args: Any, **kwargs: Any) -> Any:
        if left:
            raise OSError(left.pop(0), "injected")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return left


@pytest.mark.parametrize("verb", ["put", "put_if_absent", "put_file", "put_file_moved"])
def test_bytes_are_synced_before_their_name_and_the_name_before_success(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    store.put("a/b/old", b"")  # the folders exist
    source = tmp_path / "source"
    source.write_bytes(b"data")
    done: list[str] = []
    fsync, replace, link = os.fsync, os.replace, os.link

    def name_of(descriptor: int) -> str:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        return f"sync {'folder' if path.is_dir() else 'file'} {'' if path.is_dir() else path.read_bytes().decode()}"

    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(name_of(fd).strip()), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append(f"name {Path(b).name}"), replace(a, b)))
    monkeypatch.setattr(os, "link", lambda a, b: (done.append(f"name {Path(b).name[:1]}"), link(a, b)))
    if verb == "put":
        store.put("a/b/c", b"data")
    elif verb == "put_if_absent":
        store.put_if_absent("a/b/c", b"data")
    else:
        store.put_file("a/b/c", source, move=verb == "put_file_moved")
    done = [step for step in done if step != "name ~"]  # a moved file's temporary name
    assert done == ["sync file data", "name c", "sync folder"]


def test_the_names_of_new_folders_are_synced_too(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    real = local._sync_folder
    monkeypatch.setattr(local, "_sync_folder", lambda folder: (synced.append(folder), real(folder)))
    store.put("a/b/c", b"1")
    root = Path(store.url.removeprefix("file://"))
    assert {root / "a/b", root / "a", root, root.parent} <= set(synced)
    assert synced[-1] == root / "a/b"


def test_a_forgotten_folder_is_synced_again(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MAX_DURABLE_FOLDERS", 2)
    for step in range(10):
        store.put(f"steps/{step}/data", b"x")
        assert len(store.backend._durable) <= 5  # a path of one key, and those before it
    synced: list[Path] = []
    monkeypatch.setattr(local, "_sync_folder", synced.append)
    store.put("steps/0/more", b"x")
    assert Path(store.url.removeprefix("file://"), "steps") in synced


def test_the_loser_syncs_the_name_it_relies_on(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put_if_absent("a/b", b"1")
    synced: list[Path] = []
    monkeypatch.setattr(local, "_sync_folder", synced.append)
    assert not store.put_if_absent("a/b", b"2").won
    assert [folder.name for folder in synced] == ["a"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_nothing(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"data")

    def half(path: Path, data: bytes = b"data") -> None:
        path.write_bytes(data[: len(data) // 2])
        raise OSError(code, "injected: no space")

    monkeypatch.setattr(local, "_write", half)
    monkeypatch.setattr(shutil, "copyfile", lambda _, to: half(to))
    for write in (
        lambda: store.put("a/b", b"data"),
        lambda: store.put_if_absent("a/c", b"data"),
        lambda: store.put_file("a/d", source),
    ):
        with pytest.raises(StorageFull, match=r"no space for 'a/.'") as caught:
            write()
        assert caught.value.transient
    assert list(store.list()) == []
    assert files_below(tmp_path / "store") == []
    assert source.exists()


def test_a_full_disk_keeps_the_old_object(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a", b"old")
    failing(monkeypatch, os, "fsync", errno.ENOSPC)
    with pytest.raises(StorageFull):
        store.put("a", b"new")
    assert store.get("a") == b"old"


def test_a_full_disk_under_a_copy_is_not_blamed_on_the_store(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a", b"data")
    failing(monkeypatch, shutil, "copyfile", errno.ENOSPC)
    with pytest.raises(StorageFull, match=f"no space in {tmp_path}/copies for a copy of 'a'"):
        store.fetch("a", tmp_path / "copies" / "a")
    assert list((tmp_path / "copies").iterdir()) == []


def test_a_path_that_is_too_long_is_a_bad_key(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, local, "_write", errno.ENAMETOOLONG)
    with pytest.raises(InvalidKey, match="the path of 'a' in .* is too long for its file system: .*shorter"):
        store.put("a", b"1")


def test_a_folder_that_may_not_be_read_is_no_absent_object(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a/b", b"1")
    failing(monkeypatch, os, "stat", errno.EACCES)
    with pytest.raises(AccessDenied, match="give this user the permission"):
        store.exists("a/b")


def test_a_passing_error_is_tried_again(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    left = failing(monkeypatch, local, "_write", errno.EIO, errno.ESTALE)
    store.put("a", b"1")
    assert left == []
    assert store.get("a") == b"1"


def test_a_lasting_error_is_given_up_with_blame(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    left = failing(monkeypatch, local, "_write", *[errno.EIO] * 10)
    with pytest.raises(StorageUnavailable, match=r"put 'a' in file://.* failed 3 times: .*injected"):
        store.put("a", b"1")
    assert len(left) == 7


def test_a_file_system_without_hard_links_is_refused(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, os, "link", errno.EPERM)
    with pytest.raises(UnsupportedFilesystem, match="without hard links"):
        store.put_if_absent("a", b"1")
    assert files_below(tmp_path / "store") == []


def test_a_link_that_was_made_although_its_answer_says_otherwise_is_a_win(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def nfs(source: Path, target: Path) -> None:
        link(source, target)
        raise FileExistsError(errno.EEXIST, "injected: the repetition of a lost request")

    monkeypatch.setattr(os, "link", nfs)
    assert store.put_if_absent("a", b"1").won


def test_a_commit_whose_folder_could_not_be_synced_at_first_is_still_ours(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("x", b"")
    left = failing(monkeypatch, local, "_sync_folder", errno.EIO)
    assert store.put_if_absent("a", b"mine").won
    assert left == []
    failing(monkeypatch, local, "_sync_folder", errno.EIO)
    assert store.put_if_absent("a", b"another's") == (False, b"mine")


def test_what_a_killed_writer_left_is_not_listed(store: ObjectStore, tmp_path: Path) -> None:
    store.put("a/b", b"1")
    (tmp_path / "store/a/~0123").write_bytes(b"half")
    (tmp_path / "store/a/my notes.txt").write_bytes(b"foreign")
    assert [info.key for info in store.list()] == ["a/b"]


def test_a_moved_file_is_not_copied(store: ObjectStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"weights")
    number = source.stat().st_ino
    store.put_file("a", source, move=True)
    assert (tmp_path / "store/a").stat().st_ino == number
    assert files_below(tmp_path / "store") == ["a"]


def test_a_file_on_another_disk_is_copied(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"weights")
    failing(monkeypatch, os, "link", errno.EXDEV)
    store.put_file("a", source, move=True)
    assert store.get("a") == b"weights"
    assert not source.exists()


def test_a_move_that_failed_can_be_repeated(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"weights")
    store.put("x", b"")
    failing(monkeypatch, local, "_sync_folder", errno.EIO)
    store.put_file("a", source, move=True)
    assert store.get("a") == b"weights"
    assert not source.exists()


def test_a_shared_file_is_copied_even_when_moved(store: ObjectStore, tmp_path: Path) -> None:
    blob, linked, symbolic = tmp_path / "blob", tmp_path / "linked", tmp_path / "symbolic"
    blob.write_bytes(b"weights")
    os.link(blob, linked)
    symbolic.symlink_to(blob)  # as in a Hugging Face cache
    store.put_file("a", linked, move=True)
    store.put_file("b", symbolic, move=True)
    blob.write_bytes(b"changed")
    assert store.get("a") == store.get("b") == b"weights"
    assert not linked.exists() and not symbolic.is_symlink()


def test_an_object_of_the_store_is_never_taken_away(store: ObjectStore, tmp_path: Path) -> None:
    store.put("a", b"weights")
    stored = store.local_path("a")
    assert stored is not None
    store.put_file("b", stored, move=True)
    store.put_file("c", stored, move=False)
    assert store.get("a") == store.get("b") == store.get("c") == b"weights"
    assert len({(tmp_path / "store" / key).stat().st_ino for key in "abc"}) == 1


def test_an_object_in_the_way_of_a_key(store: ObjectStore) -> None:
    store.put("a/b", b"1")
    reason = "cannot be an object of .* because .* is a folder, or a file where a folder is needed"
    for key in ("a/b/c", "a"):
        with pytest.raises(InvalidKey, match=reason):
            store.put(key, b"2")
        with pytest.raises(InvalidKey, match=reason):
            store.put_if_absent(key, b"2")
    assert store.get("a/b") == b"1"


def test_a_folder_in_the_store_that_was_removed_by_hand_is_made_again(store: ObjectStore, tmp_path: Path) -> None:
    store.put("a/b", b"1")
    shutil.rmtree(tmp_path / "store" / "a")
    store.put("a/b", b"2")
    assert store.get("a/b") == b"2"


def test_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_store(f"file://{tmp_path}/a b").url == open_store(f"{tmp_path}/a b").url == f"file://{tmp_path}/a b"
    assert open_store(f"file://{tmp_path}/a%20b").url == f"file://{tmp_path}/a b"
    monkeypatch.chdir(tmp_path)
    assert open_store("ostinato-data").url == f"file://{tmp_path}/ostinato-data"
    assert not (tmp_path / "ostinato-data").exists()
    with pytest.raises(UnsupportedFilesystem, match="names a host"):
        open_store("file://data/x")
    with pytest.raises(UnsupportedFilesystem, match="gs:// is not supported; use file"):
        open_store("gs://bucket/x")
    with pytest.raises(UnsupportedFilesystem, match="takes no options"):
        open_store(str(tmp_path), {"key": "x"})
