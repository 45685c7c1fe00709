"""Garbage collection deletes unreferenced data once it is old, and nothing that a committed artifact needs."""

from __future__ import annotations

import os
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from storage.errors import ObjectNotFound, PermanentStorageError
from storage.inspect.gc import GcReport, ObjectTotals, collect_garbage
from storage.registry.models import publish_model
from storage.serialization import digest
from storage.store import key_patterns, keys
from storage.store.artifacts import commit_files, read_manifest
from storage.store.backends.memory import MemoryBackend
from storage.store.objects import ObjectStore, open_store
from tests.fixtures.clocks import Clock
from tests.fixtures.stores.gc_store import ATTEMPT, CHECKPOINT, HOUR, NOW, PROVENANCE, STEP, all_keys, commit_rows


@pytest.fixture
def clock() -> Clock:
    return Clock(NOW)


@pytest.fixture
def store(clock: Clock) -> ObjectStore:
    return ObjectStore(MemoryBackend(f"gc-{uuid4().hex}", clock), clocks=(clock,))


# -- kinds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "kind", "owner"),
    [
        (keys.store_json(), "standalone", None),
        (keys.run_json("r"), "standalone", None),
        (keys.vote("a1"), "standalone", None),
        (keys.run_json("deployment/2026-01-01"), "standalone", None),
        (keys.report("r"), "standalone", None),
        (keys.index_complete(), "standalone", None),
        (keys.index_run("deployment/2026-01-01"), "standalone", None),
        (keys.index_run("r", "chains"), "standalone", None),
        (keys.index_use(keys.run_prefix("r"), keys.fork_json("d/2026")), "standalone", None),
        (keys.index_use("models/m/1", keys.chain_root("r", "0-s", "p")), "standalone", None),
        (keys.index_use(keys.run_prefix("r"), keys.manifest_of_files("models/m/1")), "standalone", None),
        ("index/notes.txt", "unknown", None),
        (keys.lease("r", 3), "standalone", None),
        (keys.stage_json("r", "0-s"), "standalone", None),
        (keys.step_metrics("r", "0-s", 3), "standalone", None),
        (keys.chain_root("r", "0-s", "p"), "standalone", None),
        (keys.chain_record("r", "0-s", "p", 3), "standalone", None),
        (keys.checkpoint_name(CHECKPOINT), "standalone", None),
        (keys.model_claim("m", "1"), "standalone", None),
        (keys.model_alias("m", "latest", 1), "standalone", None),
        (keys.manifest(STEP), "manifest", STEP),
        (f"{STEP}.{ATTEMPT}.parquet", "attempt", STEP),
        (keys.manifest_of_files(CHECKPOINT), "manifest", CHECKPOINT),
        (f"{CHECKPOINT}/{ATTEMPT}/model/weights.safetensors", "attempt", CHECKPOINT),
        # a policy whose name looks like an attempt
        (keys.manifest_of_files(keys.checkpoint("r", "0-s", ATTEMPT, 4)), "manifest",
         keys.checkpoint("r", "0-s", ATTEMPT, 4)),
        (keys.manifest(keys.evaluation("r", "0-s", "final.v2")), "manifest", keys.evaluation("r", "0-s", "final.v2")),
        (f"{keys.evaluation('r', '0-s', 'final.v2')}.{ATTEMPT}.parquet", "attempt",
         keys.evaluation("r", "0-s", "final.v2")),
        (keys.manifest(keys.dataset("d", "1")), "manifest", keys.dataset("d", "1")),
        (f"{keys.dataset('d', '1')}.{ATTEMPT}.parquet", "attempt", keys.dataset("d", "1")),
        (keys.manifest_of_files(keys.model_version("m", "1")), "manifest", "models/m/1"),
        ("models/m/1/sub/manifest.json", "published", "models/m/1"),
        (f"models/m/1/{ATTEMPT}/x", "published", "models/m/1"),
        (f"uploads/m/{'a' * 64}/manifest.json", "upload", f"uploads/m/{'a' * 64}"),
        (f"uploads/m/{'a' * 64}/{ATTEMPT}/x", "upload", f"uploads/m/{'a' * 64}"),
        (keys.agent_call("runs/r/stages/0-s/steps/000001/rollouts/00000", "a" * 64), "standalone", None),
        (f"doctor/{ATTEMPT}/large", "probe", None),
        ("doctor/notes.txt", "unknown", None),
        ("notes.txt", "unknown", None),
        (f"elsewhere/{ATTEMPT}/x", "unknown", None),
        (f"{STEP}.parquet", "unknown", None),
        (f"runs/r/stages/0-s/steps/000001/rollouts/00000/{ATTEMPT[:-1]}/x", "unknown", None),
    ],
)  # fmt: skip
def test_the_kind_of_a_key(key: str, kind: str, owner: str | None) -> None:
    assert (key_patterns.classify_key(key), key_patterns.owning_artifact(key)) == (kind, owner)


