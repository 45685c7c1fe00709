"""Weights by a broadcast: every byte arrives or everybody says that it did not, whoever dies, hangs or gives up."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.backends.vllm.serving.runtime import Receipt
from engine.backends.vllm.weight_sync.broadcast import BrokenOff, Meeting, Member, open_store, receive, send
from engine.backends.vllm.weight_sync.delivery import ByBroadcast
from engine.backends.vllm.weight_sync.extension import Extension
from engine.backends.vllm.weight_sync.last_weights import Weights
from engine.backends.vllm.weight_sync.manifest import manifest_of
from engine.errors import SamplerOutOfSync, WorkerDied
from tests.engine.vllm.pools import ROOT

CPU = torch.device("cpu")
LONG_SECONDS = 120.0
"""What is noticed by other means than this must be noticed long before."""
MORE = 1 << 26
"""Bytes that no socket holds for a receiver that does not take them."""


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
def store() -> Iterator[int]:
    """The port of a sender's store."""
    kept, port = open_store("127.0.0.1", LONG_SECONDS)
    yield port
    del kept


_names = iter(range(10_000))


def meeting_at(port: int, size: int, *, seconds: float = LONG_SECONDS, bucket_bytes: int = 1 << 20) -> Meeting:
    return Meeting(f"group-{next(_names)}", "127.0.0.1", port, size, "gloo", seconds, bucket_bytes)


def group_of(meeting: Meeting) -> list[Member]:
    with ThreadPoolExecutor(meeting.size) as threads:
        return list(threads.map(lambda rank: Member(meeting, rank, CPU), range(meeting.size)))


def taken(threads: ThreadPoolExecutor, members: list[Member], manifest: Any) -> list[Future[dict[str, Tensor]]]:
    return [threads.submit(lambda member: dict(receive(member, manifest)), member) for member in members[1:]]


# -- bytes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_bytes", [1, 64, 1000, 1 << 20])
def test_every_tensor_arrives_bit_by_bit_in_order_however_it_is_cut(store: int, bucket_bytes: int) -> None:
    members = group_of(meeting_at(store, 3, bucket_bytes=bucket_bytes))
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


@pytest.mark.parametrize("spoil", ["swapped", "missing", "cast", "raises"])
def test_a_sender_that_does_not_send_what_it_said_breaks_off(store: int, spoil: str) -> None:
    members, sent = group_of(meeting_at(store, 3)), tensors_of()
    manifest = manifest_of(sent.items())

    def spoilt() -> Iterator[tuple[str, Tensor]]:
        pairs = list(sent.items())
        if spoil == "swapped":
            pairs[0], pairs[1] = pairs[1], pairs[0]
        if spoil == "cast":
            pairs[3] = ("half", sent["half"].float())
        if spoil == "missing":
            pairs.pop()
        yield from pairs[:4]
        if spoil == "raises":
            raise ValueError("the trainer broke")
        yield from pairs[4:]

    with ThreadPoolExecutor() as threads:
        futures = taken(threads, members, manifest)
        with pytest.raises((BrokenOff, ValueError)):
            send(members[0], spoilt(), manifest)
        for future in futures:
            with pytest.raises(BrokenOff, match="the sender gave up"):
                future.result()
    assert not any(member.whole for member in members)


def test_a_receiver_that_gives_up_tells_everybody_why(store: int) -> None:
    members = group_of(meeting_at(store, 3))
    sent = {"large": torch.zeros(MORE, dtype=torch.uint8)}
    manifest = manifest_of(sent.items())
    with ThreadPoolExecutor() as threads:
        futures = taken(threads, members[:2], manifest)
        members[2].leave("rank 2: tensor large arrived with other bytes")
        with pytest.raises(BrokenOff, match="rank 2: tensor large"):
            send(members[0], sent.items(), manifest)
        with pytest.raises(BrokenOff, match="rank 2: tensor large"):
            futures[0].result()


