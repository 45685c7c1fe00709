"""Weights that real ranks send to the workers of replicas: bit by bit, or not at all."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from engine.backends.deepspeed import backend as backend_module
from engine.backends.deepspeed.backend import DeepSpeedBackend, DeepSpeedTrainer
from engine.backends.deepspeed.sending import RankSenders
from engine.backends.protocol import Objective
from engine.backends.replicas.broadcast import BroadcastGroup
from engine.backends.replicas.delivery import BroadcastDelivery, LoadRequest
from engine.backends.replicas.runtime import HeldWeights, LoadProof, manifest_of, manifest_of_files
from engine.cluster.rank_group import RankGroup
from engine.errors import SamplerOutOfSync, WorkerDied
from engine.losses.likelihood import CrossEntropySpec
from engine.specs.adapters import LoraSpec
from engine.specs.engine import DeepSpeedSpec, LocalEngineSpec
from tests.engine.deepspeed.conftest import ADAMW, some_samples, torch_trainer
from tests.engine.deepspeed.lab import TARGET
from tests.engine.vllm.test_broadcast import FakeReplica, load_into

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
CE = Objective(CrossEntropySpec())
FAULTS = ["off by 1e-2", "swapped", "one byte", "a shard of another step", "stale head"]


def new_backend(stage: int, *, hang_seconds: float = 120) -> DeepSpeedBackend:
    trainer = DeepSpeedSpec(ranks=2, zero_stage=stage, start_seconds=240, hang_seconds=hang_seconds)  # type: ignore[arg-type]
    spec = LocalEngineSpec(trainer=trainer, device="cpu", compute_dtype="float32", threads=1)
    return DeepSpeedBackend(spec)


@pytest.fixture(scope="module", params=[2, 3], ids=["zero2", "zero3"])
def backend(request: pytest.FixtureRequest) -> Iterator[DeepSpeedBackend]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend_module, "RANK_CLASS", TARGET)
        backend = new_backend(request.param)
    yield backend
    backend.close()


@pytest.fixture
def delivery() -> Iterator[BroadcastDelivery]:
    delivery = BroadcastDelivery("127.0.0.1", CPU, timeout=20, bucket_bytes=100_000)
    yield delivery
    delivery.close()


@pytest.fixture
def replicas(delivery: BroadcastDelivery) -> Iterator[list[Any]]:
    replicas = [FakeReplica(name) for name in "ab"]
    yield replicas
    for replica in replicas:
        for worker in replica.workers:
            worker._leave_group("")


def deliver(delivery: BroadcastDelivery, replicas: list[Any], held: HeldWeights) -> list[Any]:
    request = LoadRequest((), held.manifest, "state", False, parts=held.parts)
    return asyncio.run(delivery.deliver(replicas, request, held, load_into))


def assert_arrived(delivery: BroadcastDelivery, replicas: list[Any], held: HeldWeights) -> None:
    outcomes = deliver(delivery, replicas, held)
    assert all(isinstance(outcome, LoadProof) for outcome in outcomes), outcomes
    for replica in replicas:
        assert [worker.got for worker in replica.workers] == [held.manifest] * 2


def take_step(trainer: DeepSpeedTrainer) -> None:
    trainer.update(some_samples(), CE, ADAMW, max_tokens=64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_weights_arrive_bit_by_bit_from_all_ranks(
    dtype: torch.dtype, backend: DeepSpeedBackend, delivery: BroadcastDelivery, replicas: list[Any], tiny_folder: Path
) -> None:
    trainer = backend.load(tiny_folder)
    reference = torch_trainer(tiny_folder).model.exported_weights()
    held = trainer.hold_weights(dtype=dtype)
    assert held.manifest == manifest_of((name, weight.detach().to(dtype)) for name, weight in reference)
    assert {rank for parts in held.parts.values() for rank, _, _ in parts} == {0, 1}
    assert_arrived(delivery, replicas, held)
    # The engine's process is no member: the group has the ranks and the workers.
    assert delivery.group is not None and delivery.group.size == 2 + 4
    assert delivery._engine_sender.member is None


def test_what_arrives_has_the_digests_that_are_committed(
    backend: DeepSpeedBackend, delivery: BroadcastDelivery, replicas: list[Any], tiny_folder: Path
) -> None:
    """And the trainer may go on meanwhile: what was held is what arrives, by one group for all syncs."""
    trainer = backend.load(tiny_folder)
    groups = set()
    for _ in range(2):
        take_step(trainer)
        _, committed = trainer.weights_digest()
        held = trainer.hold_weights(dtype=torch.float32)
        training = threading.Thread(target=take_step, args=(trainer,))
        training.start()
        assert_arrived(delivery, replicas, held)
        training.join()
        # A tied embedding is committed under the name of the head.
        assert {digest for _, _, digest in held.manifest.values()} <= set(committed.values())
        assert committed != trainer.weights_digest()[1]
        groups.add(delivery.group)
        held.close()
    assert len(groups) == 1 and [replica.joins for replica in replicas] == [1, 1]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught_and_the_next_sync_works(
    fault: str, backend: DeepSpeedBackend, delivery: BroadcastDelivery, replicas: list[Any], tiny_folder: Path
) -> None:
    trainer = backend.load(tiny_folder)
    older = trainer.hold_weights(dtype=torch.bfloat16)
    take_step(trainer)
    held, again = (trainer.hold_weights(dtype=torch.bfloat16) for _ in range(2))
    backend.group.call("spoil_held", held.number, fault, older.number)
    deliver(delivery, replicas, held)
    for replica in replicas:
        for worker in replica.workers:
            wrong = {name for name, entry in held.manifest.items() if worker.got.get(name) != entry}
            assert wrong, f"{fault} was not noticed"
    assert_arrived(delivery, replicas, again)


def test_a_replica_that_dies_in_the_middle_costs_the_others_nothing(
    backend: DeepSpeedBackend, delivery: BroadcastDelivery, replicas: list[Any], tiny_folder: Path
) -> None:
    held = backend.load(tiny_folder).hold_weights(dtype=torch.bfloat16)
    assert_arrived(delivery, replicas, held)
    replicas[0].dies_in = "ostinato_load"
    assert [type(outcome) for outcome in deliver(delivery, replicas, held)] == [WorkerDied, LoadProof]
    assert_arrived(delivery, replicas, held)


def test_a_rank_that_is_killed_in_the_middle_is_a_transient_error(
    backend: DeepSpeedBackend, delivery: BroadcastDelivery, replicas: list[Any], tiny_folder: Path
) -> None:
    trainer = backend.load(tiny_folder)
    held = trainer.hold_weights(dtype=torch.bfloat16)
    backend.group.call("spoil_held", held.number, "dies", held.number)
    began = time.monotonic()
    with pytest.raises(WorkerDied, match="the ranks ended"):
        deliver(delivery, replicas, held)
    assert time.monotonic() - began < 60 and not trainer.alive
    with pytest.raises(WorkerDied):
        deliver(delivery, replicas, held)  # what they held is gone, too
    held.close()
    # the next call starts the ranks again
    assert_arrived(delivery, replicas, backend.load(tiny_folder).hold_weights(dtype=torch.bfloat16))


def test_a_rank_that_hangs_in_the_middle_holds_nobody_up_for_ever(
    delivery: BroadcastDelivery, replicas: list[Any], tiny_folder: Path
) -> None:
    backend = new_backend(3, hang_seconds=60)
    try:
        held = backend.load(tiny_folder).hold_weights(dtype=torch.bfloat16)
        assert_arrived(delivery, replicas, held)
        os.kill(backend.group.pids[1], signal.SIGSTOP)
        began = time.monotonic()
        assert [type(outcome) for outcome in deliver(delivery, replicas, held)] == [SamplerOutOfSync] * 2
        # the timeout of an exchange, and then that of the rank
        assert time.monotonic() - began < 20 + 60 + 30
        assert_arrived(delivery, replicas, backend.load(tiny_folder).hold_weights(dtype=torch.bfloat16))
    finally:
        backend.close()


def test_weights_that_were_dropped_are_not_sent(
    backend: DeepSpeedBackend, delivery: BroadcastDelivery, replicas: list[Any], tiny_folder: Path
) -> None:
    trainer = backend.load(tiny_folder)
    held = trainer.hold_weights(dtype=torch.bfloat16)
    held.close()
    trainer.weights_digest()  # any call frees what was dropped
    assert [type(outcome) for outcome in deliver(delivery, replicas, held)] == [SamplerOutOfSync] * 2


@pytest.mark.parametrize("dora", [False, True], ids=["base", "merged"])
def test_the_base_of_an_adapter_or_the_merged_weights_arrive(
    dora: bool,
    backend: DeepSpeedBackend,
    delivery: BroadcastDelivery,
    replicas: list[Any],
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    base = backend.load_base(tiny_folder)
    trainer = backend.adapter(base, LoraSpec(rank=2, use_dora=dora), init_seed=1)
    take_step(trainer)
    held = trainer.hold_weights(dtype=torch.float32)
    assert held.manifest == manifest_of_files(trainer.stage_weights(tmp_path / "staged", dtype=torch.float32))
    assert_arrived(delivery, replicas, held)


def test_the_ranks_are_in_the_groups_of_several_pools() -> None:
    """Each sync goes to its own group, and a pool that closes leaves the others their groups."""
    calls: list[tuple[Any, ...]] = []

    class Ranks:
        alive, start_number, size = True, 1, 1

        def call_beside(self, method: str, *arguments: Any, lane: str) -> dict[int, str]:
            calls.append((method, *arguments))
            return {0: ""}

    senders = RankSenders(cast(RankGroup, Ranks()), 1)
    for name in ("a", "b"):
        senders.join(BroadcastGroup(name, "127.0.0.1", 1, 2, "gloo", 1.0))
    senders.send(HeldWeights(senders, 7, {}, {}, lambda: None), {}, "a")
    assert calls[-1] == ("send_weights", 7, "a")
    senders.leave("a", "the pool closes")
    assert not senders.is_in("a") and senders.is_in("b")