# -- what goes and what stays ----------------------------------------------------------------------------------


def fill(store: ObjectStore, tmp_path: Path) -> set[str]:
    """Writes one object of every kind that is kept. Returns all keys."""
    (tmp_path / "weights").write_bytes(b"weights")
    commit_rows(store)
    commit_files(store, CHECKPOINT, {"w": tmp_path / "weights"}, kind="checkpoint", provenance=PROVENANCE, move=False)
    publish_model(store, "m", "1", {"w": tmp_path / "weights"}, provenance=PROVENANCE)
    for key in (keys.store_json(), keys.run_json("r"), keys.lease("r", 1), keys.stage_json("r", "0-s"),
                keys.chain_record("r", "0-s", "p", 1), keys.report("r"), keys.checkpoint_name(CHECKPOINT)):  # fmt: skip
        store.put(key, b"{}")
    return set(all_keys(store))


GARBAGE = {
    f"{STEP}.{ATTEMPT}.parquet": "attempt without a manifest",  # a loser's, next to the winner
    f"{keys.step_artifact('r', '0-s', 2, 'graded', 3)}.{ATTEMPT}.parquet": "attempt without a manifest",
    f"{keys.checkpoint('r', '0-s', 'p', 9)}/{ATTEMPT}/w": "attempt without a manifest",
    f"uploads/m/{'a' * 64}/{ATTEMPT}/w": "uploaded model that was not imported",
    f"uploads/m/{'a' * 64}/manifest.json": "uploaded model that was not imported",
    f"doctor/{ATTEMPT}/large": "test object of the store",  # its process was killed
}


def test_old_data_that_nothing_names_goes_and_the_rest_stays(
    store: ObjectStore, clock: Clock, tmp_path: Path
) -> None:
    live = fill(store, tmp_path)
    for key in GARBAGE:
        store.put(key, b"12345")
    store.put("my notes".replace(" ", "-"), b"foreign")
    clock.now += 24 * HOUR
    young = f"{keys.step_artifact('r', '0-s', 3, 'graded', 0)}.{ATTEMPT}.parquet"
    before = set(all_keys(store))
    report = collect_garbage(store)  # exactly 24 h old, not older
    assert report.total == ObjectTotals() and set(all_keys(store)) == before
    clock.now += 1
    store.put(young, b"123")
    dry = collect_garbage(store, dry_run=True)
    assert set(all_keys(store)) == before | {young}
    report = collect_garbage(store)
    assert set(report.names) == set(GARBAGE) and report.total == ObjectTotals(objects=6, bytes=30)
    assert report.deleted["attempt without a manifest"] == ObjectTotals(objects=3, bytes=15)
    assert dry.deleted == report.deleted and dry.names == report.names
    assert set(all_keys(store)) == live | {young, "my-notes"}
    assert report.unknown == ("my-notes",)
    assert report.kept["younger than the given age"] == ObjectTotals(objects=1, bytes=3)
    assert report.kept["in use"].objects == len(live)
    assert collect_garbage(store).total == ObjectTotals()


def test_a_dry_run_of_any_age_lists_all_that_nothing_names(store: ObjectStore, tmp_path: Path) -> None:
    fill(store, tmp_path)
    for key in GARBAGE:
        store.put(key, b"12345")
    assert collect_garbage(store, dry_run=True).names == ()
    report = collect_garbage(store, older_than=timedelta(seconds=-1), exclusive=True, dry_run=True)
    assert report.names == tuple(sorted(GARBAGE))
    assert {reason: totals.objects for reason, totals in report.deleted.items()} == Counter(GARBAGE.values())


def test_an_empty_store_is_not_even_made(tmp_path: Path) -> None:
    report = collect_garbage(open_store(tmp_path / "store"))
    assert report.total == ObjectTotals() and not (tmp_path / "store").exists()


def test_an_age_that_a_running_writer_can_reach_is_refused(store: ObjectStore) -> None:
    with pytest.raises(ValueError, match="give at least 13:00:00"):
        collect_garbage(store, older_than=timedelta(hours=12.9))
    assert collect_garbage(store, older_than=timedelta(hours=13)).total == ObjectTotals()
    assert collect_garbage(store, older_than=timedelta(0), exclusive=True).total == ObjectTotals()


def test_an_incomplete_version_of_a_model_stays_while_somebody_may_write(store: ObjectStore, clock: Clock) -> None:
    store.put(keys.model_claim("m", "1"), b"{}")
    store.put("models/m/1/weights", b"12345")
    clock.now += 1000 * HOUR
    report = collect_garbage(store)
    (why,) = (why for why in report.kept if "incomplete version" in why)
    assert report.kept[why] == ObjectTotals(objects=1, bytes=5)
    assert collect_garbage(store, exclusive=True).names == ("models/m/1/weights",)
    assert all_keys(store) == [keys.model_claim("m", "1")]


