"""The contract of `ObjectStore`. The tests of each backend inherit it."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from storage.errors import InvalidKey, ObjectNotFound
from storage.store.artifacts import Provenance, commit_bytes, commit_files, find_artifact, read_bytes
from storage.store.download import materialise_files
from storage.store.objects import ObjectStore, open_store
from tests.fixtures.stores.s3 import s3_options

Opener = Callable[[], ObjectStore]
PROVENANCE = Provenance(code_version="test", config_digest="0" * 64, seed=0)
BAD_KEYS = [
    "", "/a", "a/", "a//b", ".", "..", "a/../b", "a/./b", "../a", "a b", "a\\b", "a\n", "~tmp", "ä", "a:b", "a?b",
    "a%2F", "a" * 201, "a/" * 500 + "a",
]  # fmt: skip


class ObjectStoreContract(ABC):
    reads_the_winner: str | None = "get"
    """The method of the backend by which the loser of a conditional put reads the object that is there; None where
    nothing can come between the put and the reading."""

    @pytest.fixture
    @abstractmethod
    def opener(self) -> Opener:
        """Opens the same empty store, as a new object each time."""

    @pytest.fixture
    def store(self, opener: Opener) -> ObjectStore:
        return opener()

    @pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 8, b"\r\n\x00\xff" * 500_000])
    def test_what_was_put_is_read(self, store: ObjectStore, data: bytes) -> None:
        store.put("a/b.bin", data)
        assert store.get("a/b.bin") == data
        assert [(info.key, info.size) for info in store.list()] == [("a/b.bin", len(data))]

    def test_put_replaces(self, store: ObjectStore) -> None:
        store.put("a", b"first, and longer")
        store.put("a", b"second")
        assert store.get("a") == b"second"

    def test_another_opening_sees_the_same_objects(self, opener: Opener) -> None:
        opener().put("a", b"1")
        assert opener().get("a") == b"1"
        assert opener().url == opener().url

    def test_an_absent_object(self, store: ObjectStore, tmp_path: Path) -> None:
        for read in (store.get, store.open, lambda key: store.fetch(key, tmp_path / "got")):
            with pytest.raises(ObjectNotFound, match="nowhere/at-all"):
                read("nowhere/at-all")
        assert not store.exists("nowhere/at-all")
        assert list(tmp_path.iterdir()) == []
        store.delete("nowhere/at-all")
        assert list(store.list()) == []

    def test_a_prefix_of_a_key_is_no_object(self, store: ObjectStore) -> None:
        store.put("a/b/c", b"1")
        assert not store.exists("a/b")
        with pytest.raises(ObjectNotFound):
            store.get("a/b")
        store.delete("a/b")
        store.delete("a/b/c/d")
        assert store.get("a/b/c") == b"1"

    def test_delete(self, store: ObjectStore) -> None:
        store.put("a/b", b"1")
        assert store.exists("a/b")
        store.delete("a/b")
        assert not store.exists("a/b")
        assert list(store.list()) == []
        store.put("a/b", b"2")
        assert store.get("a/b") == b"2"

    def test_a_listing_is_sorted_by_whole_keys(self, store: ObjectStore) -> None:
        # '-' and '.' sort before '/', digits after it: the order of folders' names is not the order of keys
        sorted_keys = ["a-b", "a.b", "a/b", "a/b-c", "a/b.d/e", "a/c/d", "a0", "b"]
        for key in reversed(sorted_keys):
            store.put(key, key.encode())
        assert [info.key for info in store.list()] == sorted_keys
        assert [info.key for info in store.list("a/")] == ["a/b", "a/b-c", "a/b.d/e", "a/c/d"]
        assert [info.key for info in store.list("a/b")] == ["a/b", "a/b-c", "a/b.d/e"]
        assert [info.key for info in store.list("a/b.d/")] == ["a/b.d/e"]
        assert list(store.list("c/")) == []
        # one level of it
        folders, objects = store.folder("a/")
        assert (folders, [info.key for info in objects]) == (["b.d", "c"], ["a/b", "a/b-c"])
        assert objects == [info for info in store.list("a/") if info.key in ("a/b", "a/b-c")]
        assert store.folder("c/") == ([], [])
        store.delete("a/c/d")
        # SeaweedFS goes on listing a folder whose last object was deleted
        assert store.folder("a/").folders in (["b.d"], ["b.d", "c"])
        assert (store.has_objects("a/c/"), store.has_objects("a/b.d/")) == (False, True)
        with pytest.raises(InvalidKey, match="ends with a slash"):
            store.folder("a")

    def test_objects_carry_the_time_of_their_arrival(self, store: ObjectStore) -> None:
        before = time.time()
        store.put("a", b"1")
        (info,) = store.list()
        assert before - 5 < info.modified < time.time() + 5

    @pytest.mark.parametrize("move", [False, True])
    def test_files(self, store: ObjectStore, tmp_path: Path, move: bool) -> None:
        data = bytes(range(256)) * 4096 * 9  # 9 MiB
        source = tmp_path / "source"
        source.write_bytes(data)
        store.put_file("m/weights", source, move=move)
        assert source.exists() is not move
        assert store.get("m/weights") == data
        store.fetch("m/weights", tmp_path / "deep" / "copy")
        assert (tmp_path / "deep" / "copy").read_bytes() == data
        assert [path.name for path in (tmp_path / "deep").iterdir()] == ["copy"]

    def test_writing_to_a_file_after_it_was_stored_changes_nothing(self, store: ObjectStore, tmp_path: Path) -> None:
        source = tmp_path / "source"
        source.write_bytes(b"stored")
        store.put_file("a", source)
        source.write_bytes(b"changed")
        assert store.get("a") == b"stored"

    def test_a_file_that_is_not_there(self, store: ObjectStore, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="source"):
            store.put_file("a", tmp_path / "source")
        assert list(store.list()) == []

    def test_open_reads_anywhere(self, store: ObjectStore) -> None:
        data = (bytes(i * 7 % 251 for i in range(251)) * 12_000)[:3_000_000]
        store.put("a", data)
        with store.open("a") as file:
            assert file.seekable()
            assert file.read(10) == data[:10]
            file.seek(2_500_000)
            assert file.read(600_000) == data[2_500_000:]
            assert file.read(1) == b""
            assert file.seek(-5, 2) == 2_999_995
            assert file.read() == data[-5:]
            file.seek(0)
            assert file.read() == data

    def test_only_the_first_put_if_absent_wins(self, store: ObjectStore) -> None:
        assert store.put_if_absent("a/b", b"1") == (True, b"1")
        assert store.put_if_absent("a/b", b"2") == (False, b"1")
        assert store.put_if_absent("a/b", b"1") == (False, b"1")
        assert store.get("a/b") == b"1"
        store.delete("a/b")
        assert store.put_if_absent("a/b", b"3") == (True, b"3")

    def test_a_winner_that_is_deleted_before_the_loser_reads_it(
        self, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend, name = store.backend, self.reads_the_winner
        if name is None:
            pytest.skip("put and reading are under one lock")
        store.put_if_absent("a/b", b"1")
        read = getattr(backend, name)

        def read_too_late(*args: Any, **kwargs: Any) -> Any:
            monkeypatch.setattr(backend, name, read)
            backend.delete("a/b")
            return read(*args, **kwargs)

        monkeypatch.setattr(backend, name, read_too_late)
        assert store.put_if_absent("a/b", b"2") == (True, b"2")
        assert store.get("a/b") == b"2"

    def test_of_many_writers_one_wins_and_all_know_it(self, opener: Opener) -> None:
        writers, rounds = 6, 8
        stores = [opener() for _ in range(writers)]
        ready = threading.Barrier(writers)

        def race(writer: int) -> list[tuple[bool, bytes]]:
            results = []
            for round_ in range(rounds):
                ready.wait(30)
                results.append(tuple(stores[writer].put_if_absent(f"race/{round_}", f"by {writer}".encode() * 50)))
            return results

        with ThreadPoolExecutor(writers) as pool:
            results = list(pool.map(race, range(writers)))
        for round_ in range(rounds):
            winners = [w for w in range(writers) if results[w][round_][0]]
            assert len(winners) == 1
            expected = f"by {winners[0]}".encode() * 50
            assert all(results[w][round_][1] == expected for w in range(writers))
            assert stores[0].get(f"race/{round_}") == expected

    def test_readers_see_whole_objects_and_no_temporary_ones(self, opener: Opener) -> None:
        versions = [bytes([i]) * 400_000 for i in range(4)]
        writer, reader = opener(), opener()
        writer.put("hot/a", versions[0])
        stop = threading.Event()

        def write() -> None:
            turn = 0
            while not stop.is_set():
                turn += 1
                writer.put("hot/a", versions[turn % 4])
                writer.put_if_absent("hot/b", versions[0])
                writer.delete("hot/b")

        thread = threading.Thread(target=write)
        thread.start()
        try:
            for _ in range(40):
                assert reader.get("hot/a") in versions
                assert {info.key for info in reader.list()} <= {"hot/a", "hot/b"}
                assert all(info.size == 400_000 for info in reader.list())
        finally:
            stop.set()
            thread.join()

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_a_bad_key_touches_nothing(self, store: ObjectStore, tmp_path: Path, key: str) -> None:
        source = tmp_path / "source"
        source.write_bytes(b"1")
        for call in (
            store.get, store.open, store.exists, store.delete, store.local_path,
            lambda k: store.put(k, b"1"), lambda k: store.put_if_absent(k, b"1"),
            lambda k: store.put_file(k, source, move=True), lambda k: store.fetch(k, tmp_path / "got"),
        ):  # fmt: skip
            with pytest.raises(InvalidKey, match="is not a key; give"):
                call(key)
        assert source.exists()
        assert list(store.list()) == []

    @pytest.mark.parametrize("prefix", ["/", "../", "a/../b", "a b", "~"])
    def test_a_bad_prefix(self, store: ObjectStore, prefix: str) -> None:
        with pytest.raises(InvalidKey, match="beginning of a key"):
            list(store.list(prefix))

    def test_two_committers_of_one_artifact(self, opener: Opener) -> None:
        ready = threading.Barrier(4)

        def commit(number: int) -> object:
            store = opener()
            ready.wait(30)
            data = f"made by {number}".encode()
            return commit_bytes(store, "runs/r/x", data, kind="thing", suffix=".txt", provenance=PROVENANCE)

        with ThreadPoolExecutor(4) as pool:
            refs = list(pool.map(commit, range(4)))
        store = opener()
        assert refs == [find_artifact(store, "runs/r/x")] * 4
        assert read_bytes(store, refs[0]).startswith(b"made by ")  # type: ignore[arg-type]
        assert len(list(store.list())) == 2  # one manifest and the winner's data

    def test_a_folder_is_committed_and_comes_back(self, opener: Opener, tmp_path: Path) -> None:
        store = opener()
        for attempt in (1, 2):
            files = {"config.json": tmp_path / "c", "sub/weights": tmp_path / "w"}
            files["config.json"].write_bytes(b"{}")
            files["sub/weights"].write_bytes(b"w" * (1_000_000 + attempt))
            ref = commit_files(store, "models/m", files, kind="folder", provenance=PROVENANCE)
            assert ref.bytes == 1_000_003  # the first attempt's
        paths = materialise_files(opener(), "models/m", tmp_path / "here")
        assert {name: path.read_bytes() for name, path in paths.items()} == {
            "config.json": b"{}",
            "sub/weights": b"w" * 1_000_001,
        }
        assert len(list(store.list())) == 3
        some = materialise_files(store, "models/m", tmp_path / "some", names=["config.json", "none"])
        assert list(some) == ["config.json"]


class TestFile(ObjectStoreContract):
    @pytest.fixture
    def opener(self, tmp_path: Path) -> Opener:
        return lambda: open_store(f"file://{tmp_path}/not made yet/store")

    def test_the_path_is_the_key(self, store: ObjectStore) -> None:
        store.put("a/b", b"1")
        path = store.local_path("a/b")
        assert path is not None and path.read_bytes() == b"1"


class TestMemory(ObjectStoreContract):
    reads_the_winner = None

    @pytest.fixture
    def opener(self) -> Opener:
        name = f"contract-{uuid4().hex}"
        return lambda: open_store(f"memory://{name}")


class TestS3OnMoto(ObjectStoreContract):
    reads_the_winner = "_get_with_metadata"

    @pytest.fixture
    def opener(self, moto_endpoint: str, moto_bucket: str) -> Opener:
        return lambda: open_store(f"s3://{moto_bucket}/some/prefix", s3_options(moto_endpoint))


@pytest.mark.slow
class TestS3OnSeaweed(ObjectStoreContract):
    reads_the_winner = "_get_with_metadata"

    @pytest.fixture
    def opener(self, seaweed_endpoint: str, seaweed_bucket: str) -> Opener:
        prefix = uuid4().hex
        return lambda: open_store(f"s3://{seaweed_bucket}/{prefix}", s3_options(seaweed_endpoint))
