"""Tests that an engine rebuilds the weights of any committed policy to the byte, from a checkpoint and redone steps."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.torch.backend import TorchBackend
from engine.local.engine import LocalEngine
from engine.protocol import LogprobsRequest, PolicySpec, TokenSequence
from engine.specs.engine import LocalEngineSpec
from storage.chain.records import Chain, Root
from storage.store.objects import ObjectStore
from tests.engine.local.rebuilding import (
    STEPS,
    committed_digest,
    new_materialiser,
    rebuilt_digest,
    redone_steps,
    restored_steps,
)
from tests.fixtures.engines import (
    DETERMINISTIC,
    PROVENANCE,
    commit_batch,
    new_policy,
    request_after,
)
from tests.fixtures.worklog import events

SCORED = TokenSequence([10, 11, 12, 20, 21], [0.0, 0.0, 0.0, 1.0, 1.0])


# -- rebuilding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checkpoint", "redo"), [(None, [1, 2, 3]), (0, [1, 2, 3]), (2, [3]), (3, [])], ids=["none", "0", "k-1", "k"]
)
async def test_a_fresh_engine_rebuilds_the_head(
    engine: LocalEngine, chain: Chain, store: ObjectStore, worklog: Path, checkpoint: int | None, redo: list[int]
) -> None:
    if checkpoint is not None:
        await engine.save_checkpoint(chain.policy(checkpoint), provenance=PROVENANCE)
        worklog.unlink()
    assert rebuilt_digest(new_materialiser(store), chain.head()) == committed_digest(chain, STEPS)
    assert restored_steps(worklog) == [checkpoint or 0]
    assert redone_steps(worklog) == redo


async def test_the_nearest_checkpoint_is_not_a_later_one(
    engine: LocalEngine, chain: Chain, store: ObjectStore, worklog: Path
) -> None:
    for step in (1, 3):
        await engine.save_checkpoint(chain.policy(step), provenance=PROVENANCE)
    worklog.unlink()
    assert rebuilt_digest(new_materialiser(store), chain.policy(2)) == committed_digest(chain, 2)
    assert (restored_steps(worklog), redone_steps(worklog)) == ([1], [2])


async def test_a_step_after_a_restore_is_the_step_that_was_not_interrupted(
    engine: LocalEngine, chain: Chain, store: ObjectStore, url: str, tiny_folder: Path
) -> None:
    """A restore reads the moments of AdamW together with the weights."""
    await engine.save_checkpoint(chain.head(), provenance=PROVENANCE)
    interrupted = LocalEngine(url, DETERMINISTIC)
    request = request_after(chain.head(), commit_batch(store, chain.head()))
    resumed = await interrupted.take_gradient_step(request)
    await interrupted.close()

    policy = await new_policy(engine, tiny_folder, run="uninterrupted")
    for record in [*chain.records(after=0, until=STEPS), resumed]:
        request = record.request.model_copy(update={"parent": policy})
        last = await engine.take_gradient_step(request)
        policy = last.policy
    assert last.weights_digest == resumed.weights_digest
    assert last.state == resumed.state


async def test_a_redo_packs_as_the_committed_step_did(chain: Chain, store: ObjectStore) -> None:
    """The engine's limit is smaller. Under that limit it would sum the gradient in another order."""
    materialiser = new_materialiser(store, max_tokens_per_forward=16)
    assert rebuilt_digest(materialiser, chain.head()) == committed_digest(chain, STEPS)


