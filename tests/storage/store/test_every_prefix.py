"""A crash of the process or a power loss after any operation: readers see whole artifacts or none, acknowledged
operations are visible, and a repetition of the scenario gives the same result as without a crash."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from storage.chain.records import Chain, CommitRecord, Numerics, OptimizerSpec, PolicyRef, Root, StepRequest
from storage.chain.retention import Retention, prune_checkpoints
from storage.errors import CorruptArtifact
from storage.inspect.gc import collect_garbage
from storage.registry.decisions import CHAMPION, Decision, apply_decision
from storage.registry.models import publish_model, resolve_alias
from storage.serialization import digest
from storage.store import key_patterns, keys
from storage.store.artifacts import ArtifactRef, Provenance, commit_bytes, commit_file, commit_files, find_artifact
from storage.store.backends import local
from storage.store.backends.local import LocalBackend
from storage.store.download import materialise_files
from storage.store.objects import ObjectStore
from tests.fixtures.stores.recording import RecordingBackend, TracedDisk, images, replay, write_tree

PROVENANCE = Provenance(code_version="abc", config_digest="0" * 64, seed=7)
CHAIN = ("r", "0-s", "policy")
NUMERICS = Numerics(backend="b", device="cpu", compute_dtype="float32", threads=1, max_tokens=1)
LATER = 100 * 3600.0
PROMOTION = Decision(
    id="first", model="m", version="1", action="promote", champion=None, after=0, reasons=("better",), who="ada",
    created="2026-01-01T00:00:00+00:00",
)  # fmt: skip
Acknowledge = Callable[[], None]


def scenario(store: ObjectStore, scratch: Path, acknowledge: Acknowledge = lambda: None) -> None:
    """Takes two steps of a run (batch, record, checkpoint, pruning), publishes two versions, promotes one and
    collects garbage. Calls `acknowledge` after each operation."""
    chain = Chain(store, *CHAIN)
    chain.create_root(Root(base_digest="0" * 64))
    acknowledge()
    # two steps, each with a checkpoint
    for step in range(2):
        parent = chain.policy(step)
        batch = committed_batch(store, scratch, step)
        acknowledge()
        request = StepRequest(parent=parent, batch=batch, loss={}, optimizer=OptimizerSpec(lr=1.0))
        chain.commit(CommitRecord(
            request=request, state=request.next_state(), updates=1, numerics=NUMERICS, weights_digest="0"
        ))
        acknowledge()
        if find_artifact(store, keys.checkpoint(*CHAIN, step + 1)) is None:
            commit_files(
                store, keys.checkpoint(*CHAIN, step + 1), files(scratch, f"{step}"), kind="checkpoint",
                provenance=PROVENANCE,
            )  # fmt: skip
        acknowledge()
        prune_checkpoints(store, chain.policy(step + 1), Retention(keep_last=1))
        acknowledge()
    # two published versions, and a collection
    for version in ("1", "2"):
        publish_model(store, "m", version, files(scratch, version), provenance=PROVENANCE)
        acknowledge()
    apply_decision(store, PROMOTION)
    acknowledge()
    collect_garbage(store, now=store.now() + LATER, threads=1)
    acknowledge()


def committed_batch(store: ObjectStore, scratch: Path, step: int) -> ArtifactRef:
    key, data = keys.step_artifact("r", "0-s", step, "batch", 0), f"batch {step}".encode() * 9
    if step:
        return commit_bytes(store, key, data, kind="batch", suffix=".parquet", provenance=PROVENANCE)
    (scratch / "batch").write_bytes(data)
    return commit_file(store, key, scratch / "batch", kind="batch", suffix=".parquet", provenance=PROVENANCE)


def files(scratch: Path, text: str) -> dict[str, Path]:
    paths = {}
    for name in ("config.json", "weights"):
        paths[name] = scratch / f"{uuid4().hex}-{name}"
        paths[name].write_text(f"{name} {text} " * 5)
    return paths


Seen = dict[str, object]


def seen(store: ObjectStore, scratch: Path) -> Seen:
    """Returns what a reader sees: artifacts (each read whole and checked), states of the chain, aliases.

    Raises CorruptArtifact for anything torn.
    """
    state: Seen = {}
    for info in store.list():
        owner = key_patterns.artifact_of_manifest(info.key)
        if owner is not None:
            ref = find_artifact(store, owner)
            assert ref is not None
            materialise_files(store, owner, scratch / uuid4().hex)
            state[owner] = ref.sha256
    chain = Chain(store, *CHAIN)
    if chain.root() is not None:
        steps = [0, *chain.steps()]
        assert steps == list(range(len(steps)))
        list(chain.records(0, steps[-1]))
        for step in steps:
            state[f"step {step}"] = chain.policy(step).state
    for alias in ("latest", CHAMPION):
        state[alias] = resolve_alias(store, "m", alias)
    return state


def finished(store: ObjectStore, scratch: Path, expected: Seen) -> None:
    """Repeats the scenario, and checks that it ends as expected, before and after a garbage collection."""
    scenario(store, scratch)
    assert seen(store, scratch) == expected
    collect_garbage(store, now=store.now() + LATER, exclusive=True, threads=1)
    assert seen(store, scratch) == expected
    assert list(store.leftovers()) == []


def recorded(scratch: Path) -> tuple[RecordingBackend, Seen]:
    backend = RecordingBackend(f"recorded-{uuid4().hex}")
    store = ObjectStore(backend)
    scenario(store, scratch)
    return backend, seen(store, scratch)


def test_a_process_may_die_after_any_operation(tmp_path: Path) -> None:
    backend, expected = recorded(tmp_path)
    assert len(backend.changes) > 25
    for count in range(len(backend.changes) + 1):
        store = ObjectStore(replay(backend.changes[:count], f"prefix-{uuid4().hex}"))
        seen(store, tmp_path)
        finished(store, tmp_path, expected)


def test_the_end_is_the_one_that_was_asked_for(tmp_path: Path) -> None:
    _, expected = recorded(tmp_path)
    assert expected["champion"] == "1" and expected["latest"] == "2"
    policy = PolicyRef(run="r", stage="0-s", model="policy", step=0, state=Root(base_digest="0" * 64).state())
    assert expected["step 0"] == policy.state and "step 2" in expected and "step 3" not in expected
    assert expected[keys.step_artifact("r", "0-s", 1, "batch", 0)] == digest(b"batch 1" * 9)
    assert keys.checkpoint(*CHAIN, 2) in expected and keys.checkpoint(*CHAIN, 1) not in expected


def crash(tmp_path: Path, patch: pytest.MonkeyPatch, *, resume_every: int) -> int:
    """Checks every disk image that a power loss at any moment of the scenario can leave. Returns the number of
    different images."""
    root, scratch = tmp_path / "store", tmp_path / "scratch"
    root.mkdir()
    scratch.mkdir()
    # run the scenario, and record what is visible after each acknowledged operation
    after: list[Seen] = [{}]
    with patch.context() as patched:
        disk = TracedDisk(root, patched)
        store = ObjectStore(LocalBackend(root))
        scenario(store, scratch, lambda: (disk.acknowledge(), after.append(seen(store, scratch)))[0])
    expected, rng, known = after[-1], random.Random(1), set()
    # every possible disk image must show all acknowledged operations
    for disk_then, acknowledged in disk.moments:
        for tree in images(disk_then, disk.top, rng):
            if (tree, acknowledged) in known:
                continue
            known.add((tree, acknowledged))
            image = tmp_path / f"image-{len(known)}"
            image.mkdir()
            write_tree(tree, image)
            store = ObjectStore(LocalBackend(image))
            now = seen(store, scratch)
            for what, value in after[acknowledged].items():
                # the next operation may have changed the value
                changes = after[min(acknowledged + 1, len(after) - 1)].get(what) != value
                assert changes or now.get(what) == value, f"{what} was acknowledged and is lost"
            if len(known) % resume_every == 0:
                finished(store, scratch, expected)
    return len(known)


def test_the_power_may_go_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert crash(tmp_path, monkeypatch, resume_every=10) > 100


@pytest.mark.parametrize("unsynced", ["_sync_file", "_sync_folder", "file of a put"])
def test_that_test_finds_a_missing_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unsynced: str) -> None:
    if unsynced.startswith("_"):
        monkeypatch.setattr(local, unsynced, lambda path: None)
    else:
        monkeypatch.setattr(local, "_write", lambda path, data: path.write_bytes(data) and None)
    with pytest.raises((CorruptArtifact, AssertionError, KeyError)):
        crash(tmp_path, monkeypatch, resume_every=10**9)