def test_who_does_not_come_is_not_waited_for_for_ever(store: int) -> None:
    with pytest.raises(BrokenOff, match="did not meet|not over after 1 s"):
        Member(meeting_at(store, 2, seconds=1), 0, CPU)


# -- processes ----------------------------------------------------------------------------------------------------

ENTRIES = {"first": ("torch.uint8", (1000,), ""), "more": ("torch.uint8", (MORE,), "")}
RECEIVER = f"""
import json, sys, torch
from engine.backends.vllm.weight_sync.broadcast import BrokenOff, Meeting, Member, receive
print("ready", flush=True)
member = Member(Meeting(**json.loads(sys.argv[1])), int(sys.argv[2]), torch.device("cpu"))
try:
    for name, tensor in receive(member, {ENTRIES}):
        print(name, flush=True)
        if name == "first" and sys.argv[3] == "wait":
            sys.stdin.readline()
except BrokenOff as error:
    print("broken off:", error, flush=True)
"""
SENDER = f"""
import dataclasses, json, sys, torch
from engine.backends.vllm.weight_sync.broadcast import Meeting, Member, open_store, send
store, port = open_store("127.0.0.1", 60)
meeting = Meeting("g", "127.0.0.1", port, 3, "gloo", {LONG_SECONDS}, 1000)
print(json.dumps(dataclasses.asdict(meeting)), flush=True)
member = Member(meeting, 0, torch.device("cpu"))
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
def test_a_sender_that_is_killed_in_the_middle_leaves_nobody_waiting() -> None:
    sender = started(SENDER)
    meeting = line(sender)
    receivers = [started(RECEIVER, meeting, str(rank), "go") for rank in (1, 2)]
    try:
        assert [line(receiver) for receiver in receivers for _ in range(2)] == ["ready", "first"] * 2
        sender.kill()
        assert all(line(receiver).startswith("broken off:") for receiver in receivers)
    finally:
        end(sender, *receivers)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "seconds"), [(signal.SIGKILL, LONG_SECONDS), (signal.SIGSTOP, 10.0)])
def test_a_receiver_that_is_killed_or_hangs_in_the_middle_leaves_nobody_waiting(
    store: int, number: signal.Signals, seconds: float
) -> None:
    meeting = meeting_at(store, 3, seconds=seconds, bucket_bytes=1000)
    given = json.dumps(asdict(meeting))
    receivers = [started(RECEIVER, given, "1", "go"), started(RECEIVER, given, "2", "wait")]
    sent = {"first": torch.zeros(1000, dtype=torch.uint8), "more": torch.zeros(MORE, dtype=torch.uint8)}
    manifest = manifest_of(sent.items())

    def tensors() -> Iterator[tuple[str, Tensor]]:
        yield "first", sent["first"]
        assert line(receivers[1]) == "first"
        receivers[1].send_signal(number)
        yield "more", sent["more"]

    try:
        assert [line(receiver) for receiver in receivers] == ["ready", "ready"]
        member = Member(meeting, 0, CPU)
        with pytest.raises(BrokenOff):
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

    def ostinato_load(self, source: Any, manifest: Any, state: str, full: bool = False) -> Any:  # type: ignore[override]
        try:
            self.got = dict(manifest_of(self._tensors(source, manifest)))
        except BrokenOff as error:
            return self._load_failed(source, str(error))
        return self._answer(state=state)

    def _settled(self) -> bool:
        return True


@dataclass(eq=False)
class Process:
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
        self.actor = Process(self)

    def running(self) -> Process:
        return self.actor

    def restart(self) -> None:
        self.workers = [Worker(rank) for rank in range(2)]
        self.actor = Process(self)

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        if method == self.dies_in:
            self.dies_in = ""
            for worker in self.workers:
                worker._leave("")  # as its sockets close
            raise WorkerDied(f"{self.name} was killed")
        self.joins += method == "ostinato_join"
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor() as threads:  # all workers of all replicas wait for each other
            calls = [loop.run_in_executor(threads, getattr(worker, method), *args) for worker in self.workers]
            return list(await asyncio.gather(*calls))

    async def fail(self, actor: Any) -> None:
        """The pool starts it again: it is there at the next try of all."""


async def load_into(replica: Any, weights: Weights) -> Receipt:
    answers = await replica.rpc("ostinato_load", weights.source, weights.manifest, weights.state)
    if wrong := [answer["wrong"] for answer in answers if answer["wrong"]]:
        raise SamplerOutOfSync(wrong[0])
    return Receipt(weights.state, len(weights.manifest), 0)


def delivered(delivery: ByBroadcast, replicas: list[Any], tensors: dict[str, Tensor]) -> list[Any]:
    weights = Weights((), manifest_of(tensors.items()), "state", False)
    found = asyncio.run(delivery.deliver(replicas, weights, tensors, load_into))
    for replica, outcome in zip(replicas, found, strict=True):
        if isinstance(outcome, Receipt):
            assert [worker.got for worker in replica.workers] == [weights.manifest] * 2
    return [type(outcome) for outcome in found]


@pytest.fixture
def delivery() -> Iterator[ByBroadcast]:
    delivery = ByBroadcast("127.0.0.1", CPU, seconds=30, bucket_bytes=1000)
    yield delivery
    delivery.close()


@pytest.fixture
def replicas(delivery: ByBroadcast) -> Iterator[list[Any]]:
    replicas = [FakeReplica(name) for name in "abc"]
    yield replicas
    for replica in replicas:
        for worker in replica.workers:
            worker._leave("")


def test_a_group_stays_until_a_worker_is_another(delivery: ByBroadcast, replicas: list[Any]) -> None:
    replicas = replicas[:2]
    for seed in (0, 1):
        assert delivered(delivery, replicas, tensors_of(seed)) == [Receipt, Receipt]
    assert [replica.joins for replica in replicas] == [1, 1]
    for worker in replicas[1].workers:
        worker._leave("")
    replicas[1].restart()
    assert delivered(delivery, replicas, tensors_of(2)) == [Receipt, Receipt]
    assert [replica.joins for replica in replicas] == [2, 2]
    assert delivered(delivery, replicas[:1], tensors_of(3)) == [Receipt]  # one fewer
    assert [replica.joins for replica in replicas] == [3, 2]


@pytest.mark.parametrize("method", ["ostinato_place", "ostinato_join", "ostinato_load"])
def test_a_replica_that_dies_costs_the_others_a_second_try(
    delivery: ByBroadcast, replicas: list[Any], method: str
) -> None:
    if method == "ostinato_load":  # in a group that is there already
        assert delivered(delivery, replicas, tensors_of()) == [Receipt] * 3
    replicas[1].dies_in = method
    assert delivered(delivery, replicas, tensors_of(1)) == [Receipt, WorkerDied, Receipt]
    assert delivered(delivery, replicas, tensors_of(2)) == [Receipt] * 3


def test_when_all_die_all_are_said_to_have_died(delivery: ByBroadcast, replicas: list[Any]) -> None:
    for replica in replicas:
        replica.dies_in = "ostinato_load"
    assert delivered(delivery, replicas, tensors_of()) == [WorkerDied] * 3


def test_what_the_trainer_raises_is_raised_and_the_next_delivery_is_whole(
    delivery: ByBroadcast, replicas: list[Any]
) -> None:
    class Trainer(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            if name == "half":
                raise RuntimeError("CUDA error")
            return super().__getitem__(name)

    tensors = tensors_of()
    weights = Weights((), manifest_of(tensors.items()), "state", False)
    with pytest.raises(RuntimeError, match="CUDA error"):
        asyncio.run(delivery.deliver(replicas, weights, Trainer(tensors), load_into))  # type: ignore[arg-type]
    assert delivered(delivery, replicas, tensors) == [Receipt] * 3
