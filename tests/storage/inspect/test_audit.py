"""The audit finds exactly the damage in a copy of a real run, and nothing in the run itself."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from storage.chain.records import Chain, CommitRecord, Root
from storage.errors import ObjectNotFound
from storage.inspect.audit import AuditReport, audit_store
from storage.serialization import canonical_json
from storage.store import keys
from tests.fixtures.runs.toy_run import ToyRun

RECORD = "runs/toy/stages/0-grpo/chains/policy/{:06d}.json"
CURSORS = ("cursor_in", "cursor_out")


@pytest.fixture
def broken(toy_run: ToyRun, tmp_path: Path) -> ToyRun:
    return toy_run.copied(tmp_path / "copy")


def found(run: ToyRun) -> list[tuple[str, str]]:
    """Returns (severity, key) of each problem."""
    return [(problem.severity, problem.key) for problem in audit_store(run.store).problems]


def only(run: ToyRun) -> str:
    """Returns the text of the only problem."""
    problems = audit_store(run.store).problems
    assert len(problems) == 1, problems
    return f"{problems[0].key} {problems[0].what}"


def data_of(run: ToyRun, key: str) -> Path:
    """Returns the key of the first file of an artifact."""
    for at in (keys.manifest(key), keys.manifest_of_files(key)):
        if (run.folder / at).exists():
            return run.folder / json.loads((run.folder / at).read_bytes())["files"][0]["key"]
    raise AssertionError(f"no manifest of {key}")


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_finished_run_has_no_finding(toy_run: ToyRun) -> None:
    report = audit_store(toy_run.store)
    assert report == AuditReport(problems=(), pending=(), counts=report.counts)
    assert report.counts["steps"] == 4
    assert report.counts["checkpoints"] == 2
    # a dataset, a base and a published model, two checkpoints, and five tables a step
    assert report.counts["artifacts"] == 5 + 4 * 5


def test_one_run_is_checked_alone(broken: ToyRun) -> None:
    broken.store.put("notes.txt", b"a person's")
    Chain(broken.store, "other", "0-sft", "policy").create_root(Root(base_digest="of nothing"))
    assert len(found(broken)) == 2
    report = audit_store(broken.store, run="toy")
    assert (report.problems, report.counts["steps"], report.counts["chains"]) == ((), 4, 1)
    (problem,) = audit_store(broken.store, run="other").problems
    assert problem.key == keys.chain_root("other", "0-sft", "policy")
    with pytest.raises(ObjectNotFound, match="no run 'none'"):
        audit_store(broken.store, run="none")


def test_a_flipped_byte_in_a_checkpoint(broken: ToyRun) -> None:
    file = data_of(broken, keys.checkpoint("toy", "0-grpo", "policy", 2))
    flip_a_byte(file)
    assert only(broken).startswith(f"{file.relative_to(broken.folder)} has {file.stat().st_size} bytes with sha256")


def test_a_deleted_batch(broken: ToyRun) -> None:
    batch = keys.step_artifact("toy", "0-grpo", 1, "batch", 0)
    data_of(broken, batch).unlink()
    (broken.folder / keys.manifest(batch)).unlink()
    assert found(broken) == [("error", batch)]


def test_a_tampered_record(broken: ToyRun) -> None:
    path = broken.folder / RECORD.format(2)
    record = json.loads(path.read_bytes())
    record["request"]["optimizer"]["lr"] = 0.5
    path.write_bytes(canonical_json(record))
    # the state no longer follows from the request
    assert only(broken).startswith(f"{RECORD.format(2)} says state {record['state'][:12]}")


def test_a_step_that_skips_rows_of_the_dataset(broken: ToyRun) -> None:
    path = broken.folder / RECORD.format(4)
    record = CommitRecord.model_validate_json(path.read_bytes())
    # both positions move, so that the step takes as many rows as its batch has prompts
    request = record.request
    shifted = {name: getattr(request, name) | {"index": getattr(request, name)["index"] + 1} for name in CURSORS}
    request = request.model_copy(update=shifted)
    path.write_bytes(canonical_json(record.model_copy(update={"request": request, "state": request.next_state()})))
    problem = next(problem for problem in audit_store(broken.store).problems if problem.key == RECORD.format(4))
    before = record.request.cursor_in
    assert problem.what == (
        f"begins at epoch {before['epoch']}, index {before['index'] + 1} of its dataset, but the step before it ended "
        f"at epoch {before['epoch']}, index {before['index']}"
    )


def test_a_missing_record(broken: ToyRun) -> None:
    (broken.folder / RECORD.format(3)).unlink()
    # step 3 is gone, so the checkpoint of step 4 is of no known state
    assert found(broken) == [
        ("error", RECORD.format(3)),
        ("error", keys.checkpoint("toy", "0-grpo", "policy", 4)),
    ]


def test_a_shard_that_was_graded_twice_or_never(broken: ToyRun) -> None:
    shard = keys.step_artifact("toy", "0-grpo", 0, "graded", 1)
    manifest = broken.folder / keys.manifest(shard)
    body = json.loads(manifest.read_bytes())
    other_shard = keys.manifest(keys.step_artifact("toy", "0-grpo", 0, "rollouts", 0))
    other = json.loads((broken.folder / other_shard).read_bytes())
    body["parents"] = [f"{other['key']}#{other['sha256']}"]
    manifest.write_bytes(canonical_json(body))
    whats = [problem.what for problem in audit_store(broken.store).problems]
    assert whats[:2] == [
        "runs/toy/stages/0-grpo/steps/000000/rollouts/00000 was graded 2 times, expected once",
        "runs/toy/stages/0-grpo/steps/000000/rollouts/00001 was graded 0 times, expected once",
    ]
    # none of the eight completions of either shard is known to be graded
    assert len(whats) == 3
    assert whats[2].startswith("the batch has, and should not have, 16 graded completions")


def test_a_hole_in_the_leases(broken: ToyRun) -> None:
    for epoch in (2, 4):
        (broken.folder / keys.lease("toy", epoch)).write_bytes(b"{}")
    assert only(broken) == "runs/toy/leases/ the leases have no number 3, but 4"


def test_an_alias_of_a_version_that_is_gone(broken: ToyRun) -> None:
    (broken.folder / keys.model_alias("toy", "latest", 2)).write_bytes(b'{"version":"000009-beef"}')
    assert only(broken) == "models/toy/aliases/latest/ calls version 000009-beef 'latest', which is not published"


def test_data_without_a_manifest_is_pending_and_foreign_objects_are_findings(broken: ToyRun) -> None:
    attempt = f"{keys.step_artifact('toy', '0-grpo', 4, 'rollouts', 0)}.{'0' * 32}.parquet"
    broken.store.put(attempt, b"half a shard")
    broken.store.put("runs/toy/notes.txt", b"mine")
    report = audit_store(broken.store)
    assert report.pending == (attempt,)
    assert [(p.severity, p.key) for p in report.problems] == [("warning", "runs/toy/notes.txt")]


def test_a_checkpoint_of_another_history(broken: ToyRun) -> None:
    key = keys.checkpoint("toy", "0-grpo", "policy", 2)
    manifest = broken.folder / keys.manifest_of_files(key)
    body = json.loads(manifest.read_bytes())
    body["extra"]["state"] = Chain(broken.store, "toy", "0-grpo", "policy").policy(3).state
    manifest.write_bytes(canonical_json(body))
    assert found(broken) == [("error", key)]


def test_an_incomplete_model_stays_for_ever_so_it_is_a_finding_once_it_is_old(broken: ToyRun) -> None:
    torn = "models/torn/v1/model.safetensors"
    broken.store.put(torn, b"half")
    assert audit_store(broken.store).pending == (torn,)
    report = audit_store(broken.store, now=time.time() + 25 * 3600)
    assert report.pending == ()
    assert [(p.severity, p.key) for p in report.problems] == [("warning", torn)]


def test_a_released_lease_and_a_fork_are_no_foreign_objects(broken: ToyRun) -> None:
    broken.store.put(keys.lease_release("toy", 1), b"{}")
    broken.store.put(keys.fork_json("toy"), b"{}")
    assert found(broken) == []


def test_a_chain_that_starts_from_nothing(broken: ToyRun) -> None:
    Chain(broken.store, "other", "0-grpo", "policy").create_root(Root(base_digest="0" * 64))
    root = keys.chain_root("other", "0-grpo", "policy")
    assert only(broken) == f"{root} names neither a base model nor a policy that the chain starts from"
