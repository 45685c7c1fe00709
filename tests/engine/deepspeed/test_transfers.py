"""Tests of checkpoints of two ranks on S3. A proxy in front of the server says which process made each request."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote

import psutil
import pytest

from engine.backends.deepspeed.transfers import RankStore
from engine.backends.weight_files.pieces import WEIGHTS, part_file
from engine.local.engine import LocalEngine
from engine.local.loaded_policies import LoadedPolicy
from engine.specs.engine import DeepSpeedSpec, LocalEngineSpec
from storage.chain.records import Chain, CommitRecord, PolicyRef
from storage.errors import StorageUnavailable
from storage.inspect.audit import audit_store
from storage.serialization import FileDigest, digest_file
from storage.store.artifacts import ArtifactRef, commit_files, read_manifest
from storage.store.backends.s3 import S3Backend
from storage.store.download import materialise_files
from storage.store.objects import ObjectStore, open_store
from storage.store.retry import RetryPolicy
from tests.engine.deepspeed.conftest import torch_trainer
from tests.fixtures.engines import PROVENANCE, commit_batch, new_policy, request_after
from tests.fixtures.stores.faults import Answer, Fault, FaultProxy
from tests.fixtures.stores.s3 import KEY, SECRET, s3_options

pytest.importorskip("deepspeed")

RANKS = DeepSpeedSpec(zero_stage=3, ranks=2, start_seconds=240, hang_seconds=120)
TWO_RANKS = LocalEngineSpec(compute_dtype="float32", threads=1, trainer=RANKS)
FILES_OF_RANK = {
    0: {"optimizer-00001-of-00002.safetensors", "weights-00001-of-00002.safetensors"},
    1: {"optimizer-00002-of-00002.safetensors", "weights-00002-of-00002.safetensors"},
}


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


@pytest.fixture
def proxy(moto_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessProxy]:
    with ProcessProxy(int(moto_endpoint.rpartition(":")[2])) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield proxy


async def step(engine: LocalEngine, parent: PolicyRef) -> CommitRecord:
    return await engine.take_gradient_step(request_after(parent, commit_batch(engine.store, parent), lr=0.01))


async def load(engine: LocalEngine, policy: PolicyRef) -> LoadedPolicy:
    return await engine._compute(policy.run, lambda: engine.materialiser.for_training(policy))


def pids_of(engine: LocalEngine) -> dict[int, int]:
    pids: dict[int, int] = engine.backend.group.pids  # type: ignore[attr-defined]
    return pids


@pytest.mark.slow
async def test_each_rank_transfers_its_own_part(
    proxy: ProcessProxy, moto_bucket: str, tiny_folder: Path, tmp_path: Path
) -> None:
    url = f"s3://{moto_bucket}/p"
    engine = LocalEngine(url, TWO_RANKS)
    try:
        first = await step(engine, await new_policy(engine, tiny_folder))
        ref = await engine.save_checkpoint(first.policy, provenance=PROVENANCE)
        assert proxy.files_of("PUT", ref) == {pid: FILES_OF_RANK[rank] for rank, pid in pids_of(engine).items()}

        # The bytes are those that the ranks write, and nothing is left on the disk.
        loaded = await load(engine, first.policy)
        written = loaded.trainer.write_checkpoint(tmp_path / "again")
        entries = read_manifest(engine.store, ref.key).files
        assert {entry.name: entry.sha256 for entry in entries} == {
            name: digest_file(path).sha256 for name, path in written.items()
        }
    finally:
        await engine.close(checkpoint=False)

    # Another engine restores the checkpoint. No step is redone, and its own process reads the manifest only.
    engine = LocalEngine(url, TWO_RANKS)
    try:
        restored = await load(engine, first.policy)
        assert restored.saved_step == 1
        assert restored.trainer.weights_digest()[0] == first.weights_digest
        assert proxy.files_of("GET", ref) == {pid: FILES_OF_RANK[rank] for rank, pid in pids_of(engine).items()}
    finally:
        await engine.close(checkpoint=False)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
async def test_a_rank_is_killed_during_its_upload(
    killed: int, proxy: ProcessProxy, moto_bucket: str, tiny_folder: Path, tmp_path: Path
) -> None:
    url = f"s3://{moto_bucket}/p"
    engine = LocalEngine(url, TWO_RANKS)
    try:
        first = await step(engine, await new_policy(engine, tiny_folder))
        victim = pids_of(engine)[killed]

        def kill(pid: int, method: str, path: str) -> None:
            if (pid, method) == (victim, "PUT"):
                os.kill(victim, signal.SIGKILL)

        proxy.on_request = kill
        ref = await engine.save_checkpoint(first.policy, provenance=PROVENANCE)
        assert FILES_OF_RANK[killed] <= proxy.files_of("PUT", ref)[os.getpid()]  # the engine uploaded these

        # The checkpoint has the committed weights, and training goes on from it.
        reference = torch_trainer(tiny_folder)
        reference.read_checkpoint(materialise_files(open_store(url), ref.key, tmp_path), optimizer=True)
        assert reference.weights_digest()[0] == first.weights_digest
        second = await step(engine, first.policy)
        assert second.policy.step == 2 and victim not in pids_of(engine).values()
        assert audit_store(engine.store).problems == ()
        assert Chain.of(engine.store, second.policy).record(2) == second
    finally:
        await engine.close(checkpoint=False)
