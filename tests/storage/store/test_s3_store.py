"""s3:// under faults of the network and the server: a real server behind a proxy that injects faults."""

from __future__ import annotations

import errno
import socket
import time
from pathlib import Path

import pytest

from storage.errors import (
    AccessDenied,
    CorruptArtifact,
    InvalidKey,
    NoSuchBucket,
    StorageFull,
    StorageUnavailable,
    UnsupportedFilesystem,
)
from storage.store.backends.s3 import S3Backend
from storage.store.backends.s3_errors import translated_errors
from storage.store.objects import ObjectStore, open_store
from storage.store.retry import RetryPolicy
from tests.fixtures.stores.faults import Answer, DropAck, Fault, FaultProxy, LateAnswer
from tests.fixtures.stores.s3 import s3_options

QUICK = RetryPolicy(attempts=3, first_seconds=0.001)


def store_at(endpoint: str, bucket: str) -> ObjectStore:
    # one attempt per request, so that a test counts the store's own
    options = s3_options(endpoint) | {"config_kwargs": {"retries": {"total_max_attempts": 1}}}
    return ObjectStore(S3Backend(bucket, "p", options), retry=QUICK)


@pytest.fixture
def store(faulty: FaultProxy, moto_bucket: str) -> ObjectStore:
    store = store_at(faulty.url, moto_bucket)
    store.put_if_absent("warm", b"")  # open the session and make the probe
    faulty.requests.clear()
    return store


@pytest.mark.parametrize("status", [500, 502, 503, 429, 409])
def test_a_passing_answer_is_tried_again(store: ObjectStore, faulty: FaultProxy, status: int) -> None:
    faulty.schedule(status, status)
    store.put("a", b"1")
    faulty.schedule(status)
    assert store.get("a") == b"1"
    faulty.schedule(status, status)
    assert store.put_if_absent("b", b"2").won
    faulty.schedule(status)
    assert [info.key for info in store.list()] == ["a", "b", "warm"]
    assert faulty.pending == []


def test_a_lasting_error_is_given_up_with_blame(store: ObjectStore, faulty: FaultProxy, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"data")
    faulty.at_random(1.0, [Answer(500)])
    for call in (
        lambda: store.put("a", b"1"), lambda: store.get("a"), lambda: store.put_if_absent("a", b"1"),
        lambda: list(store.list()), lambda: store.put_file("a", source, move=True), lambda: store.delete("a"),
        lambda: store.exists("a"), lambda: store.open("a"), lambda: store.fetch("a", tmp_path / "got"),
    ):  # fmt: skip
        with pytest.raises(StorageUnavailable, match=r"in s3://bucket-\w+/p failed 3 times: .*(InternalError|500)"):
            call()
    assert source.exists() and not (tmp_path / "got").exists()
    faulty.heal()
    assert not store.exists("a")


@pytest.mark.parametrize("fault", [DropAck(), LateAnswer(500), LateAnswer(503)])
def test_a_lost_answer_to_our_own_put_is_a_win(store: ObjectStore, faulty: FaultProxy, fault: Fault) -> None:
    faulty.schedule(fault)
    assert store.put_if_absent("a", b"mine, attempt 1") == (True, b"mine, attempt 1")
    assert faulty.pending == []
    assert [method for method, _ in faulty.requests] == ["PUT", "PUT", "GET"]  # the second PUT was answered 412


def test_a_lost_answer_that_the_client_repeats_by_itself_is_a_win_too(faulty: FaultProxy, moto_bucket: str) -> None:
    store = open_store(f"s3://{moto_bucket}/p", s3_options(faulty.url))
    store.put_if_absent("warm", b"")
    faulty.schedule(LateAnswer(500))
    assert store.put_if_absent("a", b"mine").won


def test_after_a_lost_answer_another_writers_bytes_are_no_win(
    store: ObjectStore, faulty: FaultProxy, moto_endpoint: str, moto_bucket: str
) -> None:
    store_at(moto_endpoint, moto_bucket).put("a", b"theirs")
    faulty.schedule(DropAck())
    assert store.put_if_absent("a", b"mine") == (False, b"theirs")


def test_after_a_cut_connection_equal_bytes_of_another_writer_are_no_win(
    store: ObjectStore, faulty: FaultProxy, moto_endpoint: str, moto_bucket: str
) -> None:
    assert store_at(moto_endpoint, moto_bucket).put_if_absent("a", b"same").won
    faulty.schedule(DropAck())
    assert not store.put_if_absent("a", b"same").won


