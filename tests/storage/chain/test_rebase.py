"""Rebases: which weights descend from them, and that their checkpoints are not pruned, collected or lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from storage.chain.fork import check_fork, fork_run
from storage.chain.rebase import (
    Rebase,
    RedoneStep,
    checkpoint_extra,
    checkpoints_up_to,
    commit_rebase,
    difference_texts,
    discard_checkpoint,
    is_in_effect,
    rebase_at,
    rebase_in_effect,
    rebases_in_effect,
)
from storage.chain.records import Chain, CommitRecord, Numerics, OptimizerSpec, PolicyRef, RebaseMark, Root, StepRequest
from storage.chain.retention import Retention, prune_checkpoints, remove_checkpoints
from storage.errors import AttemptTooOld, CheckpointInUse, CorruptArtifact, ForkRefused
from storage.inspect.audit import audit_store
from storage.inspect.gc import collect_garbage
from storage.store import artifacts, key_patterns, keys
from storage.store.artifacts import ArtifactRef, Attempt, commit_files, find_artifact
from storage.store.objects import ObjectStore, open_store
from tests.fixtures.engines import PROVENANCE, commit_batch

CHAIN = ("r", "0-s", "policy")
TORCH = Numerics(
    backend="torch", device="x", compute_dtype="float32", threads=1, max_tokens=64, versions={"torch": "1"}
)
ZERO = TORCH.model_copy(update={"backend": "deepspeed", "layout": "zero3 x2"})
HOUR = 3600.0


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(tmp_path / "store")


@pytest.fixture
def chain(store: ObjectStore) -> Chain:
    """Three steps under TORCH, with a checkpoint at step 2."""
    chain = Chain(store, *CHAIN)
    base = checkpoint(chain, keys.model_version("m", "1"), "base")
    store.put(keys.model_claim("m", "1"), b"{}")
    chain.create_root(Root(base=base, base_digest="0"))
    for _ in range(3):
        take(chain)
    at(chain, 2)
    return chain


def take(chain: Chain, *, rebase: RebaseMark | None = None, numerics: Numerics = TORCH) -> CommitRecord:
    parent = chain.head()
    request = StepRequest(
        parent=parent, batch=commit_batch(chain.store, parent), loss={}, optimizer=OptimizerSpec(lr=1.0)
    )
    state = request.next_state()
    return chain.commit(
        CommitRecord(request=request, state=state, updates=1, numerics=numerics, rebase=rebase, weights_digest=state)
    )


def checkpoint(chain: Chain, key: str, weights: str, extra: dict[str, Any] | None = None) -> ArtifactRef:
    inside = chain.store.local_path("scratch")
    assert inside is not None
    file = inside.parent.parent / f"weights-{uuid4().hex}"
    file.write_text(weights)
    return commit_files(
        chain.store, key, {"weights": file}, kind="checkpoint", provenance=PROVENANCE, extra=extra or {}
    )  # fmt: skip


def at(chain: Chain, step: int, rebase: RebaseMark | None = None) -> ArtifactRef:
    """Commits a checkpoint of the chain at that step."""
    policy = chain.policy(step)
    extra = checkpoint_extra(policy, rebase, policy.state) | {"name": None}
    return checkpoint(chain, keys.checkpoint(*CHAIN, step), f"weights {step} {rebase}", extra)


def inexact(chain: Chain, step: int, weights: str = "other weights") -> Rebase:
    """Returns an uncommitted rebase at that step with its own checkpoint."""
    policy, attempt = chain.policy(step), uuid4().hex
    extra = checkpoint_extra(policy, RebaseMark(step=step, attempt=attempt), weights)
    return Rebase(
        policy=policy, before=TORCH, after=ZERO, exact=False, attempt=attempt,
        redone=tuple(RedoneStep(step=redone, distance=1e-6, bound=1e-5) for redone in (1, step)),
        checkpoint=checkpoint(chain, keys.rebase_checkpoint(*CHAIN, step, attempt), weights, extra),
        weights_digest=weights, committed_digest=policy.state,
    )  # fmt: skip


def exact(chain: Chain, step: int) -> Rebase:
    """Returns an uncommitted rebase on the chain's checkpoint of that step."""
    policy = chain.policy(step)
    ref = find_artifact(chain.store, keys.checkpoint(*CHAIN, step))
    assert ref is not None
    return Rebase(
        policy=policy, before=TORCH, after=ZERO, exact=True, attempt=uuid4().hex, checkpoint=ref,
        weights_digest=policy.state, committed_digest=policy.state,
    )  # fmt: skip


