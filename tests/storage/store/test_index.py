"""The index of a store never lacks an entry, whenever a process is killed, and nothing that is used is deleted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from storage.chain.deletion import delete_model, delete_runs, plan_deletion
from storage.chain.fork import fork_run, read_fork
from storage.chain.leases import acquire_lease
from storage.chain.listing import all_chains, list_runs, run_chains, stored_checkpoint_steps
from storage.chain.records import Chain, CommitRecord, Numerics, OptimizerSpec, PolicyRef, Root, StepRequest
from storage.chain.retention import Retention, prune_checkpoints, reasons_to_keep
from storage.chain.run_record import create_or_check_run
from storage.errors import IndexIncomplete, ModelInUse, RunInUse
from storage.inspect.audit import audit_store
from storage.inspect.gc import collect_garbage
from storage.inspect.index import missing_entries, rebuild_index
from storage.inspect.run_details import describe_run
from storage.inspect.scopes import runs_of, scopes_of
from storage.registry.decisions import champion_of, commit_decision
from storage.registry.models import list_models, list_versions, publish_model
from storage.serialization import canonical_json
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Provenance, commit_bytes, commit_files, find_artifact, read_manifest
from storage.store.index import record_run, users_of
from storage.store.objects import ObjectStore, open_store
from tests.fixtures.stores.recording import RecordingBackend, replay

PROVENANCE = Provenance(code_version="test", config_digest="0" * 64, seed=0)
NUMERICS = Numerics(backend="b", device="cpu", compute_dtype="float32", threads=1, max_tokens=1)
STEPS = 4
"""Steps of the run `used`. After each there is a named checkpoint. Steps 1 to 3 are used, each by another object."""


def weights(folder: Path) -> dict[str, Path]:
    path = folder / uuid4().hex
    path.write_bytes(b"weights")
    return {"weights": path}


def used_chain(store: ObjectStore) -> Chain:
    return Chain(store, "used", "0-sft", "policy")


def used_run(store: ObjectStore, folder: Path) -> None:
    """Takes the steps of the run `used`, with a named checkpoint of each, from a registered model."""
    base = publish_model(store, "base", "1", weights(folder), provenance=PROVENANCE)
    create_or_check_run(store, "used", semantic={}, other={"checkpoints": {"keep_named": 0}}, code_version="test")
    chain = used_chain(store)
    chain.create_root(Root(base=base, base_digest="0" * 64))
    batch = ArtifactRef(kind="batch", key="b", sha256="0", bytes=1, rows=1, parents=())
    for step in range(STEPS):
        request = StepRequest(parent=chain.policy(step), batch=batch, loss={}, optimizer=OptimizerSpec(lr=1.0))
        chain.commit(CommitRecord(
            request=request, state=request.next_state(), updates=1, numerics=NUMERICS, weights_digest="0"
        ))
        state = chain.policy(step + 1).state
        commit_files(
            store, keys.checkpoint("used", "0-sft", "policy", step + 1), weights(folder), kind="checkpoint",
            provenance=PROVENANCE, extra={"name": f"named-{step + 1}", "state": state, "rebase": None},
        )  # fmt: skip
    store.put(keys.result_json("used"), b"{}")


def use_it(store: ObjectStore, folder: Path) -> None:
    """Uses the run: a fork at step 1, a stage in progress that began at step 2, a champion that was made from step 3,
    and a decision by an evaluation of the run."""
    chain = used_chain(store)
    fork_run(store, "used", "forked", step=1, code_version="test")
    acquire_lease(store, "started", {})
    start = chain.policy(2)
    Chain(store, "started", "1-dpo", "policy").create_root(Root(start=start, base_digest=start.state))
    publish_model(store, "m", "1", weights(folder), provenance=PROVENANCE, parents=[chain.policy(3).uri])
    evaluation = commit_bytes(
        store, keys.evaluation("used", "0-sft", "final"), b"{}", kind="evaluation", suffix=".json",
        provenance=PROVENANCE,
    )  # fmt: skip
    commit_decision(
        store, "m", "1", "promote", over=champion_of(store, "m"), reasons=["better"], who="ada",
        provenance=PROVENANCE, evaluation=evaluation.uri, decision_id="d1",
    )  # fmt: skip


def used_policies(store: ObjectStore) -> set[PolicyRef]:
    """Returns the policies of the run `used` that something uses, from all objects of the store."""
    used: set[PolicyRef] = set()
    for info in store.list():
        run, chain_name = keys.run_of(info.key), keys.chain_of(info.key)
        if run is not None and info.key == keys.fork_json(run):
            fork = read_fork(store, run)
            used |= set(fork.shared) if fork else set()
        elif chain_name is not None and info.key == keys.chain_root(*chain_name):
            root = Chain(store, *chain_name).root()
            if root is not None and root.start is not None:
                used.add(root.start)
    chain = used_chain(store)
    for name in list_models(store):
        champion = champion_of(store, name)
        for version in list_versions(store, name):
            if champion is not None and champion.version == version:
                parents = read_manifest(store, keys.model_version(name, version)).parents
                used |= {chain.policy(step) for step in range(STEPS + 1) if chain.policy(step).uri in parents}
    return {policy for policy in used if policy.run == "used"}


def check_nothing_is_lost(store: ObjectStore) -> None:
    """Checks that the index has every entry, and that pruning and garbage collection keep every checkpoint in use."""
    assert list(missing_entries(store, list(store.list()))) == []
    used = used_policies(store)
    policies = {used_chain(store).policy(step) for step in range(1, STEPS + 1)}
    assert set(reasons_to_keep(store, policies)) == used
    prune_checkpoints(store, used_chain(store).policy(STEPS), Retention(keep_named=0, finished=True))
    collect_garbage(store, threads=1)
    assert stored_checkpoint_steps(used_chain(store)) == sorted({policy.step for policy in used} | {STEPS})
    if any(policy.step in (1, 2) for policy in used):
        with pytest.raises(RunInUse):
            delete_runs(store, "used", force=True)


def test_a_process_that_uses_a_run_may_die_after_any_write(tmp_path: Path) -> None:
    backend = RecordingBackend(f"index-{uuid4().hex}")
    store = ObjectStore(backend)
    used_run(store, tmp_path)
    before = len(backend.changes)
    use_it(store, tmp_path)
    assert {policy.step for policy in used_policies(store)} == {1, 2, 3}
    for count in range(before, len(backend.changes) + 1):
        check_nothing_is_lost(ObjectStore(replay(backend.changes[:count], f"index-{uuid4().hex}")))


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_a_process_may_be_killed_between_an_entry_and_what_it_points_to(tmp_path: Path, number: int) -> None:
    store = open_store(tmp_path / "store")
    used_run(store, tmp_path)
    code = (
        "from pathlib import Path\n"
        "from storage.store.objects import open_store\n"
        "from tests.storage.store.test_index import use_it\n"
        f"use_it(open_store({str(tmp_path / 'store')!r}), Path({str(tmp_path)!r}))"
    )
    environment = os.environ | {"OSTINATO_FAILPOINT": f"index.recorded:{number}", "PYTHONPATH": os.getcwd()}
    killed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    check_nothing_is_lost(store)
    # the same calls finish what was begun
    use_it(store, tmp_path)
    assert {policy.step for policy in used_policies(store)} >= {1, 2}
    assert list(missing_entries(store, list(store.list()))) == []


# -- a lost index ----------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    store = open_store(tmp_path / "store")
    used_run(store, tmp_path)
    use_it(store, tmp_path)
    return store


def index_of(store: ObjectStore) -> set[str]:
    return {info.key for info in store.list("index/")}


def test_without_its_index_a_store_deletes_nothing_that_may_be_used(store: ObjectStore) -> None:
    entries = index_of(store)
    for key in entries:
        store.delete(key)
    steps = stored_checkpoint_steps(used_chain(store))
    prune_checkpoints(store, used_chain(store).policy(STEPS), Retention(keep_named=0, finished=True))
    collect_garbage(store)
    assert stored_checkpoint_steps(used_chain(store)) == steps
    for delete in (lambda: delete_runs(store, "used", force=True), lambda: delete_model(store, "base", "1")):
        with pytest.raises(IndexIncomplete, match="rebuild it with: ostinato doctor --deep"):
            delete()
    # a new run in the store does not make its index complete
    create_or_check_run(store, "later", semantic={}, other={}, code_version="test")
    with pytest.raises(IndexIncomplete):
        plan_deletion(store, "used")


def test_the_index_is_rebuilt_and_reported(store: ObjectStore) -> None:
    entries = index_of(store)
    for key in entries:
        store.delete(key)
    problems = audit_store(store, read_bytes=False).problems
    missing = {problem.key for problem in problems if problem.what == "is missing in the index"}
    assert missing == entries - {keys.index_complete()}
    assert rebuild_index(store) == len(entries) - 1
    assert index_of(store) == entries
    assert rebuild_index(store) == 0
    problems = audit_store(store, read_bytes=False).problems
    assert not any(problem.what == "is missing in the index" for problem in problems)
    with pytest.raises(ModelInUse, match="used began at base@1"):
        delete_model(store, "base", "1")


# -- what the index shows --------------------------------------------------------------------------------------


def test_the_runs_of_a_store(store: ObjectStore) -> None:
    assert list_runs(store) == sorted(runs_of(store)) == ["forked", "started", "used"]
    record_run(store, "s/1")
    store.put(keys.run_json("s/1"), b"{}")
    store.put(keys.run_json("s.json/1"), b"{}")
    record_run(store, "s.json/1")
    record_run(store, "s.json")
    assert list_runs(store, "s") == ["s.json", "s.json/1", "s/1", "started"]
    assert list_runs(store, "s/") == ["s/1"]
    (model,) = describe_run(store, "used").models
    assert (model.model, model.policy) == ("m@1", used_chain(store).policy(3).uri)
    assert [chain.stage for chain in run_chains(store, "started")] == ["1-dpo"]
    assert {chain.run for chain in all_chains(store)} == {"forked", "started", "used"}


def test_a_deleted_run_leaves_the_entries_of_what_stays(store: ObjectStore) -> None:
    delete_runs(store, "forked")
    delete_runs(store, "started", no_active_runs=True)
    assert not any("/forked" in key or "/started" in key for key in index_of(store))
    delete_runs(store, "used", force=True)
    assert users_of(store, "models/base/1") == []
    assert users_of(store, keys.run_prefix("used")) == [
        "models/m/1/manifest.json", keys.manifest(keys.model_note("m", "decisions", "d1")),
    ]  # fmt: skip
    assert audit_store(store).problems == ()
    assert list_runs(store) == [] and find_artifact(store, "models/m/1") is not None


def test_the_scopes_of_a_store_have_each_object_once(store: ObjectStore) -> None:
    for key in ("notes", "runs/notes", "runs/used/notes", "runs/s/notes", "elsewhere/a/b", "models/notes"):
        store.put(key, b"{}")
    for run in ("s", "s/1", "s/2", "used/1"):
        store.put(keys.run_json(run), canonical_json({}))
    listed = [info.key for scope in scopes_of(store) for info in scope.objects(store)]
    assert sorted(listed) == [info.key for info in store.list()]
    assert sorted(runs_of(store)) == ["forked", "s", "s/1", "s/2", "started", "used", "used/1"]
