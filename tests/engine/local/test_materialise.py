"""Weights are a cache of the chain: any committed policy is rebuilt to the byte, and what cannot be is said."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.factory import create_sampler_backend
from engine.backends.torch.backend import TorchBackend
from engine.errors import NonFiniteGradient, ReplayDiverged
from engine.local.engine import LocalEngine
from engine.local.loaded_policies import LoadedPolicies
from engine.local.materialise import Materialiser
from engine.local.rebase import Rebaser
from engine.local.saving import Saver
from engine.protocol import LogprobsRequest, PolicySpec, TokenSequence
from engine.specs.engine import LocalEngineSpec
from storage.chain.records import Chain, CommitRecord, MinibatchPlan, PolicyRef, Root
from storage.errors import CorruptArtifact
from storage.store import keys
from storage.store.artifacts import read_manifest
from storage.store.objects import ObjectStore, open_store
from tests.fixtures.engines import (
    DETERMINISTIC,
    PROVENANCE,
    ROWS,
    commit_batch,
    events,
    new_policy,
    request_after,
    row,
)

STEPS = 3
SCORED = TokenSequence([10, 11, 12, 20, 21], [0.0, 0.0, 0.0, 1.0, 1.0])
GRPO = {"kind": "grpo", "kl_beta": 0.0}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture
def store(url: str) -> ObjectStore:
    return open_store(url)


@pytest.fixture
async def engine(url: str) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(url, DETERMINISTIC)
    yield engine
    await engine.close()


@pytest.fixture
def worklog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OSTINATO_WORKLOG", str(tmp_path / "work.jsonl"))
    return tmp_path / "work.jsonl"


@pytest.fixture
async def chain(engine: LocalEngine, store: ObjectStore, tiny_folder: Path, worklog: Path) -> Chain:
    """Three committed steps of different batches and rates."""
    policy = await new_policy(engine, tiny_folder)
    for step in range(STEPS):
        rows = [*ROWS, row([70, 71], [80 + step])]
        request = request_after(policy, commit_batch(store, policy, rows), lr=1e-3 * (step + 1))
        policy = (await engine.take_gradient_step(request)).policy
    worklog.unlink()
    return Chain.of(store, policy)


def fresh(store: ObjectStore, **changes: Any) -> Materialiser:
    """The slots of an engine that was just started."""
    spec = LocalEngineSpec(**(DETERMINISTIC.model_dump() | changes))
    slots = LoadedPolicies(budget=1 << 40, residency=0, frozen=spec.frozen_policies, save=lambda slot: None)
    backend = TorchBackend(spec)
    rebaser = Rebaser(store, backend, Saver(store), spec)
    return Materialiser(store, backend, create_sampler_backend(spec, backend), slots, rebaser=rebaser)


def weights(slots: Materialiser, policy: PolicyRef) -> str:
    return slots.for_reading(policy).trainer.weights_digest()[0]


def committed(chain: Chain, step: int) -> str:
    record = chain.record(step)
    assert record is not None and record.weights_digest is not None
    return record.weights_digest


def redone(worklog: Path) -> list[int]:
    return [event["step"] for event in events(worklog, "redo")]


def restored(worklog: Path) -> list[int]:
    return [event["step"] for event in events(worklog, "restore")]


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
    assert weights(fresh(store), chain.head()) == committed(chain, STEPS)
    assert restored(worklog) == [checkpoint or 0]
    assert redone(worklog) == redo


async def test_the_nearest_checkpoint_is_not_a_later_one(
    engine: LocalEngine, chain: Chain, store: ObjectStore, worklog: Path
) -> None:
    for step in (1, 3):
        await engine.save_checkpoint(chain.policy(step), provenance=PROVENANCE)
    worklog.unlink()
    assert weights(fresh(store), chain.policy(2)) == committed(chain, 2)
    assert (restored(worklog), redone(worklog)) == ([1], [2])


async def test_a_step_after_a_restore_is_the_step_that_was_not_interrupted(
    engine: LocalEngine, chain: Chain, store: ObjectStore, url: str, tiny_folder: Path
) -> None:
    """The moments of AdamW come back with the weights."""
    await engine.save_checkpoint(chain.head(), provenance=PROVENANCE)
    interrupted = LocalEngine(url, DETERMINISTIC)
    request = request_after(chain.head(), commit_batch(store, chain.head()))
    found = await interrupted.take_gradient_step(request)
    await interrupted.close()

    policy = await new_policy(engine, tiny_folder, run="uninterrupted")
    for record in [*chain.records(after=0, until=STEPS), found]:
        again = record.request.model_copy(update={"parent": policy})
        last = await engine.take_gradient_step(again)
        policy = last.policy
    assert last.weights_digest == found.weights_digest
    assert last.state == found.state


async def test_a_redo_packs_as_the_committed_step_did(chain: Chain, store: ObjectStore) -> None:
    """The engine's own limit is smaller: with it the gradient would be summed in another order."""
    assert weights(fresh(store, max_tokens_per_forward=16), chain.head()) == committed(chain, STEPS)