def test_equal_bytes_of_another_writer_are_no_win(store: ObjectStore) -> None:
    assert store.put_if_absent("a", b"same").won
    assert not store.put_if_absent("a", b"same").won


@pytest.mark.parametrize("fault", [DropAck(), 503])
def test_reads_survive_a_cut_connection(
    store: ObjectStore, faulty: FaultProxy, tmp_path: Path, fault: Fault | int
) -> None:
    data = bytes(range(256)) * 10_000
    store.put("a", data)
    with store.open("a") as file:
        faulty.schedule(fault)
        assert file.read() == data
    assert len(faulty.requests) <= 6  # not one request for every few KiB
    faulty.schedule(fault)
    store.fetch("a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == data


def test_an_object_replaced_while_it_is_read_is_not_read_as_a_mixture(store: ObjectStore) -> None:
    store.put("a", b"1" * 3_000_000)
    with store.open("a") as file:
        assert file.read(10) == b"1" * 10
        store.put("a", b"2" * 3_000_000)
        with pytest.raises(CorruptArtifact, match="replaced while it was read"):
            file.seek(2_500_000)
            file.read(10)


def test_no_space(store: ObjectStore, faulty: FaultProxy) -> None:
    faulty.schedule(507)
    with pytest.raises(StorageFull, match="no space for 'a'"):
        store.put("a", b"1")
    assert not store.exists("a")


def test_a_refusal_is_not_repeated(store: ObjectStore, faulty: FaultProxy) -> None:
    faulty.schedule(403, None)
    with pytest.raises(AccessDenied, match="check the credentials"):
        store.put("a", b"1")
    assert faulty.pending == [None]


def test_a_server_that_lets_both_writers_win_is_refused(faulty: FaultProxy, moto_bucket: str) -> None:
    faulty.drop_header = "If-None-Match"
    store = store_at(faulty.url, moto_bucket)
    for _ in range(2):
        with pytest.raises(UnsupportedFilesystem, match="does not honour 'If-None-Match"):
            store.put_if_absent("a", b"1")
    assert list(store.list()) == []


def test_a_full_disk_of_this_machine_is_a_full_disk() -> None:
    with pytest.raises(StorageFull, match=r"no space on this machine for 'a' in s3://b: .*full"):  # noqa: SIM117
        with translated_errors("a", "s3://b"):
            raise OSError(errno.ENOSPC, "full")


def test_a_bucket_that_does_not_exist(moto_endpoint: str) -> None:
    store = store_at(moto_endpoint, "no-such-bucket")
    for call in (lambda: store.put("a", b"1"), lambda: list(store.list()), lambda: store.put_if_absent("a", b"1")):
        with pytest.raises(NoSuchBucket, match="there is no such bucket; create it first"):
            call()


def test_a_port_without_a_server() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        store = store_at(f"http://127.0.0.1:{probe.getsockname()[1]}", "bucket")
        start = time.monotonic()
        with pytest.raises(StorageUnavailable, match="get 'a' in s3://bucket/p failed 3 times"):
            store.get("a")
        assert time.monotonic() - start < 30


def test_a_listing_goes_on_over_pages_and_failures(store: ObjectStore, faulty: FaultProxy) -> None:
    assert isinstance(store.backend, S3Backend)
    keys = [f"k/{i:02d}" for i in range(8)]
    for key in keys:
        store.put(key, b"")
    store.backend.page_size = 3
    faulty.schedule(None, 500, None, None, 503)
    assert [info.key for info in store.list("k/")] == keys
    assert faulty.pending == []


def test_prefixes_are_apart(moto_endpoint: str, moto_bucket: str) -> None:
    options = s3_options(moto_endpoint)
    first, second, whole = (open_store(f"s3://{moto_bucket}{p}", options) for p in ("/a", "/ab", ""))
    first.put("x", b"1")
    second.put("y", b"2")
    assert [info.key for info in first.list()] == ["x"]
    assert [info.key for info in whole.list()] == ["a/x", "ab/y"]


def test_the_environment_names_the_endpoint(
    moto_endpoint: str, moto_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()
    store = open_store(f"s3://{moto_bucket}/env")
    assert store.put_if_absent("a", b"1").won
    assert open_store(f"s3://{moto_bucket}", s3_options(moto_endpoint)).get("env/a") == b"1"


def test_a_url_names_its_bucket() -> None:
    with pytest.raises(InvalidKey, match="give s3://bucket/prefix"):
        open_store("s3:///prefix")
