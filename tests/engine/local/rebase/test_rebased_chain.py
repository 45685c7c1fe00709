"""Tests of rebased chains: verification, replay, pruning of checkpoints, and a further stage."""

from __future__ import annotations

from pathlib import Path

from engine.local.engine import LocalEngine
from engine.local.replay import replay_step
from engine.local.verify import verify_run
from engine.protocol import PolicySpec
from storage.chain.records import Chain, Root
from storage.chain.retention import Retention, prune_checkpoints
from storage.store.artifacts import read_manifest
from tests.engine.local.rebase.rebasing import (
    DOUBLE,
    OtherVersions,
    has_no_problems,
    only_rebase,
    read,
    step,
)
from tests.fixtures.engines import PROVENANCE


async def test_verify_redoes_each_stretch_under_its_numerics(chain: Chain, url: str) -> None:
    double = LocalEngine(url, DOUBLE)
    policy = (await step(double, chain.head())).policy
    await double.save_checkpoint(policy, provenance=PROVENANCE)
    await step(double, policy)
    await double.close()
    for options in ({}, {"from_checkpoints": True}):
        (report,) = verify_run(chain.store, "r", **options).chains
        assert report.problems == ()
        assert (report.redone, report.digests, report.checkpoints) == (5, 5, 2)
        (note,) = report.notes
        rebase = only_rebase(chain)
        assert note.startswith("rebased at step 3: ")
        assert rebase.committed_digest and rebase.committed_digest[:12] in note and rebase.weights_digest[:12] in note
    for step_number in (3, 4, 5):
        assert replay_step(chain, step_number).weights_equal


async def test_verify_compares_what_an_exact_rebase_goes_on_from(saved: Chain, url: str, tmp_path: Path) -> None:
    engine = OtherVersions(url)
    await step(engine, saved.head())
    await engine.close(checkpoint=False)
    assert verify_run(saved.store, "r").problems == []
    manifest = read_manifest(saved.store, only_rebase(saved).checkpoint.key)
    path = saved.store.local_path(next(file.key for file in manifest.files if file.name == "weights.safetensors"))
    assert path is not None
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    problems = {problem.key for problem in verify_run(saved.store, "r").problems}
    assert manifest.key in problems


async def test_pruning_everything_keeps_the_chain_in_reach(saved: Chain, url: str) -> None:
    engine = OtherVersions(url)
    policy = (await step(engine, saved.head())).policy
    await engine.save_checkpoint(policy, provenance=PROVENANCE)
    await engine.close()
    assert prune_checkpoints(saved.store, policy, Retention(keep_last=0)) == [4]
    again = OtherVersions(url)
    await step(again, policy)
    await again.close(checkpoint=False)
    assert has_no_problems(saved.store)


async def test_a_stage_goes_on_from_a_rebased_one(chain: Chain, url: str) -> None:
    double = LocalEngine(url, DOUBLE)
    await read(double, chain.head())
    root = Root(start=chain.head(), base_digest=chain.head().state)
    policy = await double.create_policy(PolicySpec(run="r", stage="1-t", model="policy", root=root))
    await step(double, policy)
    await double.close(checkpoint=False)
    reports = verify_run(chain.store, "r").chains
    assert [(report.chain, report.problems, report.redone) for report in reports] == [
        ("r/0-s/policy", (), 3), ("r/1-t/policy", (), 1),
    ]  # fmt: skip
