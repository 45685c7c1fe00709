"""Tests of steps that fail or are not finite: they commit nothing, or skip an update and count it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine.errors import BadSpec, Fenced, NonFiniteGradient
from engine.local.apply import apply_request
from engine.local.engine import LocalEngine
from storage.chain.leases import acquire_lease
from storage.chain.records import Chain, CommitRecord, MinibatchPlan
from storage.store.objects import ObjectStore
from tests.engine.local.rebuilding import (
    STEPS,
    committed_digest,
    new_materialiser,
    rebuilt_digest,
)
from tests.fixtures.engines import (
    commit_batch,
    request_after,
    row,
)

GRPO = {"kind": "grpo", "kl_beta": 0.0}
POISONED = [row([1, 2], [3, 4], advantages=1, old_logprobs=-5), row([1, 2], [5], advantages=math.inf, old_logprobs=-5)]

async def clean_step(engine: LocalEngine, store: ObjectStore, chain: Chain) -> CommitRecord:
    """A good step after the head; its weights are checked against a redo by a fresh engine."""
    record = await engine.take_gradient_step(request_after(chain.head(), commit_batch(store, chain.head(), shard=9)))
    assert rebuilt_digest(new_materialiser(store), record.policy) == record.weights_digest
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
    engine: LocalEngine, chain: Chain, store: ObjectStore, caplog: pytest.LogCaptureFixture
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
    (skipped,) = record.skipped_updates
    assert skipped.update in (1, 2) and skipped.row == 1 and skipped.grad_norm in ("inf", "nan")
    assert record.request.batch.key in caplog.text and str(skipped) in caplog.text
    assert record.metrics["grad_norm"] > 0  # of the update that was not skipped
    assert record.weights_digest != committed_digest(chain, STEPS)
    # A redo skips the same update.
    assert rebuilt_digest(new_materialiser(store), record.policy) == record.weights_digest


async def test_a_step_of_which_all_was_skipped_keeps_the_weights(
    engine: LocalEngine, chain: Chain, store: ObjectStore
) -> None:
    batch = commit_batch(store, chain.head(), POISONED)
    record = await engine.take_gradient_step(request_after(chain.head(), batch, loss=GRPO, nan_policy="skip"))
    assert (record.updates, record.skipped) == (0, 1)
    assert record.weights_digest == committed_digest(chain, STEPS)
    assert record.policy.step == STEPS + 1
    assert "skipped_updates" not in chain.committed_record(STEPS).model_dump()  # records of other steps stay equal


async def test_a_lease_taken_over_during_the_gradient_stops_the_commit(
    engine: LocalEngine, chain: Chain, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, request = chain.run, request_after(chain.head(), commit_batch(store, chain.head(), shard=1))
    mine = acquire_lease(store, run, {})

    def take_over(place: str) -> None:
        if place == "step.before_commit":
            acquire_lease(store, run, {"who": "a successor"})

    with monkeypatch.context() as patch:
        patch.setattr("engine.local.engine.failpoint", take_over)
        with pytest.raises(Fenced, match=f"epoch {mine}, but epoch {mine + 1} has taken over"):
            await engine.take_gradient_step(request, epoch=mine)
    assert list(chain.steps()) == [1, 2, 3]
    # the successor takes the step, from weights that the fenced gradient did not touch
    record = await engine.take_gradient_step(request, epoch=mine + 1)
    assert rebuilt_digest(new_materialiser(store), record.policy) == record.weights_digest


@pytest.mark.parametrize("limits", [(64,), (64, 64, 64)])
async def test_recorded_limits_of_another_number_of_updates_drop_none(
    engine: LocalEngine, chain: Chain, store: ObjectStore, limits: tuple[int, ...]
) -> None:
    request = request_after(
        chain.head(), commit_batch(store, chain.head()), minibatches=MinibatchPlan(epochs=2)
    )
    trainer = engine.materialiser.for_training(chain.head()).trainer
    with pytest.raises(BadSpec, match=f"makes 2 updates, and its record has the token limits of {len(limits)}"):
        apply_request(trainer, request, store, max_tokens=limits)
    assert apply_request(trainer, request, store, max_tokens=(64, 64)).updates == 2
