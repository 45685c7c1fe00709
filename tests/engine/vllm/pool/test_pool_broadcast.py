"""Two vLLM replicas that take weights by a broadcast: every gate of a sync holds, with faults planted on the way."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.protocol import sync
from engine.backends.replicas import delivery
from engine.backends.torch.backend import TorchBackend
from engine.backends.vllm.backend import VllmSamplers
from engine.cluster.connection import Cluster
from engine.errors import SamplerOutOfSync
from engine.specs.adapters import LoraSpec
from tests.engine.vllm.gating import (
    LAYER,
    PARAMS,
    assert_drawn_from,
    assert_recovers,
    assert_refused,
    draw,
    move,
    spec_of,
)
from tests.engine.vllm.planted import PLANTED
from tests.engine.vllm.pools import WeightFiles, call, core_of, load, until

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SPEC = spec_of(replicas=2, transport="nccl", sync_seconds=30, answer_seconds=60, start_seconds=300)
ONE, OTHER = LAYER + "self_attn.o_proj.weight", "model.layers.2.self_attn.o_proj.weight"
"""Of one shape."""
Pairs = Iterator[tuple[str, Tensor]]


@pytest.fixture(scope="module")
def backend(cluster: Cluster) -> Iterator[Any]:
    backend = VllmSamplers(SPEC, compute_dtype=torch.float32, device=torch.device("cpu"), extension=PLANTED)
    yield backend
    backend.close()


@pytest.fixture
def sampler(backend: Any, trainer: Any) -> Iterator[Any]:
    """Two replicas hold state-0; the trainer has gone on to other weights."""
    sampler = backend.new_sampler(trainer)
    pool = sampler._shared.ensure_running()
    until(lambda: all(replica.phase == "up" for replica in pool.replicas))
    sync(sampler, trainer, "state-0")
    assert [replica.loaded_state for replica in pool.replicas] == ["state-0"] * 2
    move(trainer)
    yield sampler
    sampler.close()


def plant(monkeypatch: pytest.MonkeyPatch, change: Callable[[Pairs], Pairs]) -> None:
    """Changes what the engine's process sends; what it said that it would send stays as it was."""
    honest = delivery._named_tensors
    monkeypatch.setattr(delivery, "_named_tensors", lambda source, manifest: change(honest(source, manifest)))


def test_after_every_sync_it_samples_from_the_trainers_weights_by_one_group(sampler: Any, trainer: Any) -> None:
    pool, seen = sampler._shared.ensure_running(), []
    group = pool._delivery.group
    for number in range(3):
        sync(sampler, trainer, f"state-{number}")
        drawn = draw(sampler)
        assert_drawn_from(trainer, drawn)
        assert sampler.load_proof.tensors == len(list(trainer.model.exported_weights()))
        seen.append(str(drawn))
        move(trainer, seed=number)
    assert len(set(seen)) == 3 and group is not None and pool._delivery.group is group


def test_files_are_sent_too(sampler: Any, trainer: Any, weights: list[WeightFiles]) -> None:
    """What a trainer of other processes staged."""
    pool = sampler._shared.ensure_running()
    load(pool, weights[1])
    assert [replica.loaded_state for replica in pool.replicas] == ["state-1"] * 2
    pool.check("state-1", full=True)


