"""Tests of the deletion of runs: what it leaves, what it refuses, and that it can be killed anywhere and repeated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import storage.chain.deletion
from engine.text.stored_models import served_policy
from storage.chain.deletion import delete_model, delete_runs, plan_deletion
from storage.chain.fork import fork_run
from storage.chain.leases import acquire_lease, is_held, release_lease
from storage.chain.listing import list_runs
from storage.chain.records import Chain, Root, used_by_root
from storage.chain.run_record import create_or_check_run
from storage.errors import InvalidKey, ModelBeingDeleted, ModelInUse, ObjectNotFound, RunBeingDeleted, RunInUse
from storage.inspect.audit import audit_store
from storage.inspect.disk_usage import measure_usage
from storage.inspect.run_details import describe_run, summarize_run
from storage.registry.decisions import Decision, champion_of, commit_decision
from storage.registry.models import list_versions, publish_model
from storage.serialization import canonical_json
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Provenance, commit_bytes, find_artifact
from storage.store.backends.memory import MemoryBackend, folder_of
from storage.store.backends.protocol import Folder, ObjectInfo, PutResult
from storage.store.index import record_uses
from storage.store.objects import ObjectStore, open_store
from tests.fixtures.runs.toy_run import ToyRun

PROVENANCE = Provenance(code_version="test", config_digest="0" * 64, seed=0)
FAILPOINTS = (
    "deletion.marked", "deletion.begun", "deletion.hidden", "deletion.object:1", "deletion.object:20",
    "deletion.object:LAST", "deletion.emptied",
)  # fmt: skip


@pytest.fixture
def toy(toy_run: ToyRun, tmp_path: Path) -> ToyRun:
    return toy_run.copied(tmp_path / "copy")


def objects(store: ObjectStore) -> dict[str, int]:
    """Sizes of all objects but the entries of the index, which has tests of its own."""
    return {info.key: info.size for info in store.list() if not info.key.startswith("index/")}


def of_run(store: ObjectStore, run: str) -> dict[str, int]:
    return {key: size for key, size in objects(store).items() if keys.run_of(key) == run}


def begin(store: ObjectStore, run: str) -> None:
    """Makes a run with a record and nothing else."""
    create_or_check_run(store, run, semantic={}, other={}, code_version="test")


def test_a_deleted_run_leaves_what_is_not_in_its_folder(toy: ToyRun) -> None:
    before, own = objects(toy.store), of_run(toy.store, "toy")
    planned = plan_deletion(toy.store, "toy")
    assert (planned.objects, planned.bytes) == (len(own), sum(own.values()))
    assert objects(toy.store) == before
    assert delete_runs(toy.store, "toy", force=True) == planned
    assert objects(toy.store) == {key: size for key, size in before.items() if key not in own}
    assert audit_store(toy.store).problems == ()
    with pytest.raises(ObjectNotFound, match="no run 'toy'"):
        delete_runs(toy.store, "toy", force=True)
    begin(toy.store, "toy")  # the key is free again
    assert acquire_lease(toy.store, "toy", {}) == 1


class ListsEmptyFolders(MemoryBackend):
    """Goes on listing a folder whose objects were deleted, as SeaweedFS does."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.put_keys: list[ObjectInfo] = []

    def put_if_absent(self, key: str, data: bytes, attempt: str) -> PutResult:
        self.put_keys.append(ObjectInfo(key, 0, 0.0))
        return super().put_if_absent(key, data, attempt)

    def folder(self, prefix: str) -> Folder:
        ever = [info for info in self.put_keys if info.key.startswith(prefix)]
        return Folder(folder_of(ever, prefix).folders, super().folder(prefix).objects)


def test_a_deleted_run_is_gone_though_its_folder_is_listed() -> None:
    store = ObjectStore(ListsEmptyFolders("lists-empty-folders"))
    for run in ("alone", "sweep/a", "sweep/b"):
        begin(store, run)
    for name in ("alone", "sweep"):
        delete_runs(store, name, force=True)
        assert store.folder(f"runs/{name}/").folders + store.folder("runs/").folders != []
        with pytest.raises(ObjectNotFound, match=f"no run '{name}'"):
            delete_runs(store, name, force=True)
    assert list_runs(store) == []


def test_a_model_and_a_decision_are_named_and_stay(toy: ToyRun) -> None:
    (version,) = {info.key.split("/")[2] for info in toy.store.list("models/toy/") if "manifest" in info.key}
    evaluation = keys.evaluation("toy", "0-grpo", "final")
    commit_decision(
        toy.store, "toy", version, "promote", over=None, reasons=["better"], who="ada", provenance=PROVENANCE,
        evaluation=f"{evaluation}#0", decision_id="d1",
    )  # fmt: skip
    before = objects(toy.store)
    with pytest.raises(RunInUse) as refused:
        delete_runs(toy.store, "toy")
    assert f"model toy@{version} was made from it" in str(refused.value)
    assert "the decision toy/decisions/d1 is based on its evaluation" in str(refused.value)
    assert objects(toy.store) == before
    delete_runs(toy.store, "toy", force=True)
    assert find_artifact(toy.store, keys.model_version("toy", version)) is not None
    assert audit_store(toy.store).problems == ()