def test_nothing_beside_an_unreadable_manifest_is_deleted(store: ObjectStore, clock: Clock) -> None:
    commit_rows(store)
    store.put(keys.manifest(STEP), store.get(keys.manifest(STEP))[:-9])
    store.put(f"{STEP}.{ATTEMPT}.parquet", b"of another attempt: one of the two may be named")
    before = all_keys(store)
    clock.now += 25 * HOUR
    report = collect_garbage(store)
    assert all_keys(store) == before and report.unreadable == (keys.manifest(STEP),)
    store.put(keys.manifest(STEP), b'{"schema_version": 99}')
    with pytest.raises(PermanentStorageError, match=r"has schema version 99.*Nothing more was deleted"):
        collect_garbage(store)


def test_a_model_that_is_handed_over_goes_as_a_whole(store: ObjectStore, clock: Clock) -> None:
    data, manifest = f"uploads/m/{'a' * 64}/{ATTEMPT}/w", f"uploads/m/{'a' * 64}/manifest.json"
    store.put(data, b"1")
    clock.now += 10 * HOUR
    store.put(manifest, b"{}")
    clock.now += 20 * HOUR
    assert collect_garbage(store).names == ()  # the data is older than a day, its manifest is not
    clock.now += 5 * HOUR
    assert collect_garbage(store).names == tuple(sorted((data, manifest)))


def test_one_run_is_collected_alone(store: ObjectStore, clock: Clock, tmp_path: Path) -> None:
    fill(store, tmp_path)
    for key in GARBAGE:
        store.put(key, b"12345")
    store.put(keys.run_json("r/nested"), b"{}")
    store.put(f"{keys.step_artifact('r/nested', '0-s', 1, 'graded', 0)}.{ATTEMPT}.parquet", b"1")
    clock.now += 25 * HOUR
    others = {key for key in all_keys(store) if keys.run_of(key) != "r"}
    listed: list[str] = []
    real = store.backend.list
    store.backend.list = lambda prefix: listed.append(prefix) or real(prefix)  # type: ignore[method-assign,func-returns-value]
    assert collect_garbage(store, run="r").names == tuple(sorted(key for key in GARBAGE if keys.run_of(key) == "r"))
    assert all(prefix.startswith("runs/r/") and prefix != "runs/r/" for prefix in listed)
    assert {key for key in all_keys(store) if keys.run_of(key) != "r"} == others
    assert len(collect_garbage(store, run="r/nested").names) == 1
    with pytest.raises(ObjectNotFound, match="no run 'none'"):
        collect_garbage(store, run="none")


# -- a folder --------------------------------------------------------------------------------------------------


def later(store: ObjectStore, hours: float, **options: Any) -> GcReport:
    return collect_garbage(store, now=store.now() + hours * HOUR, **options)


def test_what_killed_writers_left_in_a_folder(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    commit_rows(store)
    live = sorted(path for path in (tmp_path / "store").rglob("*"))
    (tmp_path / "store/runs/~0123").write_bytes(b"half")
    scratch = tmp_path / "store/~scratch-1/deep"
    scratch.mkdir(parents=True)
    (scratch / "weights").write_bytes(b"12345")
    assert later(store, 23).names == ()
    report = later(store, 25)
    assert report.deleted == {
        "scratch folder": ObjectTotals(objects=1, bytes=5), "temporary file": ObjectTotals(objects=1, bytes=4),
    }  # fmt: skip
    assert sorted((tmp_path / "store").rglob("*")) == live


def test_a_scratch_folder_in_use_is_as_young_as_its_youngest_file(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    folder = tmp_path / "store/~scratch-1"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"12345")
    in_an_hour = store.now() + HOUR
    os.utime(folder / "weights", (in_an_hour, in_an_hour))
    assert later(store, 24.5).names == ()
    assert later(store, 25.5).names == ("~scratch-1",)


def test_an_old_file_of_the_store_that_gets_a_new_name_is_young(tmp_path: Path) -> None:
    """A checkpoint of last week is published today by a link. Its data must not be collected before its manifest is
    written."""
    store = open_store(tmp_path / "store")
    commit_rows(store)
    stored = store.local_path(read_manifest(store, STEP).files[0].key)
    assert stored is not None
    week_ago = store.now() - 7 * 24 * HOUR
    os.utime(stored, (week_ago, week_ago))
    key = f"{keys.step_artifact('r', '0-s', 2, 'rollouts', 0)}.{ATTEMPT}.parquet"
    store.put_file(key, stored)
    assert collect_garbage(store).names == ()
    assert later(store, 25).names == (key,)
    assert digest(stored.read_bytes()) == read_manifest(store, STEP).files[0].sha256
