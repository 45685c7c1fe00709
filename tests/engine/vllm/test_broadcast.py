"""Weights by a broadcast: either every byte arrives, or all members report an error, even if some die or hang."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.backends.replicas.broadcast import (
    BroadcastAborted,
    BroadcastGroup,
    GroupMember,
    abort_group,
    is_aborted,
    open_store,
    receive,
    send,
)
from engine.backends.replicas.delivery import BroadcastDelivery, LoadRequest
from engine.backends.replicas.runtime import LoadProof, manifest_of
from engine.backends.vllm.extension import Extension
from engine.errors import SamplerOutOfSync, WorkerDied
from tests.engine.vllm.pools import ROOT

CPU = torch.device("cpu")
LONG_TIMEOUT = 120.0
"""Seconds. Faults that do not need the timeout to be noticed must be noticed long before it."""
MORE = 1 << 26
"""More bytes than a socket buffers for a receiver that does not read."""


def tensors_of(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "matrix": torch.randn(11, 7, generator=generator),
        "nothing": torch.empty(0, 4),
        "one": torch.tensor(7 + seed),
        "half": torch.randn(5, 3, generator=generator).to(torch.bfloat16),
        "mask": torch.rand(9, generator=generator) > 0.5,
        "columns": torch.randn(4, 3, generator=generator).T,
    }


@pytest.fixture(scope="module")
def opened_store() -> Iterator[tuple[Any, int]]:
    yield open_store("127.0.0.1", LONG_TIMEOUT)


@pytest.fixture
def store(opened_store: tuple[Any, int]) -> int:
    """The port of a sender's store."""
    return opened_store[1]


@pytest.fixture
def store_object(opened_store: tuple[Any, int]) -> Any:
    return opened_store[0]


_names = iter(range(10_000))


def group_at(port: int, size: int, *, timeout: float = LONG_TIMEOUT, bucket_bytes: int = 1 << 20) -> BroadcastGroup:
    return BroadcastGroup(f"group-{next(_names)}", "127.0.0.1", port, size, "gloo", timeout, bucket_bytes)


def members_of(group: BroadcastGroup) -> list[GroupMember]:
    with ThreadPoolExecutor(group.size) as threads:
        return list(threads.map(lambda rank: GroupMember(group, rank, CPU), range(group.size)))


def taken(threads: ThreadPoolExecutor, members: list[GroupMember], manifest: Any) -> list[Future[dict[str, Tensor]]]:
    return [threads.submit(lambda member: dict(receive(member, manifest)), member) for member in members[1:]]


# -- bytes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_bytes", [1, 64, 1000, 1 << 20])
def test_every_tensor_arrives_bit_by_bit_and_in_order(store: int, bucket_bytes: int) -> None:
    members = members_of(group_at(store, 3, bucket_bytes=bucket_bytes))
    with ThreadPoolExecutor() as threads:
        for seed in (0, 1):  # a group is used again and again
            sent = tensors_of(seed)
            manifest = manifest_of(sent.items())
            futures = taken(threads, members, manifest)
            send(members[0], sent.items(), manifest)
            for future in futures:
                got = future.result()
                assert list(got) == list(sent)
                assert manifest_of(got.items()) == manifest
    for member in members:
        member.leave()