def commit(chain: Chain, rebase: Rebase) -> Rebase:
    return commit_rebase(chain, rebase, Attempt(chain.store))


def reached_from(chain: Chain, step: int) -> list[str]:
    """Returns the keys of the checkpoints from which policy `step` can be redone, the nearest first."""
    return [manifest.key for manifest in checkpoints_up_to(chain, step)]


def test_the_keys() -> None:
    key, attempt = keys.rebase("d/t", "0-s", "p", 40), "a" * 32
    assert key == "runs/d/t/stages/0-s/chains/p/rebases/000040.json"
    assert (keys.rebase_step(key), keys.record_step(key), key_patterns.classify_key(key)) == (40, None, "standalone")
    assert keys.rebase_step(keys.chain_record("d/t", "0-s", "p", 40)) is None
    checkpoint_key = keys.rebase_checkpoint("d/t", "0-s", "p", 40, attempt)
    assert keys.rebase_of_checkpoint(checkpoint_key) == ("d/t", "0-s", "p", 40, attempt)
    assert keys.rebase_of_checkpoint(keys.checkpoint("d/t", "0-s", "p", 40)) is None
    manifest, data = keys.manifest_of_files(checkpoint_key), f"{checkpoint_key}/{'b' * 32}/weights"
    assert (key_patterns.classify_key(manifest), key_patterns.owning_artifact(manifest)) == ("manifest", checkpoint_key)
    assert (key_patterns.classify_key(data), key_patterns.owning_artifact(data)) == ("attempt", checkpoint_key)
    assert keys.checkpoint_step(manifest) is None


def test_what_makes_numerics_others() -> None:
    assert difference_texts(TORCH, TORCH) == []
    assert difference_texts(TORCH, TORCH.model_copy(update={"threads": 8, "max_tokens": 9})) == []
    assert difference_texts(TORCH, ZERO) == ["backend: torch -> deepspeed", "layout: none -> zero3 x2"]
    assert difference_texts(TORCH, TORCH.model_copy(update={"versions": {"torch": "2", "new": "1"}})) == [
        "new: none -> 1", "torch: 1 -> 2",
    ]  # fmt: skip
    assert difference_texts(TORCH, TORCH.model_copy(update={"threads": 8}), everything=True) == ["threads: 1 -> 8"]


def test_steps_count_records_and_not_rebases(chain: Chain) -> None:
    commit(chain, exact(chain, 2))
    assert list(chain.steps()) == [1, 2, 3]


def test_the_first_writer_wins(chain: Chain) -> None:
    mine, theirs = inexact(chain, 3, "mine"), inexact(chain, 3, "theirs")
    assert commit(chain, mine) == mine
    assert commit(chain, mine) == mine  # a repetition returns the same rebase
    assert commit(chain, theirs) == rebase_at(chain, 3) == mine
    discard_checkpoint(chain, theirs)
    assert find_artifact(chain.store, theirs.checkpoint.key) is None
    assert reached_from(chain, 3)[-1] == mine.checkpoint.key


def test_what_comes_after_descends_from_it_and_what_was_before_does_not(chain: Chain) -> None:
    rebase = commit(chain, inexact(chain, 3))
    take(chain, rebase=rebase.mark, numerics=ZERO)
    take(chain, rebase=rebase.mark, numerics=ZERO)
    ordinary, later = keys.checkpoint(*CHAIN, 2), keys.checkpoint(*CHAIN, 4)
    at(chain, 4, rebase.mark)
    assert [rebase_in_effect(chain, n) for n in range(6)] == [None, None, None, rebase, rebase, rebase]
    assert [reached_from(chain, n) for n in (1, 2, 3, 4, 5)] == [
        [], [ordinary], [rebase.checkpoint.key], [later, rebase.checkpoint.key], [later, rebase.checkpoint.key],
    ]  # fmt: skip
    assert audit_store(chain.store).problems == ()


def test_a_checkpoint_of_weights_that_the_chain_left_is_not_used(chain: Chain) -> None:
    at(chain, 3)  # saved by an engine that had the committed weights of step 3
    rebase = commit(chain, inexact(chain, 3))
    assert reached_from(chain, 3) == [rebase.checkpoint.key]
    take(chain, rebase=rebase.mark)
    at(chain, 4)  # the checkpoint does not name the rebase
    assert reached_from(chain, 4) == [rebase.checkpoint.key]