def test_a_decision_names_the_run_whose_grades_its_evaluation_has(toy: ToyRun) -> None:
    (version,) = {info.key.split("/")[2] for info in toy.store.list("models/toy/") if "manifest" in info.key}
    rewards = keys.step_artifact("evaluation/a", "0-evaluation", 0, "graded", 0)
    evaluation = keys.evaluation("evaluation-x", "0-evaluation", "final")
    for key, parents in ((rewards, ()), (evaluation, (rewards,))):
        commit_bytes(
            toy.store, key, b"{}", kind="comparison", suffix=".json", parents=parents, provenance=PROVENANCE
        )
    commit_decision(
        toy.store, "toy", version, "promote", over=None, reasons=["better"], who="ada", provenance=PROVENANCE,
        evaluation=f"{evaluation}#0", decision_id="d1",
    )  # fmt: skip
    for run in ("evaluation-x", "evaluation/a"):
        (sentence,) = plan_deletion(toy.store, run).unverifiable
        assert sentence == "the decision toy/decisions/d1 is based on its evaluation"


def test_a_fork_and_its_forks_keep_the_run(toy: ToyRun) -> None:
    fork_run(toy.store, "toy", "new", step=2, code_version="test")
    fork_run(toy.store, "new", "newer", step=1, code_version="test")
    for run in ("toy", "new"):
        with pytest.raises(RunInUse, match=r"run 'newer' was forked from new/0-grpo@1: .* neither be verified"):
            delete_runs(toy.store, run, force=True)
    for run in ("newer", "new", "toy"):
        delete_runs(toy.store, run, force=True)
    assert list_runs(toy.store) == []


def test_a_stage_that_began_in_the_run_keeps_it(toy: ToyRun) -> None:
    start = toy.chain.policy(2)
    Chain(toy.store, "again", "0-sft", "policy").create_root(Root(start=start, base_digest=start.state))
    with pytest.raises(RunInUse, match="stage 0-sft of run 'again' began at toy/0-grpo/policy@2"):
        delete_runs(toy.store, "toy", force=True)
    delete_runs(toy.store, "again")
    delete_runs(toy.store, "toy", force=True)


def test_a_run_in_progress_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    begin(store, "r")
    epoch = acquire_lease(store, "r", {})
    before = objects(store)
    with pytest.raises(RunInUse, match="its lease 1 is held: end it first, or give --no-active-runs"):
        delete_runs(store, "r")
    assert objects(store) == before
    release_lease(store, "r", epoch)
    delete_runs(store, "r")
    begin(store, "killed")
    acquire_lease(store, "killed", {})
    delete_runs(store, "killed", no_active_runs=True)
    assert list_runs(store) == []


def test_a_run_that_is_opened_meanwhile_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path / "store")
    begin(store, "r")

    def open_it(failpoint: str) -> None:
        # an opener whose lease came before the mark
        store.put(keys.lease("r", 1), b"{}")

    monkeypatch.setattr(storage.chain.deletion, "failpoint", open_it)
    with pytest.raises(RunInUse, match="lease 1 is held"):
        delete_runs(store, "r")
    assert store.exists(keys.run_json("r")) and not store.exists(keys.deletion("r"))