async def test_a_redo_computes_with_the_threads_of_the_committed_step(chain: Chain, store: ObjectStore) -> None:
    """threads="auto" looks at the load, and another count gives other bits: a resume must not diverge for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert weights(fresh(store, threads=2), chain.head()) == committed(chain, STEPS)
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
    found = await engine.take_gradient_step(request_after(second, commit_batch(store, second)))

    exported = await engine.export_model(head, "first-stage", provenance=PROVENANCE)
    root = Root(base=exported, base_digest=exported.sha256)
    other = await engine.create_policy(PolicySpec(run="other", stage="0-s", model="policy", root=root))
    expected = await engine.take_gradient_step(request_after(other, commit_batch(store, other)))
    assert found.weights_digest == expected.weights_digest

    assert weights(fresh(store), found.policy) == found.weights_digest
    third = await engine.export_model(found.policy, "second-stage", provenance=PROVENANCE)
    assert "tokenizer.json" in {info.key.split("/")[-1] for info in store.list(f"{third.key}/")}


async def test_a_request_that_was_answered_costs_no_second_step(
    engine: LocalEngine, chain: Chain, store: ObjectStore, worklog: Path
) -> None:
    request = request_after(chain.head(), commit_batch(store, chain.head()))
    for _ in range(2):
        await engine.take_gradient_step(request)
    assert [event["step"] for event in events(worklog, "step")] == [STEPS + 1]
    assert (restored(worklog), redone(worklog)) == ([], [])


# -- what was altered ------------------------------------------------------------------------------------------


def rewrite(chain: Chain, step: int, change: Callable[[dict[str, Any]], None]) -> CommitRecord:
    """Alters a committed record and returns it as it was."""
    record = chain.record(step)
    assert record is not None
    body = record.model_dump(mode="json")
    change(body)
    chain.store.put(keys.chain_record(chain.run, chain.stage, chain.model, step), json.dumps(body).encode())
    return record


async def test_another_committed_digest_is_a_divergence_and_the_slot_is_dropped(
    chain: Chain, store: ObjectStore, worklog: Path
) -> None:
    true = rewrite(chain, 2, lambda body: body.update(weights_digest="0" * 64))
    slots = fresh(store)
    with pytest.raises(ReplayDiverged, match=r"step 2 gave weights .*000000000000"):
        slots.for_training(chain.head())
    assert redone(worklog) == [1, 2]

    chain.store.put(keys.chain_record(chain.run, chain.stage, chain.model, 2), true.model_dump_json().encode())
    worklog.unlink()
    assert weights(slots, chain.head()) == committed(chain, STEPS)
    assert (restored(worklog), redone(worklog)) == ([0], [1, 2, 3])  # nothing of the diverged copy was kept


async def test_a_divergence_on_the_way_forward_drops_the_slot_that_was_there(
    chain: Chain, store: ObjectStore, worklog: Path
) -> None:
    slots = fresh(store)
    slots.for_training(chain.policy(1))
    true = rewrite(chain, 2, lambda body: body.update(weights_digest="0" * 64))
    with pytest.raises(ReplayDiverged):
        slots.for_training(chain.head())
    chain.store.put(keys.chain_record(chain.run, chain.stage, chain.model, 2), true.model_dump_json().encode())
    worklog.unlink()
    assert slots.for_training(chain.policy(1)).trainer.weights_digest()[0] == committed(chain, 1)
    assert restored(worklog) == [0]


async def test_a_divergence_on_the_way_back_drops_the_slot_that_was_there(
    engine: LocalEngine, chain: Chain, store: ObjectStore, worklog: Path
) -> None:
    """The restored weights lie in the memory of the slot that went on: it must not pass for the head any more."""
    await engine.save_checkpoint(chain.policy(1), provenance=PROVENANCE)
    slots = fresh(store)
    slots.for_training(chain.head())
    true = rewrite(chain, 2, lambda body: body.update(weights_digest="0" * 64))
    with pytest.raises(ReplayDiverged):
        slots.for_training(chain.policy(2))
    chain.store.put(keys.chain_record(chain.run, chain.stage, chain.model, 2), true.model_dump_json().encode())
    assert weights(slots, chain.head()) == committed(chain, STEPS)


async def test_an_altered_request_breaks_the_chain(chain: Chain, store: ObjectStore) -> None:
    rewrite(chain, 2, lambda body: body["request"]["optimizer"].update(lr=0.5))
    with pytest.raises(CorruptArtifact, match="broken at step 2"):
        fresh(store).for_training(chain.head())


async def test_a_missing_record_breaks_the_chain(chain: Chain, store: ObjectStore) -> None:
    store.delete(keys.chain_record(chain.run, chain.stage, chain.model, 2))
    with pytest.raises(CorruptArtifact, match=r"broken at step 2.*missing"):
        fresh(store).for_training(chain.head())


async def test_an_altered_batch_is_corrupt(chain: Chain, store: ObjectStore) -> None:
    record = chain.record(2)
    assert record is not None
    (data,) = [i.key for i in store.list(record.request.batch.key) if i.key.endswith(".parquet")]
    store.put(data, store.get(data)[:-1] + b"\0")
    slots = fresh(store)
    with pytest.raises(CorruptArtifact, match=data.rsplit("/", 1)[1]):
        slots.for_training(chain.head())
    assert weights(slots, chain.policy(1)) == committed(chain, 1)


@pytest.mark.parametrize("damage", ["a flipped byte", "no data", "a manifest that is no manifest"])
async def test_a_checkpoint_that_cannot_be_read_is_passed_over(
    engine: LocalEngine, chain: Chain, store: ObjectStore, worklog: Path, damage: str
) -> None:
    for step in (1, 2):
        await engine.save_checkpoint(chain.policy(step), provenance=PROVENANCE)
    manifest = read_manifest(store, keys.checkpoint(chain.run, chain.stage, chain.model, 2))
    if damage == "a flipped byte":
        store.put(manifest.files[0].key, store.get(manifest.files[0].key)[:-1] + b"\7")
    elif damage == "no data":
        store.delete(manifest.files[0].key)
    else:
        store.put(keys.manifest_of_files(manifest.key), b"{")
    worklog.unlink()
    assert weights(fresh(store), chain.head()) == committed(chain, STEPS)
    assert (restored(worklog), redone(worklog)) == ([1], [2, 3])


# -- slots -----------------------------------------------------------------------------------------------------


async def test_reading_an_old_policy_leaves_the_training_slot_where_it_is(
    engine: LocalEngine, chain: Chain, store: ObjectStore, worklog: Path
) -> None:
    read = LogprobsRequest(chain.policy(1), [SCORED])
    first = await engine.logprobs(read)
    assert (restored(worklog), redone(worklog)) == ([0], [1])
    assert await engine.logprobs(read) == first
    assert await engine.logprobs(LogprobsRequest(chain.head(), [SCORED])) != first
    record = await engine.take_gradient_step(request_after(chain.head(), commit_batch(store, chain.head())))
    assert (restored(worklog), redone(worklog)) == ([0], [1])  # neither the second read nor the step rebuilt anything
    assert weights(fresh(store), record.policy) == record.weights_digest


async def test_frozen_policies_are_bounded_and_the_longest_unread_goes(
    chain: Chain, store: ObjectStore, worklog: Path
) -> None:
    slots = fresh(store, frozen_policies=2)
    for step in (0, 1, 0, 2):  # 1 is the one unread for longest when 2 comes
        slots.for_reading(chain.policy(step))
    assert len(restored(worklog)) == 3
    slots.for_reading(chain.policy(0))
    assert len(restored(worklog)) == 3
    assert weights(slots, chain.policy(1)) == committed(chain, 1)
    assert len(restored(worklog)) == 4


async def test_going_forward_redoes_only_the_steps_between(chain: Chain, store: ObjectStore, worklog: Path) -> None:
    slots = fresh(store)
    slots.for_training(chain.policy(1))
    assert slots.for_training(chain.head()).trainer.weights_digest()[0] == committed(chain, STEPS)
    assert (restored(worklog), redone(worklog)) == ([0], [1, 2, 3])
    assert slots.for_training(chain.policy(2)).trainer.weights_digest()[0] == committed(chain, 2)  # and back


# -- steps that fail -------------------------------------------------------------------------------------------

POISONED = [row([1, 2], [3, 4], advantages=1, old_logprobs=-5), row([1, 2], [5], advantages=math.inf, old_logprobs=-5)]


async def clean_step(engine: LocalEngine, store: ObjectStore, chain: Chain) -> CommitRecord:
    """A good step after the head; its weights are checked against a redo by a fresh engine."""
    record = await engine.take_gradient_step(request_after(chain.head(), commit_batch(store, chain.head(), shard=9)))
    assert weights(fresh(store), record.policy) == record.weights_digest
    return record


async def test_a_step_that_is_not_finite_commits_nothing_and_names_its_batch(
    engine: LocalEngine, chain: Chain, store: ObjectStore
) -> None:
    batch = commit_batch(store, chain.head(), POISONED)
    with pytest.raises(NonFiniteGradient, match=batch.key):
        await engine.take_gradient_step(request_after(chain.head(), batch, loss=GRPO))
    assert list(chain.steps()) == [1, 2, 3]
    await clean_step(engine, store, chain)


async def test_a_step_that_dies_between_two_updates_leaves_no_moved_weights(
    engine: LocalEngine, chain: Chain, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, calls = torch.optim.AdamW.step, 0

    def second_update_fails(self: torch.optim.AdamW, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("the device went away")
        return honest(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", second_update_fails)
    two_updates = request_after(
        chain.head(), commit_batch(store, chain.head()), lr=0.1, minibatches=MinibatchPlan(size=2)
    )
    with pytest.raises(RuntimeError, match="the device went away"):
        await engine.take_gradient_step(two_updates)
    assert list(chain.steps()) == [1, 2, 3]
    await clean_step(engine, store, chain)


async def test_an_update_that_is_not_finite_is_skipped_and_counted_when_asked(
    engine: LocalEngine, chain: Chain, store: ObjectStore
) -> None:
    request = request_after(
        chain.head(),
        commit_batch(store, chain.head(), POISONED),
        loss=GRPO,
        nan_policy="skip",
        minibatches=MinibatchPlan(size=1),
    )
    record = await engine.take_gradient_step(request)
    assert (record.updates, record.skipped) == (1, 1)
    assert record.metrics["grad_norm"] > 0  # of the update that was made; the other one has none
    assert record.weights_digest != committed(chain, STEPS)
    assert weights(fresh(store), record.policy) == record.weights_digest  # a redo skips the same update


async def test_a_step_of_which_all_was_skipped_keeps_the_weights(
    engine: LocalEngine, chain: Chain, store: ObjectStore
) -> None:
    batch = commit_batch(store, chain.head(), POISONED)
    record = await engine.take_gradient_step(request_after(chain.head(), batch, loss=GRPO, nan_policy="skip"))
    assert (record.updates, record.skipped) == (0, 1)
    assert record.weights_digest == committed(chain, STEPS)
    assert record.policy.step == STEPS + 1
