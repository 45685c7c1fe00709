"""An engine takes a chain over under other numerics: what it may, what it says on the chain, and what a kill leaves."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ReplayDiverged
from engine.local.engine import LocalEngine
from engine.local.replay import replay_step
from engine.local.verify import verify_run
from engine.protocol import GenerateRequest, PolicySpec, SamplingParams
from engine.specs.engine import LocalEngineSpec
from storage.chain.rebase import Rebase, rebase_at, rebases_in_effect
from storage.chain.records import Chain, CommitRecord, PolicyRef, Root
from storage.chain.retention import prune_checkpoints
from storage.inspect.audit import audit_store
from storage.inspect.run_details import describe_run
from storage.store import key_patterns, keys
from storage.store.artifacts import find_artifact, read_manifest
from storage.store.objects import ObjectStore, open_store
from tests.fixtures.engines import PROVENANCE, commit_batch, events, new_policy, request_after

ROOT = Path(__file__).parents[3]
SINGLE = LocalEngineSpec(compute_dtype="float32", threads=1)
DOUBLE = SINGLE.model_copy(update={"compute_dtype": "float64"})
"""Other numerics and truly other bits: master weights and moments in float64."""
STEPS = 3


class Elsewhere(LocalEngine):
    """The same bits on a machine that says it is another one."""

    def __init__(self, url: str, spec: LocalEngineSpec = SINGLE) -> None:
        super().__init__(url, spec)
        numerics = self.backend.numerics()
        other = numerics.model_copy(update={"versions": numerics.versions | {"torch": "99.0"}})
        self.backend.numerics = lambda: other  # type: ignore[method-assign]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture
def store(url: str) -> ObjectStore:
    return open_store(url)


@pytest.fixture
def worklog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OSTINATO_WORKLOG", str(tmp_path / "work.jsonl"))
    return tmp_path / "work.jsonl"


@pytest.fixture
async def chain(url: str, store: ObjectStore, tiny_folder: Path) -> Chain:
    """Three steps under SINGLE, by an engine that died: no checkpoint."""
    engine = LocalEngine(url, SINGLE)
    policy = await new_policy(engine, tiny_folder)
    for _ in range(STEPS):
        policy = (await step(engine, policy)).policy
    await engine.close(checkpoint=False)
    return Chain.of(store, policy)


@pytest.fixture
async def saved(chain: Chain, url: str) -> Chain:
    """The same with a checkpoint at its head."""
    engine = LocalEngine(url, SINGLE)
    await engine.save_checkpoint(chain.head(), provenance=PROVENANCE)
    await engine.close()
    return chain


async def step(engine: LocalEngine, parent: PolicyRef) -> CommitRecord:
    return await engine.take_gradient_step(request_after(parent, commit_batch(engine.store, parent), lr=0.01))


async def read(engine: LocalEngine, policy: PolicyRef) -> None:
    await engine.generate(
        GenerateRequest(policy=policy, prompts=[[1, 2]], seeds=[0], sampling=SamplingParams(max_new_tokens=2))
    )


def digest(engine: LocalEngine, policy: PolicyRef) -> str:
    slot = engine.loaded_policies.training(policy)
    assert slot is not None and slot.policy == policy
    return slot.trainer.weights_digest()[0]


def recorded(chain: Chain, at: int) -> CommitRecord:
    record = chain.record(at)
    assert record is not None
    return record


def the_rebase(chain: Chain) -> Rebase:
    (rebase,) = rebases_in_effect(chain)
    return rebase


def sound(store: ObjectStore) -> bool:
    return audit_store(store).problems == ()


# -- exact -----------------------------------------------------------------------------------------------------


async def test_from_its_checkpoint_a_chain_is_rebased_exactly_and_once(
    saved: Chain, url: str, caplog: pytest.LogCaptureFixture, worklog: Path
) -> None:
    engine, head = Elsewhere(url), saved.head()
    await read(engine, head)
    assert rebases_in_effect(saved) == []  # nothing was trained: nothing to say
    with caplog.at_level(logging.WARNING, "engine.local.rebase"):
        first = await step(engine, head)
        second = await step(engine, first.policy)
    rebase = the_rebase(saved)
    assert (rebase.exact, rebase.redone, rebase.policy) == (True, (), head)
    assert rebase.checkpoint.key == keys.checkpoint("r", "0-s", "policy", STEPS)
    assert rebase.weights_digest == rebase.committed_digest == recorded(saved, STEPS).weights_digest
    assert rebase.before == recorded(saved, STEPS).numerics
    assert rebase.after.versions["torch"] == "99.0"
    assert first.rebase == second.rebase == rebase.mark
    assert recorded(saved, STEPS).rebase is None
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "r/0-s/policy is rebased: step 3: exact, torch: " in said[0]
    assert len(events(worklog, "rebase")) == 1 and not events(worklog, "redo")
    assert sound(saved.store)
    await engine.close(checkpoint=False)


async def test_the_same_numerics_rebase_nothing(saved: Chain, url: str) -> None:
    engine = LocalEngine(url, SINGLE.model_copy(update={"threads": 2}))  # another thread count is no other numerics
    record = await step(engine, saved.head())
    assert (record.rebase, rebases_in_effect(saved)) == (None, [])
    await engine.close(checkpoint=False)


async def test_a_redo_that_the_digests_confirm_is_exact(chain: Chain, url: str) -> None:
    engine = Elsewhere(url)
    record = await step(engine, chain.head())
    rebase = the_rebase(chain)
    assert (rebase.exact, rebase.redone, record.rebase) == (True, (), rebase.mark)
    assert find_artifact(chain.store, rebase.checkpoint.key) == rebase.checkpoint
    assert sound(chain.store)
    (report,) = verify_run(chain.store, "r").chains
    assert (report.problems, report.redone, report.checkpoints) == ((), 4, 1)
    await engine.close(checkpoint=False)


# -- with a redo -----------------------------------------------------------------------------------------------


async def test_a_redo_that_differs_goes_on_from_what_it_reached(chain: Chain, url: str, worklog: Path) -> None:
    engine = LocalEngine(url, DOUBLE)
    record = await step(engine, chain.head())
    rebase = the_rebase(chain)
    assert not rebase.exact
    assert rebase.redone == (1, 2, 3)
    assert rebase.committed_digest == recorded(chain, STEPS).weights_digest != rebase.weights_digest
    assert (rebase.before.compute_dtype, rebase.after.compute_dtype) == ("float32", "float64")
    assert find_artifact(chain.store, keys.checkpoint("r", "0-s", "policy", STEPS)) is None  # nothing is shadowed
    assert read_manifest(chain.store, rebase.checkpoint.key).extra["weights_digest"] == rebase.weights_digest
    assert (record.rebase, record.numerics.compute_dtype) == (rebase.mark, "float64")
    assert len(events(worklog, "redo")) == STEPS
    await engine.close(checkpoint=False)
    worklog.unlink()
    again = LocalEngine(url, DOUBLE)  # the step after it is redone from there, to the byte
    await step(again, record.policy)
    assert [event["step"] for event in events(worklog, "redo")] == [STEPS + 1]
    assert rebases_in_effect(chain) == [rebase]
    assert sound(chain.store)
    (line,) = describe_run(chain.store, "r").chains[0].rebases
    assert line.startswith("step 3: steps 1 to 3 redone, weights ") and "compute dtype: float32 -> float64" in line
    await again.close(checkpoint=False)


async def test_a_head_that_is_only_read_is_rebased_too(chain: Chain, url: str) -> None:
    """What is sampled, and trained on, is of weights that anyone can bring back."""
    engine = LocalEngine(url, DOUBLE)
    await read(engine, chain.head())
    rebase = the_rebase(chain)
    assert digest(engine, chain.head()) == rebase.weights_digest
    await engine.close(checkpoint=False)
    other = LocalEngine(url, SINGLE)  # under the old numerics again: the chain goes on from there all the same
    record = await step(other, chain.head())
    assert record.rebase == rebase.mark
    assert rebases_in_effect(chain) == [rebase]
    await other.close(checkpoint=False)


async def test_a_past_policy_whose_redo_differs_is_refused(saved: Chain, url: str) -> None:
    engine = LocalEngine(url, DOUBLE)
    with pytest.raises(ReplayDiverged, match="Only the head of a chain can be rebased, and steps after"):
        await read(engine, saved.policy(2))
    with pytest.raises(ReplayDiverged, match="Only the head of a chain can be rebased, and steps after"):
        await engine.export_model(saved.policy(2), "m", provenance=PROVENANCE)
    assert list(saved.store.list(keys.rebases_prefix("r", "0-s", "policy"))) == []
    await engine.close(checkpoint=False)


async def test_policies_before_a_rebase_are_redone_under_their_own_numerics(chain: Chain, url: str) -> None:
    double = LocalEngine(url, DOUBLE)
    await step(double, chain.head())
    await double.close(checkpoint=False)
    single = LocalEngine(url, SINGLE)
    await read(single, chain.policy(2))
    slot = single.loaded_policies.find_state(chain.policy(2).state)
    assert slot is not None and slot.trainer.weights_digest()[0] == recorded(chain, 2).weights_digest
    await read(single, chain.policy(3))  # past, and at the rebase: its checkpoint, not a redo
    slot = single.loaded_policies.find_state(chain.policy(3).state)
    assert slot is not None and slot.rebase == the_rebase(chain).mark
    await single.close(checkpoint=False)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (DOUBLE.model_copy(update={"deterministic": True}), "deterministic=true promises the bytes of a run without"),
        (DOUBLE.model_copy(update={"rebase": "refuse"}), "engine.rebase='refuse' goes on from no other weights"),
    ],
    ids=["deterministic", "refuse"],
)
async def test_an_engine_that_may_not(chain: Chain, url: str, spec: LocalEngineSpec, said: str) -> None:
    engine = LocalEngine(url, spec)
    with pytest.raises(ReplayDiverged, match=said):
        await step(engine, chain.head())
    assert rebase_at(chain, STEPS) is None
    assert chain.head().step == STEPS
    await engine.close(checkpoint=False)


async def test_equal_numerics_and_other_weights_are_an_error(chain: Chain, url: str) -> None:
    record = recorded(chain, 2)
    key = keys.chain_record("r", "0-s", "policy", 2)
    chain.store.delete(key)
    chain.commit(record.model_copy(update={"weights_digest": "0" * 64}))
    engine = LocalEngine(url, SINGLE)
    with pytest.raises(ReplayDiverged, match="redoing step 2 gave weights .* the chain has 000000000000"):
        await step(engine, chain.head())
    assert rebases_in_effect(chain) == []
    await engine.close(checkpoint=False)


async def test_steps_that_keep_no_digest_count_as_changed(url: str, store: ObjectStore, tiny_folder: Path) -> None:
    engine = LocalEngine(url, SINGLE.model_copy(update={"digest_every": 2}))
    policy = await new_policy(engine, tiny_folder)
    for _ in range(STEPS):
        policy = (await step(engine, policy)).policy
    await engine.close(checkpoint=False)
    elsewhere, chain = Elsewhere(url), Chain.of(store, policy)
    await step(elsewhere, policy)
    rebase = the_rebase(chain)  # step 2 is confirmed, step 3 cannot be
    assert (rebase.exact, rebase.redone, rebase.committed_digest) == (False, (3,), None)
    await elsewhere.close(checkpoint=False)


# -- verify, replay, retention, stages -------------------------------------------------------------------------


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
        rebase = the_rebase(chain)
        assert note.startswith("rebased at step 3: ")
        assert rebase.committed_digest and rebase.committed_digest[:12] in note and rebase.weights_digest[:12] in note
    for at in (3, 4, 5):
        assert replay_step(chain, at).weights_equal


async def test_verify_compares_what_an_exact_rebase_goes_on_from(saved: Chain, url: str, tmp_path: Path) -> None:
    engine = Elsewhere(url)
    await step(engine, saved.head())
    await engine.close(checkpoint=False)
    assert verify_run(saved.store, "r").problems == []
    manifest = read_manifest(saved.store, the_rebase(saved).checkpoint.key)
    path = saved.store.local_path(next(e.key for e in manifest.files if e.name == "weights.safetensors"))
    assert path is not None
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    problems = {problem.key for problem in verify_run(saved.store, "r").problems}
    assert manifest.key in problems


async def test_pruning_everything_keeps_the_chain_in_reach(saved: Chain, url: str) -> None:
    engine = Elsewhere(url)
    policy = (await step(engine, saved.head())).policy
    await engine.save_checkpoint(policy, provenance=PROVENANCE)
    await engine.close()
    assert prune_checkpoints(saved.store, policy, keep_last=0) == [4]
    again = Elsewhere(url)
    await step(again, policy)
    await again.close(checkpoint=False)
    assert sound(saved.store)


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


# -- two engines, kills ----------------------------------------------------------------------------------------


async def test_the_loser_of_a_race_takes_the_winners_weights(
    chain: Chain, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the loser's redo and its commit, the winner's rebase is committed."""
    from engine.local import rebase as module

    winner, loser, commit = Nudged(url, 1e-3), Nudged(url, 2e-3), module.commit_rebase
    raced = False

    def after_the_winner(*arguments: Any) -> Rebase:
        nonlocal raced
        if not raced:
            raced = True
            winner.materialiser.for_training(chain.head())
        return commit(*arguments)

    monkeypatch.setattr(module, "commit_rebase", after_the_winner)
    record = await step(loser, chain.head())
    rebase = the_rebase(chain)
    assert rebase.after.device == "nudged by 0.001"
    assert record.rebase == rebase.mark
    assert digest(winner, chain.policy(STEPS)) == rebase.weights_digest
    listed = [key_patterns.artifact_of_manifest(info.key) for info in chain.store.list("runs/r/stages/0-s/rebased/")]
    own = [key for key in listed if key]
    assert own == [rebase.checkpoint.key]  # the loser left nothing
    again = await step(winner, chain.head().model_copy(update={"step": STEPS, "state": chain.policy(STEPS).state}))
    assert again == record  # the step is taken: both have it
    assert sound(chain.store)
    for engine in (winner, loser):
        await engine.close(checkpoint=False)