def test_a_fork_that_was_forked_meanwhile_goes_on(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_run(toy.store, "toy", "new", step=2, code_version="test")
    real_put = toy.store.put_if_absent

    def fork_then_mark(key: str, data: bytes) -> PutResult:
        if key == keys.deletion("new"):
            fork_run(toy.store, "new", "newer", step=1, code_version="test")
        return real_put(key, data)

    monkeypatch.setattr(ObjectStore, "put_if_absent", lambda _, key, data: fork_then_mark(key, data))
    with pytest.raises(RunInUse, match="run 'newer' was forked from new"):
        delete_runs(toy.store, "new")
    # it has not run yet, so it has no record, but it is whole
    assert not toy.store.exists(keys.deletion("new")) and toy.store.exists(keys.fork_json("new"))


def killed_at(store: ObjectStore, run: str, failpoint: str, monkeypatch: pytest.MonkeyPatch, **options: bool) -> None:
    """Begins to delete a run, and ends at this failpoint as if the process were killed."""

    def kill(name: str) -> None:
        if name == failpoint:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(storage.chain.deletion, "failpoint", kill)
        delete_runs(store, run, **options)


def test_only_the_run_that_is_deleted_in_part_needs_no_second_force(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(toy.store, "sweep/a")
    monkeypatch.setattr(
        storage.chain.deletion, "_registry_uses",
        lambda _, runs: ["model m@1 was made from it"] if "sweep/b" in runs else [],
    )  # fmt: skip
    killed_at(toy.store, "sweep/a", "deletion.hidden", monkeypatch)
    begin(toy.store, "sweep/b")
    with pytest.raises(RunInUse, match="model m@1 was made from it"):
        delete_runs(toy.store, "sweep")
    assert toy.store.exists(keys.run_json("sweep/b"))
    # the part of sweep/a that is left is still marked, and sweep/b can go on
    assert toy.store.exists(keys.deletion("sweep/a")) and not toy.store.exists(keys.deletion("sweep/b"))


@pytest.mark.parametrize(
    ("failpoint", "stays"), [("deletion.marked", False), ("deletion.begun", True), ("deletion.hidden", True)]
)
def test_a_refused_call_removes_the_mark_of_a_killed_one_only_if_nothing_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failpoint: str, stays: bool
) -> None:
    store = open_store(tmp_path / "store")
    Chain(store, "r", "0-sft", "policy").create_root(Root(base_digest="b"))  # a run without a record
    acquire_lease(store, "r", {})
    killed_at(store, "r", failpoint, monkeypatch, no_active_runs=True)
    monkeypatch.setattr(storage.chain.deletion, "_lease_uses", lambda *_: ["a lease"])
    with pytest.raises(RunInUse, match="a lease"):
        delete_runs(store, "r")
    assert store.exists(keys.deletion("r")) is stays


def test_other_runs_of_the_folder_stay_and_a_sweep_is_deleted_whole(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    for run in ("nightly", "nightly/1", "sweep/a", "sweep/b", "sweeper/a"):
        begin(store, run)
        for model in ("policy", "value"):
            Chain(store, run, "0-ppo", model).create_root(Root(base_digest=model))
    store.put("runs/sweep/notes.txt", b"a person's")
    delete_runs(store, "nightly")
    assert list_runs(store) == ["nightly/1", "sweep/a", "sweep/b", "sweeper/a"]
    assert delete_runs(store, "sweep").runs == ("sweep/a", "sweep/b")
    assert list_runs(store) == ["nightly/1", "sweeper/a"]
    assert store.exists("runs/sweep/notes.txt")
    for text in ("swee", "none"):
        with pytest.raises(ObjectNotFound):
            delete_runs(store, text)
    with pytest.raises(InvalidKey):
        delete_runs(store, "../nightly")


@pytest.mark.parametrize("failpoint", FAILPOINTS)
def test_a_killed_deletion_leaves_no_run_that_looks_whole(toy: ToyRun, failpoint: str) -> None:
    others = {key for key in objects(toy.store) if keys.run_of(key) != "toy"}
    code = (
        "from storage.chain.deletion import delete_runs\n"
        "from storage.store.objects import open_store\n"
        f"delete_runs(open_store({str(toy.folder)!r}), 'toy', force=True)"
    )
    # the record, the result, the lease and its release are deleted apart
    last = len(of_run(toy.store, "toy")) - 4
    environment = os.environ | {"OSTINATO_FAILPOINT": failpoint.replace("LAST", str(last))}
    killed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    # nothing opens or forks it, and it is shown as what it is
    assert summarize_run(toy.store, "toy").state == "deleting"
    with pytest.raises(RunBeingDeleted, match="ostinato runs delete toy --yes"):
        begin(toy.store, "toy")
    with pytest.raises(RunBeingDeleted):
        describe_run(toy.store, "toy")
    with pytest.raises(RunBeingDeleted):
        acquire_lease(toy.store, "toy", {})
    assert not is_held(toy.store, "toy")
    with pytest.raises((RunBeingDeleted, ObjectNotFound)):
        fork_run(toy.store, "toy", "new", step=2, code_version="test")
    (problem,) = audit_store(toy.store).problems
    assert (problem.severity, problem.key) == ("warning", keys.deletion("toy"))
    # The same command finishes it. A deletion that has begun needs no second --force, and no process uses its lease.
    toy.store.put(keys.lease("toy", 9), b"{}")
    if failpoint == "deletion.marked":
        release_lease(toy.store, "toy", 9)
    delete_runs(toy.store, "toy", force=failpoint == "deletion.marked")
    assert set(objects(toy.store)) == others
    assert audit_store(toy.store).problems == ()


def test_usage_is_the_sum_of_the_listing(toy: ToyRun) -> None:
    fork_run(toy.store, "toy", "new", step=2, code_version="test")
    sizes = objects(toy.store)
    usage = measure_usage(toy.store)
    assert usage.total == sum(info.size for info in toy.store.list())
    assert [row.run for row in usage.runs] == ["toy", "new"]
    row = usage.runs[0]
    own = of_run(toy.store, "toy")
    assert row.total - row.models == sum(own.values())
    assert row.checkpoints == sum(size for key, size in own.items() if "/checkpoints/" in key)
    assert row.rollouts == sum(size for key, size in own.items() if "/steps/" in key)
    assert row.models == sum(size for key, size in sizes.items() if key.startswith("models/toy/0"))
    assert usage.datasets == sum(size for key, size in sizes.items() if key.startswith("datasets/"))
    assert usage.imported_models >= sum(size for key, size in sizes.items() if key.startswith("models/tiny/"))


def test_the_models_of_a_deleted_run_are_no_run(toy: ToyRun) -> None:
    models = measure_usage(toy.store).runs[0].models
    delete_runs(toy.store, "toy", force=True)
    usage = measure_usage(toy.store)
    assert usage.runs == ()
    assert usage.models_of_deleted_runs == models > 0
    assert usage.total == sum(info.size for info in toy.store.list())


def published(tmp_path: Path) -> tuple[ObjectStore, ArtifactRef]:
    """A store with the version 1 of a model."""
    store = open_store(tmp_path / "store")
    (tmp_path / "weights").write_text("weights")
    provenance = Provenance(code_version="a", config_digest="0" * 64, seed=0)
    return store, publish_model(store, "m", "1", {"config.json": tmp_path / "weights"}, provenance=provenance)


def test_a_chain_and_a_deletion_of_its_model_notice_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, model = published(tmp_path)
    root = Root(base=model, base_digest=model.sha256)

    def begin_at_it(name: str) -> None:
        # the deletion has marked the version, and looks for chains again after this
        if name == "deletion.marked":
            with pytest.raises(ModelBeingDeleted, match="ostinato models delete m@1 --yes"):
                Chain(store, "late", "0-sft", "policy").create_root(root)
            store.put(keys.chain_root("early", "0-sft", "policy"), canonical_json(root.model_dump(mode="json")))

    record_uses(store, keys.chain_root("early", "0-sft", "policy"), used_by_root(root))
    monkeypatch.setattr(storage.chain.deletion, "failpoint", begin_at_it)
    with pytest.raises(ModelInUse, match="nothing was deleted: early began at m@1"):
        delete_model(store, "m", "1")
    monkeypatch.undo()
    # the version is as usable as before
    assert list_versions(store, "m") == ["1"]
    assert Chain(store, "late", "0-sft", "policy").create_root(root) == root


def test_a_promotion_that_has_not_moved_the_champion_yet_keeps_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = published(tmp_path)
    provenance = Provenance(code_version="a", config_digest="0" * 64, seed=0)

    def promote() -> Decision:
        return commit_decision(store, "m", "1", "promote", over=None, reasons=["r"], who="ada", provenance=provenance)

    # the promotion has read that the version is not marked, and a deletion begins before it moves the champion
    def delete(_: ObjectStore, decision: Decision) -> None:
        with pytest.raises(ModelInUse, match=f"the decision {decision.id} of ada makes m@1 the champion"):
            delete_model(store, "m", "1")

    with monkeypatch.context() as patch:
        patch.setattr("storage.registry.decisions.apply_decision", delete)
        promote()
    assert list_versions(store, "m") == ["1"]
    # a retry moves the champion; overtaken by another version, it keeps nothing
    promote()
    (tmp_path / "other").write_text("other")
    publish_model(store, "m", "2", {"config.json": tmp_path / "other"}, provenance=provenance)
    champion = champion_of(store, "m")
    commit_decision(store, "m", "2", "promote", over=champion, reasons=["r"], who="ada", provenance=provenance)
    assert delete_model(store, "m", "1") > 0


def test_a_version_that_is_being_deleted_begins_nothing_and_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, model = published(tmp_path)

    def kill(name: str) -> None:
        if name == "deletion.marked":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(storage.chain.deletion, "failpoint", kill)
        delete_model(store, "m", "1")
    with pytest.raises(ModelBeingDeleted):
        published(tmp_path)
    with pytest.raises(ModelBeingDeleted):
        Chain(store, "r", "0-sft", "policy").create_root(Root(base=model, base_digest=model.sha256))
    assert delete_model(store, "m", "1") > 0
    # the name is free again
    assert published(tmp_path)[1].sha256 == model.sha256


def test_a_version_that_was_only_served_is_deleted_with_its_chain(tmp_path: Path) -> None:
    store, model = published(tmp_path)
    spec = served_policy(model)
    chain = Chain(store, spec.run, spec.stage, spec.model)
    chain.create_root(spec.root)
    delete_model(store, "m", "1")
    assert chain.root() is None and audit_store(store).problems == ()
