"""Transfers of large files to and from s3://: they arrive whole or not at all, whatever fails, in bounded memory."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

import pytest

from storage.errors import CorruptArtifact, ObjectNotFound, StorageUnavailable
from storage.inspect.gc import collect_garbage
from storage.serialization import digest_file
from storage.store import artifacts, download
from storage.store.artifacts import Provenance, commit_files, find_artifact
from storage.store.backends import s3_transfer
from storage.store.backends.s3 import S3Backend
from storage.store.download import materialise_files
from storage.store.objects import ObjectStore, open_store
from storage.store.retry import RetryPolicy
from tests.fixtures.stores.faults import Answer, Cut, CutDownload, CutUpload, DropAck, Fault, FaultProxy, LateAnswer
from tests.fixtures.stores.s3 import s3_options

QUICK = RetryPolicy(attempts=3, first_seconds=0.001)
PROVENANCE = Provenance(code_version="test", config_digest="0" * 64, seed=0)
MIB = 1 << 20
PART = 5 * MIB  # the smallest part that S3 accepts


def store_at(endpoint: str, bucket: str, prefix: str = "p") -> ObjectStore:
    # After some faults the client and the proxy wait for each other, until the client gives up.
    limits = {"retries": {"total_max_attempts": 1}, "read_timeout": 20}
    options = s3_options(endpoint) | {"config_kwargs": limits}
    backend = S3Backend(bucket, prefix, options)
    backend.part_bytes, backend.part_retry = PART, QUICK
    return ObjectStore(backend, retry=QUICK)


@pytest.fixture
def store(faulty: FaultProxy, moto_bucket: str) -> ObjectStore:
    store = store_at(faulty.url, moto_bucket)
    store.put_if_absent("warm", b"")
    faulty.requests.clear()
    return store


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four parts, the last one short; no two pages alike."""
    path = tmp_path_factory.mktemp("large") / "weights"
    path.write_bytes(b"".join(index.to_bytes(4, "big") * 1024 for index in range(16 * MIB // 4096 + 3)))
    return path


def same(store: ObjectStore, key: str, path: Path, folder: Path) -> bool:
    store.fetch(key, folder / "back")
    return digest_file(folder / "back") == digest_file(path)


def posts(faulty: FaultProxy) -> list[str]:
    """Returns the kinds of requests of the upload, without the names."""
    return [f"{method} {'part' if 'partNumber' in path else path.partition('?')[2].partition('=')[0]}"
            for method, path in faulty.requests]  # fmt: skip


def test_a_large_file_goes_in_parts(store: ObjectStore, faulty: FaultProxy, large: Path, tmp_path: Path) -> None:
    store.put_file("a", large)
    assert sorted(posts(faulty)) == ["POST uploadId", "POST uploads", *["PUT part"] * 4]
    assert same(store, "a", large, tmp_path)
    assert list(store.leftovers()) == []


FAULTS: list[Fault] = [
    DropAck(), CutUpload(3 * MIB), Answer(503), Answer(500), LateAnswer(500), Cut(), CutUpload(0), CutUpload(10),
]  # fmt: skip


def first_quick(faults: list[Fault]) -> list[Any]:
    """Runs the first fault in every test run, and the others only in slow runs."""
    return [faults[0], *(pytest.param(fault, marks=pytest.mark.slow) for fault in faults[1:])]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_each_request_of_an_upload_may_fail_once(
    store: ObjectStore, faulty: FaultProxy, large: Path, tmp_path: Path, fault: Fault
) -> None:
    for position in range(6):  # begin, four parts, complete
        key = f"a{position}"
        faulty.schedule(*[None] * position, fault)
        store.put_file(key, large)
        assert same(store, key, large, tmp_path)
        assert faulty.pending == []
    # the upload was created, but its reply was lost: garbage collection finds it
    assert len(list(store.leftovers())) <= 1


def test_a_part_that_fails_is_sent_again_alone(store: ObjectStore, faulty: FaultProxy, large: Path) -> None:
    faulty.schedule(None, Answer(503), DropAck(), CutUpload(MIB))
    store.put_file("a", large)
    assert posts(faulty).count("POST uploads") == 1
    assert posts(faulty).count("PUT part") <= 4 + 3 + 1  # aiohttp may repeat one request


@pytest.mark.parametrize("fault", first_quick([CutUpload(100), Answer(500), Cut()]), ids=repr)
def test_an_upload_that_fails_for_good_leaves_nothing(
    store: ObjectStore, faulty: FaultProxy, large: Path, fault: Fault
) -> None:
    small = large.with_name("small")
    small.write_bytes(b"1" * 100_000)
    faulty.at_random(1.0, [fault])
    only = faulty.only
    faulty.only = lambda method, path: only(method, path) and method == "PUT"  # parts, and whole small files
    for path in (large, small):
        with pytest.raises(StorageUnavailable, match="failed 3 times"):
            store.put_file("a", path, move=True)
        assert path.exists()
    faulty.heal()
    assert [info.key for info in store.list()] == ["warm"]
    assert list(store.leftovers()) == []
    with pytest.raises(ObjectNotFound):
        store.get("a")


@pytest.mark.parametrize(
    "fault", first_quick([CutDownload(MIB), CutDownload(0), Answer(503), DropAck(), Cut()]), ids=repr
)
def test_each_request_of_a_download_may_fail_once(
    store: ObjectStore, faulty: FaultProxy, large: Path, tmp_path: Path, fault: Fault
) -> None:
    store.put_file("a", large)
    for position in range(5):  # its size, four parts
        faulty.schedule(*[None] * position, fault)
        assert same(store, "a", large, tmp_path)
        assert faulty.pending == []
    faulty.requests.clear()
    faulty.schedule(None, None, CutDownload(MIB))
    assert same(store, "a", large, tmp_path)
    assert len(faulty.requests) <= 7  # only the failed part was repeated


def parts_of(path: Path) -> list[bytes]:
    data = path.read_bytes()
    return [data[start : start + PART] for start in range(0, len(data), PART)]


def sent_parts(faulty: FaultProxy) -> list[int]:
    """The numbers of the parts that were uploaded, sorted."""
    numbers = [re.search(r"partNumber=(\d+)", path) for method, path in faulty.requests if method == "PUT"]
    return sorted(int(number[1]) for number in numbers if number)


def check_continued_upload(store: ObjectStore, proxy: FaultProxy, large: Path, folder: Path) -> None:
    """Uploads what a killed process left unfinished: part 1 is right, part 3 is of another file."""
    backend, parts = store.backend, parts_of(large)
    assert isinstance(backend, S3Backend)
    key = f"{backend._prefix}a"
    created = backend._call("create_multipart_upload", Key=key)
    for number, data in ((1, parts[0]), (3, parts[1])):
        backend._call("upload_part", Key=key, UploadId=created["UploadId"], PartNumber=number, Body=data)
    proxy.requests.clear()
    assert store.put_file("a", large, resume=True) == digest_file(large)
    assert sent_parts(proxy) == [2, 3, 4]
    assert same(store, "a", large, folder)
    assert list(store.leftovers()) == []


def test_the_upload_of_a_killed_process_continues_with_the_parts_that_the_server_has(
    store: ObjectStore, faulty: FaultProxy, large: Path, tmp_path: Path
) -> None:
    check_continued_upload(store, faulty, large, tmp_path)


def test_an_outage_loses_no_part(store: ObjectStore, faulty: FaultProxy, large: Path, tmp_path: Path) -> None:
    only = faulty.only
    faulty.only = lambda method, path: only(method, path) and "partNumber=4" in path
    faulty.at_random(1.0, [Answer(503)])
    with pytest.raises(StorageUnavailable, match="failed 3 times"):
        store.put_file("a", large, resume=True)
    faulty.heal()
    faulty.only = only
    faulty.requests.clear()
    assert store.put_file("a", large, resume=True) == digest_file(large)
    assert 4 in sent_parts(faulty) and len(sent_parts(faulty)) < 4
    assert same(store, "a", large, tmp_path)
    # the reply to the completion was lost with the process: nothing is sent again
    faulty.requests.clear()
    assert store.put_file("a", large, resume=True) == digest_file(large)
    assert sent_parts(faulty) == []
    assert list(store.leftovers()) == []


NO_BYTES = (
    "create_multipart_upload",
    "complete_multipart_upload",
    "head_object",
    "list_multipart_uploads",
    "list_parts",
)


@pytest.mark.parametrize("connections", [1, 5])
def test_the_parts_of_all_files_share_the_connections(
    store: ObjectStore, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connections: int
) -> None:
    monkeypatch.setattr(s3_transfer, "CONNECTIONS", connections)
    monkeypatch.setattr(s3_transfer, "_slots", WeakKeyDictionary())
    running: list[str] = []
    most: list[list[str]] = []

    def counting(transfer: Any, name_at: int) -> Any:
        async def call(*arguments: Any, **named: Any) -> Any:
            name = arguments[name_at]
            if arguments[1] in NO_BYTES:
                return await transfer(*arguments, **named)
            running.append(name)
            most.append(list(running))
            await asyncio.sleep(0.05)  # lets the others begin
            try:
                return await transfer(*arguments, **named)
            finally:
                running.remove(name)

        return call

    monkeypatch.setattr(s3_transfer.Transfer, "_call", counting(s3_transfer.Transfer._call, 2))
    monkeypatch.setattr(s3_transfer.Transfer, "_range", counting(s3_transfer.Transfer._range, 1))
    files = {"x": large, "y": large}
    for transfer in (
        lambda: commit_files(store, "c", files, kind="checkpoint", provenance=PROVENANCE, move=False),
        lambda: materialise_files(store, "c", tmp_path / "to"),
    ):
        most.clear()
        transfer()
        assert len(most) == 8
        assert max(map(len, most)) == connections
        assert connections == 1 or any(len(set(names)) == 2 for names in most)


def test_files_are_hashed_while_they_are_transferred(
    store: ObjectStore, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is read once for its upload, and what was downloaded is not read by a later check."""
    expected, reads = digest_file(large), []
    read = s3_transfer._read_at
    monkeypatch.setattr(s3_transfer, "_read_at", lambda *where: reads.append(where) or read(*where))
    for module in (artifacts, download):
        monkeypatch.setattr(module, "digest_file", lambda path: pytest.fail(f"{path} is read once more"))
    ref = commit_files(store, "c", {"w": large}, kind="checkpoint", provenance=PROVENANCE, move=False)
    assert (ref.sha256, ref.bytes) == expected
    assert len(reads) == 4
    assert materialise_files(store, "c", tmp_path / "to")["w"].read_bytes() == large.read_bytes()
    # what is stored is not what the manifest says
    (entry,) = artifacts.read_manifest(store, "c").files
    store.put(entry.key, large.read_bytes()[:-1] + b"!")
    with pytest.raises(CorruptArtifact, match="its manifest says"):
        materialise_files(store, "c", tmp_path / "again")


def test_an_artifact_is_whole_or_absent_under_random_faults(
    faulty: FaultProxy, moto_endpoint: str, moto_bucket: str, large: Path, tmp_path: Path
) -> None:
    store = store_at(faulty.url, moto_bucket)
    store.put_if_absent("warm", b"")
    (tmp_path / "config").write_bytes(b"{}")
    files = {"weights": large, "config": tmp_path / "config"}
    faulty.at_random(0.4, [*FAULTS, CutDownload(MIB), CutDownload(0)])
    ref = None
    while ref is None:
        try:
            ref = commit_files(store, "c", files, kind="checkpoint", provenance=PROVENANCE, move=False)
        except StorageUnavailable:
            assert find_artifact(store_at(moto_endpoint, moto_bucket), "c") is None
    faulty.heal()
    assert find_artifact(store, "c") == ref
    paths = materialise_files(store, "c", tmp_path / "to")
    assert digest_file(paths["weights"]) == digest_file(large)
    assert len(faulty.applied) > 0


def test_abandoned_uploads_are_found_and_aborted_when_they_are_old(
    store: ObjectStore, faulty: FaultProxy, large: Path
) -> None:
    backend = store.backend
    assert isinstance(backend, S3Backend)
    backend._call("create_multipart_upload", Key="p/runs/r/x")
    backend._call("create_multipart_upload", Key="elsewhere/x")  # another store of the bucket
    (left,) = store.leftovers()
    assert left.kind == "multipart upload" and left.name.startswith("runs/r/x?")
    assert collect_garbage(store).names == (left.name,)  # in moto, every upload began in 2010
    assert list(store.leftovers()) == []
    store.remove_leftover(left)


def test_the_clock_is_the_servers_and_leaves_nothing(store: ObjectStore) -> None:
    store.put("a", b"")
    (written,) = (info.modified for info in store.list("a"))
    assert 0 <= store.now() - written < 60
    assert list(store.leftovers()) == [] and [info.key for info in store.list()] == ["a", "warm"]


def test_a_frozen_or_absent_server_is_waited_for(store: ObjectStore, faulty: FaultProxy, large: Path) -> None:
    faulty.freeze()
    thread = threading.Thread(target=store.put_file, args=("a", large))
    thread.start()
    assert thread.is_alive()
    faulty.unfreeze()
    thread.join(60)
    assert store.exists("a")
    faulty.refuse()
    faulty.cut_all()  # the connections that the client keeps open
    with pytest.raises(StorageUnavailable):
        store.get("a")
    faulty.accept()
    assert len(store.get("a")) == large.stat().st_size


def many(store: ObjectStore, count: int) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: store.put(f"many/{number:05d}", b""), range(count)))


def check_pages(store: ObjectStore) -> None:
    many(store, 1005)  # a page has at most 1,000
    assert [info.key for info in store.list("many/")] == [f"many/{number:05d}" for number in range(1005)]
    assert [info.key for info in store.list("many/0099")] == [f"many/0099{digit}" for digit in range(10)]


@pytest.mark.slow
def test_more_than_a_page_of_keys(store: ObjectStore) -> None:
    check_pages(store)


MEASURE_CONNECTIONS = 4
MOST_MIB = 3 * MEASURE_CONNECTIONS * s3_transfer.PART_BYTES >> 20
"""Each part in flight is there once, and once more in the buffer of its connection; the rest is for all else."""
MEASURE = (
    f"""
from storage.store.backends import s3_transfer
s3_transfer.CONNECTIONS = {MEASURE_CONNECTIONS}
"""
    + """
import resource, sys
from pathlib import Path
from storage.store.objects import open_store
from tests.fixtures.stores.s3 import s3_options
endpoint, bucket, megabytes, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
store = open_store(f"s3://{bucket}/memory", s3_options(endpoint))
def used():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) // 1024
def reset():
    open("/proc/self/clear_refs", "w").write("5")
(folder / "warm").write_bytes(b"1" * (1 << 20))
store.put_file("warm", folder / "warm"); store.fetch("warm", folder / "warm-back")
with open(folder / "sparse", "wb") as file:
    file.truncate(megabytes << 20)
reset(); before = used()
store.put_file("a", folder / "sparse")
up = used() - before
reset(); before = used()
store.fetch("a", folder / "back")
print(up, used() - before)
assert (folder / "back").stat().st_size == megabytes << 20
"""
)


def peaks(endpoint: str, bucket: str, megabytes: int, folder: Path) -> tuple[int, int]:
    """Returns the MiB of memory that a process needs to upload and download such a file."""
    command = [sys.executable, "-c", MEASURE, endpoint, bucket, str(megabytes), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    up, down = done.stdout.split()
    return int(up), int(down)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(moto_endpoint: str, moto_bucket: str, tmp_path: Path) -> None:
    up, down = peaks(moto_endpoint, moto_bucket, 160, tmp_path)
    assert up < MOST_MIB and down < MOST_MIB, (up, down)


@pytest.fixture
def seaweed(seaweed_endpoint: str, seaweed_bucket: str) -> Iterator[tuple[ObjectStore, FaultProxy]]:
    with FaultProxy("127.0.0.1", int(seaweed_endpoint.rpartition(":")[2])) as proxy:
        proxy.only = lambda method, path: "~" not in path and "%7E" not in path
        yield store_at(proxy.url, seaweed_bucket, uuid4().hex), proxy


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_a_real_server_under_faults(
    seaweed: tuple[ObjectStore, FaultProxy], large: Path, tmp_path: Path, fault: Fault
) -> None:
    store, proxy = seaweed
    assert store.put_if_absent("warm", b"").won
    for position in range(6):
        proxy.schedule(*[None] * position, fault)
        store.put_file(f"a{position}", large)
        assert same(store, f"a{position}", large, tmp_path)
    proxy.heal()
    proxy.schedule(fault)
    assert store.put_if_absent("b", b"mine").won
    proxy.heal()
    assert not store.put_if_absent("b", b"mine").won


@pytest.mark.slow
def test_a_real_server_continues_an_upload(
    seaweed: tuple[ObjectStore, FaultProxy], large: Path, tmp_path: Path
) -> None:
    store, proxy = seaweed
    check_continued_upload(store, proxy, large, tmp_path)


@pytest.mark.slow
def test_a_real_server_lists_pages_and_unfinished_uploads(seaweed: tuple[ObjectStore, FaultProxy]) -> None:
    store, _ = seaweed
    check_pages(store)
    backend = store.backend
    assert isinstance(backend, S3Backend)
    backend._call("create_multipart_upload", Key=f"{backend._prefix}runs/r/x")
    (left,) = store.leftovers()
    assert abs(left.modified - store.now()) < 60
    assert collect_garbage(store).names == ()
    assert collect_garbage(store, now=store.now() + 25 * 3600).names == (left.name,)
    assert list(store.leftovers()) == []
    assert [info.key for info in open_store(store.url, s3_options(_.url)).list("many/0100")] == [
        f"many/0100{digit}" for digit in range(5)
    ]


@pytest.mark.slow
def test_a_real_server_and_memory(seaweed_endpoint: str, seaweed_bucket: str, tmp_path: Path) -> None:
    up, down = peaks(seaweed_endpoint, seaweed_bucket, 300, tmp_path)
    assert up < MOST_MIB and down < MOST_MIB, (up, down)