async def test_a_step_from_the_committed_weights_overtakes_a_rebase(chain: Chain, url: str) -> None:
    """An engine that held the committed weights all along takes its step: the rebase is void, nothing is torn."""
    first = LocalEngine(url, SINGLE)
    first.materialiser.for_training(chain.head())
    other = LocalEngine(url, DOUBLE)
    await read(other, chain.head())
    record = await step(first, chain.head())
    assert record.rebase is None
    assert rebases_in_effect(chain) == []
    further = await step(other, record.policy)  # redone from the root: another rebase, after the step
    rebase = the_rebase(chain)
    assert (rebase.policy.step, further.rebase) == (STEPS + 1, rebase.mark)
    assert sound(chain.store)
    assert verify_run(chain.store, "r").problems == []
    for engine in (first, other):
        await engine.close(checkpoint=False)


class Nudged(LocalEngine):
    """Numerics that move every redone weight a little: what another device does, a million times enlarged."""

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


CHILD = """
import asyncio, sys
from engine.local.engine import LocalEngine
from storage.chain.records import Chain
from storage.store.objects import open_store
from tests.engine.local.test_rebase import DOUBLE, step
async def main():
    engine = LocalEngine(sys.argv[1], DOUBLE)
    await step(engine, Chain(engine.store, "r", "0-s", "policy").head())
    await engine.close(checkpoint=False)
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "failpoint", ["checkpoint.mid_upload", "checkpoint.after_manifest", "rebase.before_commit", "rebase.after_commit"]
)
async def test_a_kill_around_the_commit(chain: Chain, url: str, failpoint: str) -> None:
    def run(name: str) -> int:
        environment = os.environ | {"OSTINATO_FAILPOINT": name, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        return subprocess.run([sys.executable, "-c", CHILD, url], cwd=ROOT, env=environment, timeout=120).returncode

    assert await asyncio.to_thread(run, failpoint) == -signal.SIGKILL
    stood = rebase_at(chain, STEPS)
    assert (stood is not None) is (failpoint == "rebase.after_commit")
    assert sound(chain.store)
    assert await asyncio.to_thread(run, "") == 0
    rebase = the_rebase(chain)
    assert stood in (None, rebase)
    assert recorded(chain, STEPS + 1).rebase == rebase.mark
    assert sound(chain.store)
    assert verify_run(chain.store, "r").problems == []