def split(sent: dict[str, Tensor], senders: int) -> dict[str, list[tuple[int, int, int]]]:
    """Every tensor in parts of nearly equal length, as ZeRO 3 splits it."""
    parts: dict[str, list[tuple[int, int, int]]] = {}
    for name, tensor in sent.items():
        length = -(-tensor.numel() // senders)
        bounds = [min(rank * length, tensor.numel()) for rank in range(senders + 1)]
        parts[name] = [(rank, bounds[rank], bounds[rank + 1] - bounds[rank]) for rank in range(senders)]
    return parts


def own_parts(sent: dict[str, Tensor], parts: Any, rank: int) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in sent.items():
        for sender, start, length in parts[name]:
            if sender == rank:
                yield name, tensor.reshape(-1)[start : start + length]


@pytest.mark.parametrize("bucket_bytes", [7, 64, 1 << 20])
@pytest.mark.parametrize("senders", [1, 2, 3])
def test_the_parts_of_several_senders_arrive_as_whole_tensors(store: int, senders: int, bucket_bytes: int) -> None:
    members = members_of(group_at(store, senders + 2, bucket_bytes=bucket_bytes))
    sent = tensors_of()
    manifest, parts = manifest_of(sent.items()), split(sent, senders)
    with ThreadPoolExecutor() as threads:
        receiving = [threads.submit(lambda m: dict(receive(m, manifest, parts)), m) for m in members[senders:]]
        sending = [
            threads.submit(send, member, own_parts(sent, parts, rank), manifest, parts)
            for rank, member in enumerate(members[:senders])
        ]
        for future in sending:
            future.result()
        assert [manifest_of(future.result().items()) for future in receiving] == [manifest] * 2
    for member in members:
        member.leave()


@pytest.mark.parametrize("spoil", ["gap", "overlap", "short"])
def test_parts_that_are_not_the_whole_tensor_are_refused(store: int, spoil: str) -> None:
    members, sent = members_of(group_at(store, 2)), tensors_of()
    parts = split(sent, 1)
    parts["matrix"] = {"gap": [(0, 0, 7), (0, 8, 69)], "overlap": [(0, 0, 8), (0, 7, 70)], "short": [(0, 0, 76)]}[spoil]
    with pytest.raises(BroadcastAborted, match="matrix"):
        send(members[0], own_parts(sent, parts, 0), manifest_of(sent.items()), parts)
    with pytest.raises(BroadcastAborted, match="matrix"):
        dict(receive(members[1], manifest_of(sent.items()), parts))


def test_an_abort_ends_many_exchanges_at_once(store_object: Any, store: int) -> None:
    """The receiver never takes part, and the process with the store, which is no member, makes the senders abort."""
    members, sent = members_of(group_at(store, 3)), {f"tensor {n}": torch.zeros(1 << 16) for n in range(20)}
    manifest, parts = manifest_of(sent.items()), split(sent, 2)
    began = time.monotonic()
    with ThreadPoolExecutor() as threads:
        sending = [
            threads.submit(send, member, own_parts(sent, parts, rank), manifest, parts)
            for rank, member in enumerate(members[:2])
        ]
        abort_group(store_object, members[0].group.name, "the engine gave up")
        for future in sending:
            with pytest.raises(BroadcastAborted, match="the engine gave up"):
                future.result()
    assert is_aborted(store_object, members[0].group.name)
    assert time.monotonic() - began < LONG_TIMEOUT / 4


@pytest.mark.parametrize("spoil", ["swapped", "missing", "cast", "renamed", "raises"])
def test_tensors_that_differ_from_the_manifest_abort_the_broadcast(store: int, spoil: str) -> None:
    members, sent = members_of(group_at(store, 3)), tensors_of()
    manifest = manifest_of(sent.items())

    def spoilt() -> Iterator[tuple[str, Tensor]]:
        pairs = list(sent.items())
        if spoil == "swapped":
            pairs[0], pairs[1] = pairs[1], pairs[0]
        if spoil == "cast":
            pairs[3] = ("half", sent["half"].float())
        if spoil == "renamed":
            pairs[3] = ("third", sent["half"])
        if spoil == "missing":
            pairs.pop()
        yield from pairs[:4]
        if spoil == "raises":
            raise ValueError("the trainer broke")
        yield from pairs[4:]

    with ThreadPoolExecutor() as threads:
        futures = taken(threads, members, manifest)
        with pytest.raises((BroadcastAborted, ValueError)):
            send(members[0], spoilt(), manifest)
        for future in futures:
            with pytest.raises(BroadcastAborted, match="the sender gave up"):
                future.result()
    assert not any(member.usable for member in members)


def test_the_reason_of_a_receiver_that_aborts_reaches_all_members(store: int) -> None:
    members = members_of(group_at(store, 3))
    sent = {"large": torch.zeros(MORE, dtype=torch.uint8)}
    manifest = manifest_of(sent.items())
    with ThreadPoolExecutor() as threads:
        futures = taken(threads, members[:2], manifest)
        members[2].leave("rank 2: tensor large arrived with other bytes")
        with pytest.raises(BroadcastAborted, match="rank 2: tensor large"):
            send(members[0], sent.items(), manifest)
        with pytest.raises(BroadcastAborted, match="rank 2: tensor large"):
            futures[0].result()


def test_the_wait_for_a_missing_member_has_a_timeout(store: int) -> None:
    with pytest.raises(BroadcastAborted, match="could not connect|not over after 1 s"):
        GroupMember(group_at(store, 2, timeout=1), 0, CPU)


# -- processes ----------------------------------------------------------------------------------------------------

ENTRIES = {"first": ("torch.uint8", (1000,), ""), "more": ("torch.uint8", (MORE,), "")}
RECEIVER = f"""
import json, sys, torch
from engine.backends.replicas.broadcast import BroadcastAborted, BroadcastGroup, GroupMember, receive
print("ready", flush=True)
member = GroupMember(BroadcastGroup(**json.loads(sys.argv[1])), int(sys.argv[2]), torch.device("cpu"))
try:
    for name, tensor in receive(member, {ENTRIES}):
        print(name, flush=True)
        if name == "first" and sys.argv[3] == "wait":
            sys.stdin.readline()
except BroadcastAborted as error:
    print("broken off:", error, flush=True)
"""
SENDER = f"""
import dataclasses, json, sys, torch
from engine.backends.replicas.broadcast import BroadcastGroup, GroupMember, open_store, send
store, port = open_store("127.0.0.1", 60)
group = BroadcastGroup("g", "127.0.0.1", port, 3, "gloo", {LONG_TIMEOUT}, 1000)
print(json.dumps(dataclasses.asdict(group)), flush=True)
member = GroupMember(group, 0, torch.device("cpu"))
def tensors():
    yield "first", torch.zeros(1000, dtype=torch.uint8)
    sys.stdin.readline()
send(member, tensors(), {ENTRIES})
"""


def started(program: str, *arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_receivers_notice_that_the_sender_was_killed() -> None:
    sender = started(SENDER)
    group_json = line(sender)
    receivers = [started(RECEIVER, group_json, str(rank), "go") for rank in (1, 2)]
    try:
        assert [line(receiver) for receiver in receivers for _ in range(2)] == ["ready", "first"] * 2
        sender.kill()
        assert all(line(receiver).startswith("broken off:") for receiver in receivers)
    finally:
        end(sender, *receivers)


@pytest.mark.slow
@pytest.mark.parametrize(("signal_number", "timeout"), [(signal.SIGKILL, LONG_TIMEOUT), (signal.SIGSTOP, 10.0)])
def test_all_members_notice_that_a_receiver_was_killed_or_hangs(
    store: int, signal_number: signal.Signals, timeout: float
) -> None:
    group = group_at(store, 3, timeout=timeout, bucket_bytes=1000)
    group_json = json.dumps(asdict(group))
    receivers = [started(RECEIVER, group_json, "1", "go"), started(RECEIVER, group_json, "2", "wait")]
    sent = {"first": torch.zeros(1000, dtype=torch.uint8), "more": torch.zeros(MORE, dtype=torch.uint8)}
    manifest = manifest_of(sent.items())

    def tensors() -> Iterator[tuple[str, Tensor]]:
        yield "first", sent["first"]
        assert line(receivers[1]) == "first"
        receivers[1].send_signal(signal_number)
        yield "more", sent["more"]

    try:
        assert [line(receiver) for receiver in receivers] == ["ready", "ready"]
        member = GroupMember(group, 0, CPU)
        with pytest.raises(BroadcastAborted):
            send(member, tensors(), manifest)
        assert line(receivers[0]) == "first"
        assert line(receivers[0]).startswith("broken off:")
    finally:
        end(*receivers)


# -- the pool's part ----------------------------------------------------------------------------------------------


class Worker(Extension):
    """Receives and digests; nothing is loaded."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.model_runner = self
        self.got: dict[str, Any] = {}

    def get_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def ostinato_load(  # type: ignore[override]
        self, source: Any, manifest: Any, state: str, full: bool = False, parts: Any = None
    ) -> Any:
        try:
            self.got = dict(manifest_of(self._tensors(source, manifest, parts)))
        except BroadcastAborted as error:
            return self._load_failed(source, str(error))
        return self._reply(state=state)

    def _finish_reload(self) -> bool:
        return True


@dataclass(eq=False)
class FakeActor:
    """One start of a replica, as its actor."""

    replica: FakeReplica

    async def call(self, method: str, *args: Any) -> list[Any]:
        assert method == "rpc"
        return await self.replica.rpc(*args)


class FakeReplica:
    """Two workers; `dies_in`: the method in which it is killed."""

    def __init__(self, name: str) -> None:
        self.name, self.dies_in = name, ""
        self.workers = [Worker(rank) for rank in range(2)]
        self.joins = 0
        self.actor = FakeActor(self)

    def running_actor(self) -> FakeActor:
        return self.actor

    def restart(self) -> None:
        self.workers = [Worker(rank) for rank in range(2)]
        self.actor = FakeActor(self)

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        if method == self.dies_in:
            self.dies_in = ""
            for worker in self.workers:
                worker._leave_group("")  # as its sockets close
            raise WorkerDied(f"{self.name} was killed")
        self.joins += method == "ostinato_join_group"
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor() as threads:  # all workers of all replicas wait for each other
            calls = [loop.run_in_executor(threads, getattr(worker, method), *args) for worker in self.workers]
            return list(await asyncio.gather(*calls))

    async def fail(self, actor: Any) -> None:
        """The pool starts it again: it is there at the next try of all."""


async def load_into(replica: Any, weights: LoadRequest) -> LoadProof:
    replies = await replica.rpc(
        "ostinato_load", weights.source, weights.manifest, weights.state, weights.full, weights.parts
    )
    errors = [reply["error"] for reply in replies if reply["error"]]
    if errors:
        raise SamplerOutOfSync(errors[0])
    return LoadProof(weights.state, len(weights.manifest), 0)


def delivered(delivery: BroadcastDelivery, replicas: list[Any], tensors: dict[str, Tensor]) -> list[Any]:
    weights = LoadRequest((), manifest_of(tensors.items()), "state", False)
    outcomes = asyncio.run(delivery.deliver(replicas, weights, tensors, load_into))
    for replica, outcome in zip(replicas, outcomes, strict=True):
        if isinstance(outcome, LoadProof):
            assert [worker.got for worker in replica.workers] == [weights.manifest] * 2
    return [type(outcome) for outcome in outcomes]


@pytest.fixture
def delivery() -> Iterator[BroadcastDelivery]:
    delivery = BroadcastDelivery("127.0.0.1", CPU, timeout=10, bucket_bytes=1000)
    yield delivery
    delivery.close()


@pytest.fixture
def replicas(delivery: BroadcastDelivery) -> Iterator[list[Any]]:
    replicas = [FakeReplica(name) for name in "abc"]
    yield replicas
    for replica in replicas:
        for worker in replica.workers:
            worker._leave_group("")


def test_a_group_is_reused_until_a_worker_changes(delivery: BroadcastDelivery, replicas: list[Any]) -> None:
    replicas = replicas[:2]
    for seed in (0, 1):
        assert delivered(delivery, replicas, tensors_of(seed)) == [LoadProof, LoadProof]
    assert [replica.joins for replica in replicas] == [1, 1]
    for worker in replicas[1].workers:
        worker._leave_group("")
    replicas[1].restart()
    assert delivered(delivery, replicas, tensors_of(2)) == [LoadProof, LoadProof]
    assert [replica.joins for replica in replicas] == [2, 2]
    assert delivered(delivery, replicas[:1], tensors_of(3)) == [LoadProof]  # one fewer
    assert [replica.joins for replica in replicas] == [3, 2]


@pytest.mark.parametrize("method", ["ostinato_device", "ostinato_join_group", "ostinato_load"])
def test_after_the_death_of_a_replica_the_others_get_a_second_attempt(
    delivery: BroadcastDelivery, replicas: list[Any], method: str
) -> None:
    if method == "ostinato_load":  # in a group that is there already
        assert delivered(delivery, replicas, tensors_of()) == [LoadProof] * 3
    replicas[1].dies_in = method
    assert delivered(delivery, replicas, tensors_of(1)) == [LoadProof, WorkerDied, LoadProof]
    assert delivered(delivery, replicas, tensors_of(2)) == [LoadProof] * 3


def test_the_death_of_all_replicas_is_reported_for_each(delivery: BroadcastDelivery, replicas: list[Any]) -> None:
    for replica in replicas:
        replica.dies_in = "ostinato_load"
    assert delivered(delivery, replicas, tensors_of()) == [WorkerDied] * 3


def test_an_error_of_the_trainer_is_raised_and_the_next_delivery_works(
    delivery: BroadcastDelivery, replicas: list[Any]
) -> None:
    class Trainer(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            if name == "half":
                raise RuntimeError("CUDA error")
            return super().__getitem__(name)

    tensors = tensors_of()
    weights = LoadRequest((), manifest_of(tensors.items()), "state", False)
    with pytest.raises(RuntimeError, match="CUDA error"):
        asyncio.run(delivery.deliver(replicas, weights, Trainer(tensors), load_into))  # type: ignore[arg-type]
    assert delivered(delivery, replicas, tensors) == [LoadProof] * 3
