"""Engines under different numerics, and what the tests of rebases read from a chain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.local.engine import LocalEngine
from engine.protocol import GenerateRequest, SamplingParams
from engine.specs.engine import LocalEngineSpec
from storage.chain.rebase import Rebase, rebases_in_effect
from storage.chain.records import Chain, CommitRecord, PolicyRef
from storage.inspect.audit import audit_store
from storage.store.objects import ObjectStore
from tests.fixtures.engines import commit_batch, new_policy, request_after

SINGLE = LocalEngineSpec(compute_dtype="float32", threads=1)
DOUBLE = SINGLE.model_copy(update={"compute_dtype": "float64"})
"""Numerics that give other bits: master weights and moments are in float64."""
STEPS = 3


class OtherVersions(LocalEngine):
    """An engine that computes the same bits and reports another version of torch."""

    def __init__(self, url: str, spec: LocalEngineSpec = SINGLE) -> None:
        super().__init__(url, spec)
        numerics = self.backend.numerics()
        other = numerics.model_copy(update={"versions": numerics.versions | {"torch": "99.0"}})
        self.backend.numerics = lambda: other  # type: ignore[method-assign]


class Nudged(LocalEngine):
    """An engine whose numerics multiply every redone weight by 1 + `by`. Another device changes them a
    million times less."""

    def __init__(self, url: str, by: float) -> None:
        super().__init__(url, SINGLE)
        other = self.backend.numerics().model_copy(update={"device": f"nudged by {by}"})
        self.backend.numerics = lambda: other  # type: ignore[method-assign]
        redo = self.materialiser.redo

        def nudge(slot: Any, record: CommitRecord) -> None:
            redo(slot, record)
            for _, tensor in slot.trainer.model.named_weights():
                tensor.data.mul_(1 + by)

        self.materialiser.redo = nudge  # type: ignore[method-assign]


async def three_single_steps(url: str, folder: Path) -> Chain:
    """Three steps under SINGLE, by an engine that has ended without a checkpoint."""
    engine = LocalEngine(url, SINGLE)
    policy = await new_policy(engine, folder)
    for _ in range(STEPS):
        policy = (await step(engine, policy)).policy
    await engine.close(checkpoint=False)
    return Chain.of(engine.store, policy)


async def step(engine: LocalEngine, parent: PolicyRef) -> CommitRecord:
    """The step after `parent`."""
    return await engine.take_gradient_step(request_after(parent, commit_batch(engine.store, parent), lr=0.01))


async def read(engine: LocalEngine, policy: PolicyRef) -> None:
    """Samples two tokens from the policy."""
    await engine.generate(
        GenerateRequest(policy=policy, prompts=[[1, 2]], seeds=[0], sampling=SamplingParams(max_new_tokens=2))
    )


def loaded_digest(engine: LocalEngine, policy: PolicyRef) -> str:
    """The digest of the weights that the engine holds for training."""
    slot = engine.loaded_policies.training_policy_of(policy)
    assert slot is not None and slot.policy == policy
    return slot.trainer.weights_digest()[0]


def record_of(chain: Chain, step: int) -> CommitRecord:
    record = chain.record(step)
    assert record is not None
    return record


def only_rebase(chain: Chain) -> Rebase:
    """The rebase in effect, of which there must be one."""
    (rebase,) = rebases_in_effect(chain)
    return rebase


def has_no_problems(store: ObjectStore) -> bool:
    """Whether the audit of the store accepts it."""
    return audit_store(store).problems == ()