async def test_a_redo_computes_with_the_threads_of_the_committed_step(chain: Chain, store: ObjectStore) -> None:
    """threads="auto" depends on the load, and another number of threads gives other bits. A resume must not diverge."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert rebuilt_digest(new_materialiser(store, threads=2), chain.head()) == committed_digest(chain, STEPS)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_deterministic_engine_does_not_look_at_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = set()
    for load in (0.0, 100.0):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, load, load))
        chosen.add(TorchBackend(LocalEngineSpec(deterministic=True)).threads)
    assert len(chosen) == 1


async def test_a_second_stage_starts_from_the_first_with_fresh_moments(
    engine: LocalEngine, chain: Chain, store: ObjectStore
) -> None:
    head = chain.head()
    second = await engine.create_policy(
        PolicySpec(run="r", stage="1-s", model="policy", root=Root(start=head, base_digest=head.state))
    )
    record = await engine.take_gradient_step(request_after(second, commit_batch(store, second)))

    exported = await engine.export_model(head, "first-stage", provenance=PROVENANCE)
    root = Root(base=exported, base_digest=exported.sha256)
    other = await engine.create_policy(PolicySpec(run="other", stage="0-s", model="policy", root=root))
    expected = await engine.take_gradient_step(request_after(other, commit_batch(store, other)))
    assert record.weights_digest == expected.weights_digest

    assert rebuilt_digest(new_materialiser(store), record.policy) == record.weights_digest
    third = await engine.export_model(record.policy, "second-stage", provenance=PROVENANCE)
    assert "tokenizer.json" in {info.key.split("/")[-1] for info in store.list(f"{third.key}/")}


async def test_a_repeated_request_takes_no_second_step(
    engine: LocalEngine, chain: Chain, store: ObjectStore, worklog: Path
) -> None:
    request = request_after(chain.head(), commit_batch(store, chain.head()))
    for _ in range(2):
        await engine.take_gradient_step(request)
    assert [event["step"] for event in events(worklog, "step")] == [STEPS + 1]
    assert (restored_steps(worklog), redone_steps(worklog)) == ([], [])


# -- slots -----------------------------------------------------------------------------------------------------


async def test_reading_an_old_policy_does_not_move_the_training_slot(
    engine: LocalEngine, chain: Chain, store: ObjectStore, worklog: Path
) -> None:
    read = LogprobsRequest(chain.policy(1), [SCORED])
    first = await engine.logprobs(read)
    assert (restored_steps(worklog), redone_steps(worklog)) == ([0], [1])
    assert await engine.logprobs(read) == first
    assert await engine.logprobs(LogprobsRequest(chain.head(), [SCORED])) != first
    record = await engine.take_gradient_step(request_after(chain.head(), commit_batch(store, chain.head())))
    # Neither the second read nor the step rebuilt anything.
    assert (restored_steps(worklog), redone_steps(worklog)) == ([0], [1])
    assert rebuilt_digest(new_materialiser(store), record.policy) == record.weights_digest


async def test_the_least_recently_read_of_too_many_frozen_policies_is_dropped(
    chain: Chain, store: ObjectStore, worklog: Path
) -> None:
    materialiser = new_materialiser(store, frozen_policies=2)
    for step in (0, 1, 0, 2):  # 1 is the least recently read when 2 is loaded
        materialiser.for_reading(chain.policy(step))
    assert len(restored_steps(worklog)) == 3
    materialiser.for_reading(chain.policy(0))
    assert len(restored_steps(worklog)) == 3
    assert rebuilt_digest(materialiser, chain.policy(1)) == committed_digest(chain, 1)
    assert len(restored_steps(worklog)) == 4


async def test_going_forward_redoes_only_the_steps_between(chain: Chain, store: ObjectStore, worklog: Path) -> None:
    materialiser = new_materialiser(store)
    materialiser.for_training(chain.policy(1))
    assert materialiser.for_training(chain.head()).trainer.weights_digest()[0] == committed_digest(chain, STEPS)
    assert (restored_steps(worklog), redone_steps(worklog)) == ([0], [1, 2, 3])
    assert materialiser.for_training(chain.policy(2)).trainer.weights_digest()[0] == committed_digest(chain, 2)


async def test_an_old_policy_does_not_wait_for_the_upload_of_a_later_checkpoint(
    engine: LocalEngine, chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reference of a 70B model waited 43 minutes for a checkpoint that it cannot use."""
    saver, may_end = engine.saver, threading.Event()
    commit = saver._commit

    def slow_commit(*arguments: Any) -> Any:
        may_end.wait()
        return commit(*arguments)

    monkeypatch.setattr(saver, "_commit", slow_commit)
    await engine.begin_checkpoint(chain.head(), provenance=PROVENANCE)
    threading.Timer(5.0, may_end.set).start()
    try:
        await engine.logprobs(LogprobsRequest(chain.policy(1), [SCORED]))
        assert saver.pending_upload(chain.head()) is not None
    finally:
        may_end.set()
    # the head, which the checkpoint leads to, waits for it
    saver.wait_for_chain(chain.head())
    assert saver.pending_upload(chain.head()) is None