def test_a_step_from_the_weights_before_it_makes_a_rebase_void(chain: Chain) -> None:
    rebase = commit(chain, inexact(chain, 3))
    assert is_in_effect(chain, rebase)
    take(chain)  # an engine with the committed weights takes the step
    assert not is_in_effect(chain, rebase)
    assert rebases_in_effect(chain) == []
    assert [rebase_in_effect(chain, n) for n in (3, 4)] == [None, None]
    assert reached_from(chain, 4) == [keys.checkpoint(*CHAIN, 2)]
    assert audit_store(chain.store).problems == ()


def test_the_last_of_several(chain: Chain) -> None:
    first = commit(chain, exact(chain, 2))
    assert rebase_in_effect(chain, 3) is None  # step 3 was taken before: the rebase came too late
    second = commit(chain, inexact(chain, 3))
    take(chain, rebase=second.mark)
    third = commit(chain, inexact(chain, 4))
    take(chain, rebase=third.mark)
    assert rebases_in_effect(chain) == [second, third]
    assert [rebase_in_effect(chain, n) for n in (2, 3, 4, 5)] == [None, second, third, third]
    assert first not in rebases_in_effect(chain)


def test_a_rebase_that_a_record_names_and_is_gone(chain: Chain) -> None:
    rebase = commit(chain, inexact(chain, 3))
    take(chain, rebase=rebase.mark)
    chain.store.delete(keys.rebase(*CHAIN, 3))
    with pytest.raises(CorruptArtifact, match="descends from the rebase at step 3, which is gone; restore"):
        rebase_in_effect(chain, 4)
    (problem,) = audit_store(chain.store).problems
    assert problem.key == keys.chain_record(*CHAIN, 4)
    assert "at step 3, which is not there" in problem.what


def test_a_rebase_whose_checkpoint_is_gone(chain: Chain) -> None:
    rebase = commit(chain, inexact(chain, 3))
    discard_checkpoint(chain, rebase)
    with pytest.raises(CorruptArtifact, match="the chain continues from it after step 3"):
        reached_from(chain, 3)
    (problem,) = audit_store(chain.store).problems
    assert (problem.severity, problem.key) == ("error", rebase.checkpoint.key)
    assert problem.what == "is gone, and the chain continues from it after step 3"


def test_a_torn_checkpoint_of_a_rebase_is_not_to_be_deleted(chain: Chain) -> None:
    commit(chain, exact(chain, 2))
    chain.store.delete(keys.chain_record(*CHAIN, 3))  # otherwise the rebase would be void
    manifest = artifacts.read_manifest(chain.store, keys.checkpoint(*CHAIN, 2))
    chain.store.delete(manifest.files[0].key)
    (problem,) = audit_store(chain.store).problems
    assert problem.key == manifest.files[0].key
    assert "restore the object from a backup" in problem.what_to_do


def test_a_rebase_of_another_history(chain: Chain) -> None:
    rebase = inexact(chain, 3)
    policy = rebase.policy.model_copy(update={"state": "f" * 64})
    commit(chain, rebase.model_copy(update={"policy": policy}))
    (problem,) = audit_store(chain.store).problems
    assert problem.key == keys.rebase(*CHAIN, 3)
    assert "which the chain does not have" in problem.what


# -- what is kept ----------------------------------------------------------------------------------------------


def test_what_a_rebase_goes_on_from_is_never_pruned(chain: Chain) -> None:
    at(chain, 1)
    at(chain, 3)
    first = commit(chain, exact(chain, 3))
    take(chain, rebase=first.mark)
    at(chain, 4, first.mark)
    assert prune_checkpoints(chain.store, chain.head(), Retention(keep_last=0, keep_named=1)) == [1, 2, 4]
    with pytest.raises(CheckpointInUse, match="@3: run 'r' was rebased there and continues from it"):
        remove_checkpoints(chain.store, [chain.policy(3)])
    assert find_artifact(chain.store, first.checkpoint.key) == first.checkpoint


def test_a_void_rebase_keeps_nothing(chain: Chain) -> None:
    commit(chain, exact(chain, 2))  # step 3 is committed and does not name the rebase
    assert prune_checkpoints(chain.store, chain.head(), Retention(keep_last=0)) == [2]
    assert audit_store(chain.store).problems == ()


