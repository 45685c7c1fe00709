"""A chain of three steps, and engines that rebuild its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.backends.factory import create_sampler_backend
from engine.backends.torch.backend import TorchBackend
from engine.local.engine import LocalEngine
from engine.local.loaded_policies import LoadedPolicies
from engine.local.materialise import Materialiser
from engine.local.rebase import Rebaser
from engine.local.saving import Saver
from engine.specs.engine import LocalEngineSpec
from storage.chain.records import Chain, PolicyRef
from storage.store.objects import ObjectStore
from tests.fixtures.engines import (
    DETERMINISTIC,
    ROWS,
    commit_batch,
    new_policy,
    request_after,
    row,
)
from tests.fixtures.worklog import events

STEPS = 3


async def three_steps(engine: LocalEngine, folder: Path) -> Chain:
    """Three committed steps of different batches and rates."""
    store, policy = engine.store, await new_policy(engine, folder)
    for step in range(STEPS):
        rows = [*ROWS, row([70, 71], [80 + step])]
        request = request_after(policy, commit_batch(store, policy, rows), lr=1e-3 * (step + 1))
        policy = (await engine.take_gradient_step(request)).policy
    return Chain.of(store, policy)


def new_materialiser(store: ObjectStore, **changes: Any) -> Materialiser:
    """The materialiser of an engine that has just started. `changes` are changes of its spec."""
    spec = LocalEngineSpec(**(DETERMINISTIC.model_dump() | changes))
    policies = LoadedPolicies(
        budget=1 << 40, protection_seconds=0, max_frozen=spec.frozen_policies, save=lambda slot: None
    )
    backend = TorchBackend(spec)
    rebaser = Rebaser(store, backend, Saver(store), spec)
    return Materialiser(store, backend, create_sampler_backend(spec, backend), policies, rebaser=rebaser)


def rebuilt_digest(materialiser: Materialiser, policy: PolicyRef) -> str:
    """The digest of a policy's weights as the materialiser loads them."""
    return materialiser.for_reading(policy).trainer.weights_digest()[0]


def committed_digest(chain: Chain, step: int) -> str:
    record = chain.record(step)
    assert record is not None and record.weights_digest is not None
    return record.weights_digest


def redone_steps(worklog: Path) -> list[int]:
    """The steps that were computed again."""
    return [event["step"] for event in events(worklog, "redo")]


def restored_steps(worklog: Path) -> list[int]:
    """The steps whose checkpoints were read; 0 is the base model."""
    return [event["step"] for event in events(worklog, "restore")]
