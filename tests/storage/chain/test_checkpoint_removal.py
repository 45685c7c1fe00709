"""Tests of the removal of named checkpoints: refused while something refers to them, and the run stays complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.local.verify import verify_run
from storage.chain.checkpoint_names import named_checkpoints, resolve_checkpoint_name, resolve_restart_point
from storage.chain.fork import fork_run
from storage.chain.leases import acquire_lease, release_lease
from storage.chain.records import Chain, PolicyRef, Root
from storage.chain.retention import remove_checkpoints
from storage.errors import CheckpointInUse, NoSuchCheckpoint
from storage.inspect.audit import audit_store
from storage.registry.decisions import commit_decision
from storage.serialization import canonical_json
from storage.store import keys
from storage.store.artifacts import Provenance, commit_files, find_artifact
from storage.store.objects import ObjectStore, open_store
from tests.fixtures.runs.toy_run import ToyRun

PROVENANCE = Provenance(code_version="test", config_digest="0" * 64, seed=0)


@pytest.fixture
def toy(toy_run: ToyRun, tmp_path: Path) -> ToyRun:
    """The toy run with names for its checkpoints after steps 2 and 4."""
    copy = toy_run.copied(tmp_path / "copy")
    for step in (2, 4):
        key = keys.checkpoint("toy", "0-grpo", "policy", step)
        copy.store.put_if_absent(keys.checkpoint_name(key), canonical_json({"name": f"policy-{step}"}))
    return copy


def objects(store: ObjectStore) -> set[str]:
    return {info.key for info in store.list()}


def began_there(store: ObjectStore, run: str, start: PolicyRef) -> int:
    """Opens a run whose first stage begins at `start`. Returns the epoch of its lease."""
    Chain(store, run, "0-sft", "policy").create_root(Root(start=start, base_digest=start.state))
    return acquire_lease(store, run, {})


def test_a_removed_checkpoint_leaves_nothing_and_the_run_stays_whole(toy: ToyRun) -> None:
    policy = toy.chain.policy(2)
    before = objects(toy.store)
    (would,) = remove_checkpoints(toy.store, [policy], dry_run=True)
    assert objects(toy.store) == before
    (removed,) = remove_checkpoints(toy.store, [policy])
    assert would == removed
    checkpoint = keys.checkpoint("toy", "0-grpo", "policy", 2)
    assert before - objects(toy.store) == {key for key in before if key.startswith(f"{checkpoint}/")} != set()
    assert [named.name for named in named_checkpoints(toy.store, "toy")] == ["policy-4"]
    assert remove_checkpoints(toy.store, [policy]) == []
    # the run can be verified, audited, and forked at the very step
    (chain,) = verify_run(toy.store, "toy").chains
    assert (chain.problems, chain.redone) == ((), 4)
    assert audit_store(toy.store).problems == ()
    fork_run(toy.store, "toy", "new", step=2, code_version="test")


def test_a_fork_keeps_the_checkpoint_it_was_made_at(toy: ToyRun) -> None:
    fork_run(toy.store, "toy", "new", step=2, code_version="test")
    before = objects(toy.store)
    for dry_run in (True, False):
        with pytest.raises(CheckpointInUse, match="policy:toy/0-grpo/policy@2: run 'new' was forked there"):
            remove_checkpoints(toy.store, [toy.chain.policy(4), toy.chain.policy(2)], dry_run=dry_run)
    assert objects(toy.store) == before


def test_a_run_in_progress_keeps_the_checkpoint_it_began_at(toy: ToyRun) -> None:
    policy = toy.chain.policy(2)
    epoch = began_there(toy.store, "again", policy)
    with pytest.raises(CheckpointInUse, match="@2: stage 0-sft of run 'again' began there, and .*not finished"):
        remove_checkpoints(toy.store, [policy])
    release_lease(toy.store, "again", epoch)
    assert len(remove_checkpoints(toy.store, [policy])) == 1


def test_a_finished_run_keeps_nothing(toy: ToyRun) -> None:
    policy = toy.chain.policy(2)
    began_there(toy.store, "again", policy)
    toy.store.put(keys.result_json("again"), b"{}")
    assert len(remove_checkpoints(toy.store, [policy])) == 1


def test_a_champion_keeps_the_checkpoint_it_was_made_from(toy: ToyRun) -> None:
    policy = toy.chain.policy(4)  # published as `toy`
    (version,) = {info.key.split("/")[2] for info in toy.store.list("models/toy/") if "manifest" in info.key}
    commit_decision(
        toy.store, "toy", version, "promote", over=None, reasons=["better"], who="ada", provenance=PROVENANCE
    )
    with pytest.raises(CheckpointInUse, match=f"@4: toy@{version}, the champion of toy, was made from it"):
        remove_checkpoints(toy.store, [policy])


def test_what_a_name_means(toy: ToyRun) -> None:
    for text in ("toy/0-grpo/policy-2", "toy/policy-2"):
        assert resolve_checkpoint_name(toy.store, text) == toy.chain.policy(2)
    for text in ("toy/policy-3", "policy-2", "toy", "other/policy-2", "../toy/policy-2", ""):
        with pytest.raises(NoSuchCheckpoint, match="there is no checkpoint"):
            resolve_checkpoint_name(toy.store, text)
    with pytest.raises(NoSuchCheckpoint, match="there are toy/0-grpo/policy-2, toy/0-grpo/policy-4"):
        resolve_checkpoint_name(toy.store, "toy/policy-3")


def test_a_stage_resumes_where_it_began_although_the_name_has_moved(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    file = tmp_path / "weights"
    for stage in ("0-sft", "1-sft"):
        Chain(store, "first", stage, "policy").create_root(Root(base_digest=stage))
        file.write_bytes(b"weights")
        key = keys.checkpoint("first", stage, "policy", 0)
        commit_files(store, key, {"w": file}, kind="checkpoint", provenance=PROVENANCE, extra={"name": "good"})
    with pytest.raises(NoSuchCheckpoint, match="names 2 checkpoints: first/0-sft/good, first/1-sft/good"):
        resolve_checkpoint_name(store, "first/good")
    start = resolve_restart_point(store, "first/0-sft/good", run="again", stage="0-sft", model="policy")
    release_lease(store, "again", began_there(store, "again", start))
    remove_checkpoints(store, [start])
    assert find_artifact(store, keys.checkpoint("first", "0-sft", "policy", 0)) is None
    for text in ("first/0-sft/good", "first/good"):
        assert resolve_restart_point(store, text, run="again", stage="0-sft", model="policy") == start