def test_a_rebase_that_comes_while_its_checkpoint_is_pruned(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    at(chain, 3)
    rebase, delete = exact(chain, 3), chain.store.delete

    def and_then_rebase(key: str) -> None:
        delete(key)
        if key == keys.manifest_of_files(rebase.checkpoint.key):
            commit(chain, rebase)

    monkeypatch.setattr(chain.store, "delete", and_then_rebase)
    assert prune_checkpoints(chain.store, chain.head(), Retention(keep_last=0)) == [2]
    assert reached_from(chain, 3) == [rebase.checkpoint.key]
    assert audit_store(chain.store).problems == ()


def test_garbage_is_the_checkpoint_of_a_rebase_that_was_not_made(chain: Chain) -> None:
    killed, stands_ = inexact(chain, 3, "killed"), inexact(chain, 3, "stands")
    commit(chain, stands_)
    now = chain.store.now()
    assert collect_garbage(chain.store, now=now + 23 * HOUR).names == ()
    report = collect_garbage(chain.store, now=now + 25 * HOUR)
    assert set(report.deleted) == {"checkpoint of a rebase that was not committed"}
    assert {key_patterns.owning_artifact(name) for name in report.names} == {killed.checkpoint.key}
    assert len(report.names) == 2  # its manifest and its file
    assert reached_from(chain, 3) == [stands_.checkpoint.key]
    assert audit_store(chain.store).problems == ()


def test_an_old_attempt_commits_no_rebase(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt, rebase = Attempt(chain.store), inexact(chain, 3)
    monkeypatch.setattr(artifacts, "MAX_ATTEMPT_SECONDS", -1.0)
    with pytest.raises(AttemptTooOld, match="call again"):
        commit_rebase(chain, rebase, attempt)
    assert rebase_at(chain, 3) is None


# -- forks -----------------------------------------------------------------------------------------------------


@pytest.fixture
def rebased(chain: Chain) -> Chain:
    """Rebased at 3 (inexact) and at 4 (exact), with a step after that."""
    first = commit(chain, inexact(chain, 3))
    take(chain, rebase=first.mark, numerics=ZERO)
    at(chain, 4, first.mark)
    second = commit(chain, exact(chain, 4))
    take(chain, rebase=second.mark)
    return chain


@pytest.mark.parametrize(("step", "steps"), [(2, []), (3, [3]), (4, [3, 4]), (5, [3, 4])])
def test_a_fork_goes_on_from_the_same_weights(rebased: Chain, step: int, steps: list[int]) -> None:
    fork_run(rebased.store, "r", "new", step=step, code_version="test")
    copy = Chain(rebased.store, "new", *CHAIN[1:])
    mine = {rebase.policy.step: rebase for rebase in rebases_in_effect(copy)}
    assert list(mine) == steps
    for theirs in rebases_in_effect(rebased, step):
        copied = mine[theirs.policy.step]
        assert copied.mark == theirs.mark
        assert copied.policy == theirs.policy.model_copy(update={"run": "new"})
        assert keys.run_of(keys.manifest_of_files(copied.checkpoint.key)) == "new"
        assert copied.checkpoint.sha256 == theirs.checkpoint.sha256
    nearest = [key.replace("/new/", "/r/") for key in reached_from(copy, step)]
    assert nearest == reached_from(rebased, step)[: len(nearest)]
    assert nearest[:1] == reached_from(rebased, step)[:1]
    assert audit_store(rebased.store).problems == ()


def test_a_fork_is_not_finished_without_its_rebase(rebased: Chain) -> None:
    fork_run(rebased.store, "r", "new", step=3, code_version="test")
    check_fork(rebased.store, "new")
    rebased.store.delete(keys.rebase("new", *CHAIN[1:], 3))
    with pytest.raises(ForkRefused, match="unfinished fork"):
        check_fork(rebased.store, "new")
    fork_run(rebased.store, "r", "new", step=3, code_version="test")
    check_fork(rebased.store, "new")


def test_no_fork_of_what_cannot_be_reached(rebased: Chain) -> None:
    rebase = rebase_at(rebased, 3)
    assert rebase is not None
    discard_checkpoint(rebased, rebase)
    with pytest.raises(CorruptArtifact, match="continues from it after step 3"):
        fork_run(rebased.store, "r", "new", step=3, code_version="test")


def test_a_policy_of_a_rebase_is_a_policy(chain: Chain) -> None:
    state = chain.policy(3).state
    commit(chain, inexact(chain, 3))
    assert chain.policy(3) == PolicyRef(run="r", stage="0-s", model="policy", step=3, state=state)
