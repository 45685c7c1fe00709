"""Tests of checkpoints of two ranks on S3. A proxy in front of the server says which process made each request."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from uuid import uuid4

import psutil
import pytest

from engine.backends.deepspeed.transfers import RankStore, RankTransfers
from engine.backends.weight_files.pieces import WEIGHTS, part_file
from engine.errors import WorkerDied
from engine.local.engine import LocalEngine
from engine.local.loaded_policies import LoadedPolicy
from engine.local.saving import Saver, Snapshot, checkpoint_files, checkpoint_key
from engine.specs.engine import DeepSpeedSpec, LocalEngineSpec
from storage.chain.records import CommitRecord, PolicyRef
from storage.errors import StorageUnavailable
from storage.inspect.audit import audit_store
from storage.serialization import FileDigest, digest_file
from storage.store.artifacts import ArtifactRef, commit_files, find_artifact, read_manifest
from storage.store.backends.s3 import S3Backend
from storage.store.download import materialise_files
from storage.store.objects import ObjectStore, open_store
from storage.store.retry import RetryPolicy
from tests.engine.deepspeed.conftest import torch_trainer
from tests.fixtures.engines import PROVENANCE, commit_batch, new_policy, request_after
from tests.fixtures.stores.faults import Answer, Fault, FaultProxy
from tests.fixtures.stores.s3 import KEY, SECRET, make_bucket, s3_options

pytest.importorskip("deepspeed")

RANKS = DeepSpeedSpec(zero_stage=3, ranks=2, start_seconds=240, hang_seconds=120)
TWO_RANKS = LocalEngineSpec(compute_dtype="float32", threads=1, trainer=RANKS)
FILES_OF_RANK = {
    0: {"optimizer-00001-of-00002.safetensors", "weights-00001-of-00002.safetensors"},
    1: {"optimizer-00002-of-00002.safetensors", "weights-00002-of-00002.safetensors"},
}


class ThreadGroup:
    """Two ranks of a `RankGroup` in this process. A rank that is `gone` does not reply."""

    def __init__(self) -> None:
        self.ranks = [RankStore(rank, 2) for rank in (0, 1)]
        self.alive, self.gone = True, set[int]()

    def start(self) -> int:
        return 1

    def call_beside(self, method: str, *args: Any) -> dict[int, Any]:
        if method == "discard":
            return {}
        return {rank: getattr(store, method)(*args) for rank, store in enumerate(self.ranks) if rank not in self.gone}


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    """A checkpoint of two ranks."""
    (tmp_path / "snapshot").mkdir()
    files = {name: tmp_path / "snapshot" / name for name in sorted(FILES_OF_RANK[0] | FILES_OF_RANK[1])}
    for name, path in files.items():
        path.write_text(name)
    policy = PolicyRef(run="r", stage="0-s", model="policy", step=1, state="0" * 64)
    key = checkpoint_key(policy)
    return Snapshot(policy, tmp_path / "snapshot", files, None, "0" * 64, key, None)


def test_the_process_of_the_engine_transfers_what_ranks_leave(
    moto_endpoint: str, moto_bucket: str, snapshot: Snapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, store = ThreadGroup(), open_store(f"s3://{moto_bucket}/p", s3_options(moto_endpoint))
    for rank in group.ranks:
        rank._stores[store.url] = open_store(store.url, s3_options(moto_endpoint))
    own = {"put": set[str](), "fetch": set[str]()}
    put_file, fetch = store.put_file, store.fetch

    def counted_put(key: str, path: Path, **options: Any) -> FileDigest | None:
        own["put"].add(path.name)
        return put_file(key, path, **options)

    def counted_fetch(key: str, to: Path) -> FileDigest:
        own["fetch"].add(to.name)
        return fetch(key, to)

    monkeypatch.setattr(store, "put_file", counted_put)
    monkeypatch.setattr(store, "fetch", counted_fetch)
    transfers = RankTransfers(group)  # type: ignore[arg-type]
    saver = Saver(store, transfers)

    # Both ranks reply.
    saver.submit(snapshot, PROVENANCE).result()
    manifest = read_manifest(store, snapshot.key)
    assert not snapshot.folder.exists()
    back = checkpoint_files(store, transfers, manifest, tmp_path / "a")
    assert {name: path.read_text() for name, path in back.items()} == {name: name for name in snapshot.files}
    assert own == {"put": set(), "fetch": set()}

    # Rank 1 does not.
    group.gone = {1}
    snapshot.folder.mkdir()
    for name, path in snapshot.files.items():
        path.write_text(name)
    saver.submit(replace(snapshot, key=f"{snapshot.key}-2"), PROVENANCE).result()
    back = checkpoint_files(store, transfers, read_manifest(store, f"{snapshot.key}-2"), tmp_path / "b")
    assert {name: path.read_text() for name, path in back.items()} == {name: name for name in snapshot.files}
    assert own == {"put": FILES_OF_RANK[1], "fetch": FILES_OF_RANK[1]}

    # It was on another machine, and its files with it: nothing is committed, and the call may be made again.
    with pytest.raises(WorkerDied):
        saver.submit(replace(snapshot, key=f"{snapshot.key}-3"), PROVENANCE).result()
    assert find_artifact(store, f"{snapshot.key}-3") is None
    group.alive = False
    with pytest.raises(WorkerDied):
        checkpoint_files(store, transfers, manifest, tmp_path / "c")
    saver.close()


@pytest.mark.parametrize("url", ["file", "memory"])
def test_other_stores_are_not_used_by_ranks(url: str, snapshot: Snapshot, tmp_path: Path) -> None:
    """A store in memory would be another one in each rank. The files of a folder are linked."""
    group = ThreadGroup()
    group.call_beside = None  # type: ignore[assignment, method-assign]
    store = open_store(f"memory://{uuid4().hex}" if url == "memory" else str(tmp_path / "store"))
    transfers = RankTransfers(group)  # type: ignore[arg-type]
    saver = Saver(store, transfers)
    saver.submit(snapshot, PROVENANCE).result()
    back = checkpoint_files(store, transfers, read_manifest(store, snapshot.key), tmp_path / "back")
    assert {name: path.read_text() for name, path in back.items()} == {name: name for name in snapshot.files}
    saver.close()


class ProcessProxy(FaultProxy):
    """A proxy that knows the process of each connection."""

    def __init__(self, upstream_port: int) -> None:
        self.requests_of: list[tuple[int, str, str]] = []
        """(pid, method, path without the query)."""
        self.on_request: Callable[[int, str, str], None] = lambda pid, method, path: None
        self._client = threading.local()
        super().__init__("127.0.0.1", upstream_port)

    def _connection(self, client: socket.socket) -> None:
        port = client.getpeername()[1]
        for connection in psutil.net_connections("tcp4"):
            if connection.laddr.port == port and connection.raddr and connection.raddr.port == self.port:
                self._client.pid = connection.pid
        super()._connection(client)

    def _fault(self, method: str, path: str) -> Fault | None:
        request = (self._client.pid, method, unquote(path.partition("?")[0]))
        self.requests_of.append(request)
        self.on_request(*request)
        return super()._fault(method, path)

    def files_of(self, method: str, ref: ArtifactRef) -> dict[int, set[str]]:
        """By process: names of the data files of the artifact that it transferred with this method."""
        files: dict[int, set[str]] = {}
        for pid, requested, path in self.requests_of:
            if requested == method and f"/{ref.key}/" in path and path.endswith(".safetensors"):
                files.setdefault(pid, set()).add(Path(path).name)
        return files


def test_the_engine_continues_the_torn_upload_of_a_rank(
    faulty: FaultProxy, moto_bucket: str, tmp_path: Path
) -> None:
    backend = S3Backend(moto_bucket, "p", s3_options(faulty.url))
    backend.part_bytes = part = 5 << 20  # the smallest that S3 accepts
    backend.part_retry = quick = RetryPolicy(attempts=2, first_seconds=0.001)
    store = ObjectStore(backend, retry=quick)
    rank = RankStore(1, 2)
    rank._stores[store.url] = store

    # A file of rank 0, and one of rank 1 with four parts.
    files = {part_file(WEIGHTS, number, 2): tmp_path / str(number) for number in (0, 1)}
    theirs, own = files.values()
    theirs.write_bytes(b"of rank 0")
    own.write_bytes(os.urandom(4 * part))
    before = {name: digest_file(path) for name, path in files.items()}

    def upload(places: Mapping[str, tuple[str, Path]]) -> dict[str, FileDigest]:
        """Rank 1 cannot send the last two parts of its file."""
        faulty.only = lambda method, path: "partNumber=3" in path or "partNumber=4" in path
        faulty.at_random(1.0, [Answer(503)])
        with pytest.raises(StorageUnavailable):
            rank.upload(store.url, places)
        faulty.heal()
        faulty.only = lambda method, path: True
        faulty.requests.clear()
        return {}

    commit_files(store, "c", files, kind="checkpoint", provenance=PROVENANCE, upload=upload)
    sent = sorted(path.partition("partNumber=")[2][0] for _, path in faulty.requests if "partNumber=" in path)
    assert sent == ["3", "4"]
    back = materialise_files(store, "c", tmp_path / "back")
    assert {name: digest_file(path) for name, path in back.items()} == before


@dataclass
class OnS3:
    """An engine with two ranks whose store is on S3."""

    engine: LocalEngine
    proxy: ProcessProxy

    @property
    def pids(self) -> dict[int, int]:
        """The processes of the ranks, by rank."""
        pids: dict[int, int] = self.engine.backend.group.pids  # type: ignore[attr-defined]
        return pids

    async def step(self, parent: PolicyRef) -> CommitRecord:
        batch = commit_batch(self.engine.store, parent)
        return await self.engine.take_gradient_step(request_after(parent, batch, lr=0.01))

    async def load(self, policy: PolicyRef) -> LoadedPolicy:
        return await self.engine._compute(policy.run, lambda: self.engine.materialiser.for_training(policy))

    async def restore(self, policy: PolicyRef) -> LoadedPolicy:
        """Loads the policy from its checkpoint, as an engine that has just started does."""
        await self.engine._compute(policy.run, lambda: self.engine.loaded_policies.drop(policy))
        return await self.load(policy)


@pytest.fixture(scope="module")
def on_s3(moto_endpoint: str) -> Iterator[OnS3]:
    bucket = f"bucket-{uuid4().hex[:12]}"
    make_bucket(moto_endpoint, bucket)
    with (
        ProcessProxy(int(moto_endpoint.rpartition(":")[2])) as proxy,
        pytest.MonkeyPatch.context() as environment,
    ):
        environment.setenv("AWS_ENDPOINT_URL", proxy.url)
        environment.setenv("AWS_ACCESS_KEY_ID", KEY)
        environment.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        engine = LocalEngine(f"s3://{bucket}/p", TWO_RANKS)
        yield OnS3(engine, proxy)
        asyncio.run(engine.close(checkpoint=False))


@pytest.mark.slow
async def test_each_rank_transfers_its_own_part(on_s3: OnS3, tiny_folder: Path, tmp_path: Path) -> None:
    store, proxy = on_s3.engine.store, on_s3.proxy
    first = await on_s3.step(await new_policy(on_s3.engine, tiny_folder, run="own"))
    ref = await on_s3.engine.save_checkpoint(first.policy, provenance=PROVENANCE)
    own_files = {pid: FILES_OF_RANK[rank] for rank, pid in on_s3.pids.items()}
    assert proxy.files_of("PUT", ref) == own_files  # and none by the process of the engine

    # The stored bytes are those that the ranks write.
    written = (await on_s3.load(first.policy)).trainer.write_checkpoint(tmp_path)
    stored = {entry.name: entry.sha256 for entry in read_manifest(store, ref.key).files}
    assert stored == {name: digest_file(path).sha256 for name, path in written.items()}

    # A restore redoes no step. The ranks read the files; the process of the engine reads the manifest only.
    restored = await on_s3.restore(first.policy)
    assert restored.saved_step == 1
    assert restored.trainer.weights_digest()[0] == first.weights_digest
    assert proxy.files_of("GET", ref) == own_files


@pytest.mark.slow
async def test_a_rank_is_killed_during_its_upload(on_s3: OnS3, tiny_folder: Path, tmp_path: Path) -> None:
    store, proxy = on_s3.engine.store, on_s3.proxy
    first = await on_s3.step(await new_policy(on_s3.engine, tiny_folder, run="killed"))
    victim = on_s3.pids[1]

    def kill(pid: int, method: str, path: str) -> None:
        if (pid, method) == (victim, "PUT"):
            os.kill(victim, signal.SIGKILL)

    proxy.on_request = kill
    ref = await on_s3.engine.save_checkpoint(first.policy, provenance=PROVENANCE)
    assert FILES_OF_RANK[1] <= proxy.files_of("PUT", ref)[os.getpid()]  # the engine's process completed the upload

    # The checkpoint has the committed weights, and training goes on from it.
    reference = torch_trainer(tiny_folder)
    reference.read_checkpoint(materialise_files(store, ref.key, tmp_path), optimizer=True)
    assert reference.weights_digest()[0] == first.weights_digest
    second = await on_s3.step(first.policy)
    assert second.policy.step == 2 and victim not in on_s3.pids.values()
    assert audit_store(store).problems == ()
