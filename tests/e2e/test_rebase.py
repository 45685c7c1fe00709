"""Tests of a chain that moves between torch x 1 and DeepSpeed ZeRO-3 x 2. Weights and moments keep their bytes, the
chain records each move, and a verification redoes each part under its own numerics."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.local.engine import LocalEngine
from engine.local.loaded_policies import LoadedPolicy
from engine.local.verify import verify_run
from engine.specs.engine import DeepSpeedSpec, LocalEngineSpec
from storage.chain.rebase import rebases_in_effect
from storage.chain.records import Chain, CommitRecord, PolicyRef
from storage.inspect.audit import audit_store
from storage.serialization import digest_file
from storage.store import keys
from storage.store.artifacts import read_manifest
from storage.store.objects import open_store
from tests.fixtures.engines import PROVENANCE, commit_batch, new_policy, request_after

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow

TORCH = LocalEngineSpec(compute_dtype="float32", threads=1)
ZERO3_X2 = TORCH.model_copy(update={"trainer": DeepSpeedSpec(zero_stage=3, ranks=2)})


async def step(engine: LocalEngine, parent: PolicyRef) -> CommitRecord:
    return await engine.take_gradient_step(request_after(parent, commit_batch(engine.store, parent), lr=0.01))


async def at(engine: LocalEngine, policy: PolicyRef) -> LoadedPolicy:
    """The engine's training slot, brought to the policy."""
    return await engine._compute(policy.run, lambda: engine.materialiser.for_training(policy))


def digests(files: dict[str, Path]) -> dict[str, str]:
    return {name: digest_file(path)[0] for name, path in files.items()}


async def test_torch_to_zero3_x2_and_back(tmp_path: Path, tiny_folder: Path) -> None:
    url = f"file://{tmp_path}/store"
    store = open_store(url)

    # Two steps by one process.
    torch = LocalEngine(url, TORCH)
    policy = await new_policy(torch, tiny_folder)
    for _ in range(2):
        policy = (await step(torch, policy)).policy
    await torch.save_checkpoint(policy, provenance=PROVENANCE)
    chain = Chain.of(store, policy)

    # Two ranks read the checkpoint, and one process reads theirs.
    zero = LocalEngine(url, ZERO3_X2)
    theirs = await at(zero, policy)
    assert theirs.policy == policy
    crossed = theirs.trainer.write_checkpoint(tmp_path / "of-two-ranks")
    mine = await at(torch, policy)
    mine.trainer.reset_optimizer()  # nothing of what it had may pass for what it reads
    mine.trainer.read_checkpoint(crossed, optimizer=True)
    manifest = read_manifest(store, keys.checkpoint(chain.run, chain.stage, chain.model, 2))
    back = digests(mine.trainer.write_checkpoint(tmp_path / "of-one-process"))
    assert back == {entry.name: entry.sha256 for entry in manifest.files}  # weights and moments, to the byte
    await torch.close(checkpoint=False)

    # The third step by two ranks, the fourth by one process.
    third = await step(zero, policy)
    await zero.save_checkpoint(third.policy, provenance=PROVENANCE)
    await zero.close(checkpoint=False)

    torch = LocalEngine(url, TORCH)
    restored = await at(torch, third.policy)
    assert restored.trainer.weights_digest()[0] == third.weights_digest
    fourth = await step(torch, third.policy)
    await torch.close(checkpoint=False)

    # Both changes of numerics are recorded and exact.
    first, second = rebases_in_effect(chain)
    assert (first.policy, first.exact, first.before.backend, first.after.layout) == (policy, True, "torch", "zero3x2")
    assert (second.policy, second.exact, second.after.backend) == (third.policy, True, "torch")
    assert (third.rebase, fourth.rebase) == (first.mark, second.mark)
    assert audit_store(store).problems == ()
    (report,) = verify_run(store, "r").chains
    assert report.problems == ()
    assert (report.redone, report.digests) == (4, 4)