def test_a_tensor_that_stays_as_it_was(sampler: Any, trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    old = torch.zeros_like(dict(trainer.model.exported_weights())[ONE])
    plant(monkeypatch, lambda pairs: ((name, old if name == ONE else tensor) for name, tensor in pairs))
    assert_refused(sampler, trainer, f"tensor {ONE} arrived with other bytes")
    assert_recovers(sampler, trainer, monkeypatch)


def test_two_tensors_of_one_shape_swapped(sampler: Any, trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weights_by_name = dict(trainer.model.exported_weights())
    swapped = {ONE: weights_by_name[OTHER], OTHER: weights_by_name[ONE]}
    plant(monkeypatch, lambda pairs: ((name, swapped.get(name, tensor)) for name, tensor in pairs))
    assert_refused(sampler, trainer, f"tensor ({ONE}|{OTHER}) arrived with other bytes")
    assert_recovers(sampler, trainer, monkeypatch)


def test_half_of_the_replicas_only_acknowledge(
    sampler: Any, trainer: Any, monkeypatch: pytest.MonkeyPatch, faults: Path
) -> None:
    (faults / "replica-1").touch()
    try:
        assert_refused(sampler, trainer, "replica-1.* is not what the live model computes with")
    finally:
        (faults / "replica-1").unlink()
    assert_recovers(sampler, trainer, monkeypatch)


def test_weights_that_change_after_the_sync(sampler: Any, trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sync(sampler, trainer, "state-1")
    pool = sampler._shared.ensure_running()
    for replica in pool.replicas:
        call(pool, replica, "rpc", "ostinato_check_and_spoil")
    with pytest.raises(SamplerOutOfSync, match=r"tensor model\.norm\.weight changed"):
        draw(sampler)
    assert sampler.loaded_state is None
    assert_recovers(sampler, trainer, monkeypatch)


def test_a_sender_that_fails_in_the_middle(sampler: Any, trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(pairs: Pairs) -> Pairs:
        for number, pair in enumerate(pairs):
            if number == 5:
                raise SamplerOutOfSync("the staged files went away")
            yield pair

    plant(monkeypatch, fail)
    assert_refused(sampler, trainer, "the staged files went away")
    assert_recovers(sampler, trainer, monkeypatch)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_a_receiver_that_is_gone_in_the_middle(
    sampler: Any, trainer: Any, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """The other replica gets everything at a second try; the next sync has both again."""
    pool = sampler._shared.ensure_running()
    lost, survivor = pool.replicas
    starts, victim, signalled = lost.starts, core_of(lost).pid, []

    # Send the signal to the receiver while the sixth tensor is on its way.
    def strike(pairs: Pairs) -> Pairs:
        for place, pair in enumerate(pairs):
            if place == 5 and not signalled:
                os.kill(victim, number)
                signalled.append(victim)
            yield pair

    plant(monkeypatch, strike)
    # The survivor has the weights and draws alone.
    sync(sampler, trainer, "state-1")
    assert signalled and (lost.loaded_state, survivor.loaded_state) == (None, "state-1")
    assert_drawn_from(trainer, draw(sampler))
    until(lambda: lost.starts > starts and lost.phase == "up")
    assert lost.loaded_state is None  # there are no files for it
    # The next weights reach both.
    move(trainer, seed=3)
    monkeypatch.undo()
    sync(sampler, trainer, "state-2")
    assert (lost.loaded_state, survivor.loaded_state) == ("state-2", "state-2")
    assert_drawn_from(trainer, draw(sampler))


def test_a_frozen_base_is_sent_again_when_a_replica_came_back_without_it(cluster: Cluster, tiny_folder: Path) -> None:
    backend = VllmSamplers(SPEC, compute_dtype=torch.float32, device=torch.device("cpu"))
    try:
        adapter = TorchBackend.adapter(
            TorchBackend(SPEC).load_base(tiny_folder, key="base"), LoraSpec(rank=4, alpha=6.0), init_seed=1
        )
        move(adapter)
        sampler = backend.new_sampler(adapter)
        sync(sampler, adapter, "state-0")
        loads = sampler._shared.loads
        assert_drawn_from(adapter, draw(sampler))
        move(adapter, seed=1)
        sync(sampler, adapter, "state-1")
        assert sampler._shared.loads == loads
        lost = sampler._shared.ensure_running().replicas[1]
        starts = lost.starts
        core_of(lost).kill()
        until(lambda: lost.starts > starts and lost.phase == "up")
        assert lost.loaded_state is None
        sync(sampler, adapter, "state-2")
        assert lost.loaded_state == sampler._shared.loaded and lost.adapters
        assert_drawn_from(adapter, draw(sampler))
    finally:
        backend.close()


def test_a_replica_that_joins_gets_the_next_broadcast_and_one_that_left_does_not(sampler: Any, trainer: Any) -> None:
    pool = sampler._shared.ensure_running()
    pool.scale(3)
    until(lambda: len(pool.replicas) == 3 and all(replica.phase == "up" for replica in pool.replicas))
    # Until then the others sample. Nothing was broadcast to it yet.
    joined = pool.replicas[2]
    sampler.sample([[10], [11]], [1, 2], PARAMS)
    assert joined.loaded_state is None
    sync(sampler, trainer, "state-1")
    assert [replica.loaded_state for replica in pool.replicas] == ["state-1"] * 3
    assert_drawn_from(trainer, draw(sampler))
    first = pool._delivery.group
    pool.scale(2)
    until(lambda: len(pool.replicas) == 2)
    move(trainer)
    sync(sampler, trainer, "state-2")
    assert [replica.loaded_state for replica in pool.replicas] == ["state-2"] * 2
    assert pool._delivery.group is not first and pool._delivery.group.size == first.size - 1
    assert_drawn_from(trainer, draw(sampler))
