"""Garbage collection: takes what nothing names once it is old, and never what a live state needs."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from storage.errors import AttemptTooOld, PermanentStorageError
from storage.inspect.gc import GcReport, ObjectTotals, collect_garbage, garbage_candidates
from storage.registry.models import publish_model
from storage.serialization import digest
from storage.store import artifacts, key_patterns, keys
from storage.store.artifacts import Provenance, commit_bytes, commit_files, find_artifact, read_manifest
from storage.store.backends.memory import MemoryBackend
from storage.store.objects import ObjectStore, open_store

PROVENANCE = Provenance(code_version="abc", config_digest="0" * 64, seed=7)
STEP = keys.step_artifact("r", "0-s", 1, "rollouts", 0)
CHECKPOINT = keys.checkpoint("d/2026", "0-s", "policy", 4)
ATTEMPT = "0123456789abcdef" * 2
HOUR = 3600.0


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> ObjectStore:
    return ObjectStore(MemoryBackend(f"gc-{uuid4().hex}", clock), clocks=(clock,))


def commit(store: ObjectStore, key: str = STEP, data: bytes = b"rows") -> None:
    commit_bytes(store, key, data, kind="thing", suffix=".parquet", provenance=PROVENANCE)


def names(store: ObjectStore) -> list[str]:
    return [info.key for info in store.list()]


# -- kinds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "kind", "owner"),
    [
        (keys.store_json(), "standalone", None),
        (keys.run_json("r"), "standalone", None),
        (keys.run_json("deployment/2026-01-01"), "standalone", None),
        (keys.report("r"), "standalone", None),
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
    """One of everything that lives; returns their keys."""
    (tmp_path / "weights").write_bytes(b"weights")
    commit(store)
    commit_files(store, CHECKPOINT, {"w": tmp_path / "weights"}, kind="checkpoint", provenance=PROVENANCE, move=False)
    publish_model(store, "m", "1", {"w": tmp_path / "weights"}, provenance=PROVENANCE)
    for key in (keys.store_json(), keys.run_json("r"), keys.lease("r", 1), keys.stage_json("r", "0-s"),
                keys.chain_record("r", "0-s", "p", 1), keys.report("r"), keys.checkpoint_name(CHECKPOINT)):  # fmt: skip
        store.put(key, b"{}")
    return set(names(store))


GARBAGE = {
    f"{STEP}.{ATTEMPT}.parquet": "attempt without a manifest",  # a loser's, beside the winner
    f"{keys.step_artifact('r', '0-s', 2, 'graded', 3)}.{ATTEMPT}.parquet": "attempt without a manifest",
    f"{keys.checkpoint('r', '0-s', 'p', 9)}/{ATTEMPT}/w": "attempt without a manifest",
    f"uploads/m/{'a' * 64}/{ATTEMPT}/w": "model handed over and not fetched",
    f"uploads/m/{'a' * 64}/manifest.json": "model handed over and not fetched",
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
    before = set(names(store))
    report = collect_garbage(store)  # not older than 24 h by a second
    assert report.total == ObjectTotals() and set(names(store)) == before
    clock.now += 1
    store.put(young, b"123")
    dry = collect_garbage(store, dry_run=True)
    assert set(names(store)) == before | {young}
    report = collect_garbage(store)
    assert set(report.names) == set(GARBAGE) and report.total == ObjectTotals(objects=5, bytes=25)
    assert report.deleted["attempt without a manifest"] == ObjectTotals(objects=3, bytes=15)
    assert dry.deleted == report.deleted and dry.names == report.names
    assert set(names(store)) == live | {young, "my-notes"}
    assert report.unknown == ("my-notes",)
    assert report.kept["younger than asked for"] == ObjectTotals(objects=1, bytes=3)
    assert report.kept["live"].objects == len(live)
    assert collect_garbage(store).total == ObjectTotals()


def test_candidates_tell_what_nothing_names_however_young(store: ObjectStore, tmp_path: Path) -> None:
    fill(store, tmp_path)
    for key in GARBAGE:
        store.put(key, b"12345")
    assert garbage_candidates(store) == []
    found = garbage_candidates(store, older_than=timedelta(seconds=-1))
    assert {one.name: one.reason for one in found} == GARBAGE


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
    assert names(store) == [keys.model_claim("m", "1")]


def test_nothing_beside_an_unreadable_manifest_is_deleted(store: ObjectStore, clock: Clock) -> None:
    commit(store)
    store.put(keys.manifest(STEP), store.get(keys.manifest(STEP))[:-9])
    before = names(store)
    clock.now += 25 * HOUR
    report = collect_garbage(store)
    assert names(store) == before and report.unreadable == (keys.manifest(STEP),)
    store.put(keys.manifest(STEP), b'{"schema_version": 99}')
    with pytest.raises(PermanentStorageError, match=r"has schema version 99.*Nothing was deleted"):
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


# -- writers at the same time ----------------------------------------------------------------------------------


class Meddling(ObjectStore):
    """Calls back before a chosen operation."""

    def __init__(self, store: ObjectStore, verb: str, times: int, then: Callable[[], None]) -> None:
        super().__init__(store.backend, clocks=store.clocks)
        real = getattr(self, verb)
        calls = iter(range(times, -1, -1))

        def meddled(*arguments: Any, **named: Any) -> Any:
            if next(calls, None) == 1:
                then()
            return real(*arguments, **named)

        setattr(self, verb, meddled)


@pytest.mark.parametrize(("verb", "times"), [("list", 1), ("now", 1), ("get", 1), ("get", 2), ("list", 2)])
def test_a_manifest_that_comes_late_saves_its_data(
    store: ObjectStore, clock: Clock, verb: str, times: int
) -> None:
    """Even one that no rule explains: the data is older than a day, and then it is committed."""
    commit(store)
    data = read_manifest(store, STEP).files[0].key
    body = store.get(keys.manifest(STEP))
    store.delete(keys.manifest(STEP))
    commit(store, keys.step_artifact("r", "0-s", 2, "rollouts", 0))
    clock.now += 25 * HOUR

    def arrives() -> None:
        store.put(keys.manifest(STEP), body)

    report = collect_garbage(Meddling(store, verb, times, arrives), threads=1)
    assert report.names == () and find_artifact(store, STEP) is not None
    assert store.exists(data)


class Turns:
    """Threads of which one runs at a time; a seeded generator says which, at every operation on the store."""

    def __init__(self, seed: int, clock: Clock) -> None:
        self.clock = clock
        self.random = random.Random(seed)
        self._turn: dict[str, threading.Semaphore] = {}
        self._back = threading.Semaphore(0)
        self._current = ""
        self.waiting_since: dict[str, float] = {}
        """When the operation began that each thread is in the middle of."""
        self.failures: list[BaseException] = []

    def yield_(self) -> None:
        me = self._current
        self.waiting_since[me] = self.clock()
        self._back.release()
        self._turn[me].acquire()
        del self.waiting_since[me]

    def run(self, actors: dict[str, Callable[[], None]], between: Callable[[], None]) -> None:
        threads = {}
        alive = dict.fromkeys(actors, True)
        for name, act in actors.items():
            self._turn[name] = threading.Semaphore(0)

            def body(name: str = name, act: Callable[[], None] = act) -> None:
                self._turn[name].acquire()
                try:
                    act()
                except BaseException as error:  # noqa: BLE001 - raised by the main thread
                    self.failures.append(error)
                alive[name] = False
                self._back.release()

            threads[name] = threading.Thread(target=body, daemon=True)  # a failed test leaves them behind
            threads[name].start()
        while names_alive := [name for name, is_alive in alive.items() if is_alive]:
            self._current = self.random.choice(names_alive)
            self._turn[self._current].release()
            self._back.acquire()
            between()
        for thread in threads.values():
            thread.join()


class TakingTurns(ObjectStore):
    """An operation, then another thread's turn."""

    def __init__(self, store: ObjectStore, turns: Turns) -> None:
        super().__init__(store.backend, clocks=store.clocks)
        for verb in ("get", "exists", "list", "put", "put_file", "put_if_absent", "delete", "now"):
            real = getattr(ObjectStore, verb).__get__(self)

            def in_turn(*arguments: Any, _real: Callable[..., Any] = real, **named: Any) -> Any:
                turns.yield_()
                return _real(*arguments, **named)

            setattr(self, verb, in_turn)


def whole(store: ObjectStore) -> int:
    """How many artifacts are committed; each file of each is read and checked."""
    owners = [key for info in store.list() if (key := key_patterns.artifact_of_manifest(info.key)) is not None]
    for owner in owners:
        for entry in read_manifest(store, owner).files:
            assert store.exists(entry.key), f"{entry.key} was committed and is gone"
            assert digest(store.get(entry.key)) == entry.sha256
    return len(owners)


def interleave(seed: int, folder: Path, *, frozen: bool = False) -> tuple[int, int]:
    """Writers and collectors in a random order of their operations, over days; returns (refused, committed).

    A single operation takes less than 12 hours, and then nothing is torn at any moment; or writers may be `frozen` in
    one for days, and then nothing is torn in the end.
    """
    clock, refused = Clock(), []
    turns = Turns(seed, clock)
    store = ObjectStore(MemoryBackend(f"gc-{uuid4().hex}", clock), clocks=(clock,))
    mine = TakingTurns(store, turns)

    def write(number: int) -> None:
        for step in range(3):  # two writers race for each key
            key = keys.step_artifact("r", "0-s", step, "rollouts", number // 2)
            files = {name: folder / f"{seed}-{number}-{name}" for name in "abcd"}
            for name, path in files.items():
                path.write_text(f"{name} by {number}")
            try:
                if number % 2:
                    commit(mine, key, f"by {number}".encode())
                else:
                    checkpoint = keys.checkpoint("r", "0-s", "p", step)
                    commit_files(mine, checkpoint, files, kind="checkpoint", provenance=PROVENANCE, move=False)
            except AttemptTooOld:
                refused.append(number)

    def collect() -> None:
        for _ in range(6):
            collect_garbage(mine, threads=1)

    def time_passes() -> None:
        hours = turns.random.choice([0, 0, 0.5, 2, 11, 25])
        bounded = [since for name, since in turns.waiting_since.items() if not (frozen and name.startswith("writer"))]
        waited = max((clock.now - since for since in bounded), default=0.0)
        clock.now += min(hours * HOUR, 11.9 * HOUR - waited)
        if not frozen:
            whole(store)

    actors: dict[str, Callable[[], None]] = {f"writer{n}": (lambda n=n: write(n)) for n in range(4)}
    turns.run(actors | {"gc1": collect, "gc2": collect}, time_passes)
    if turns.failures:
        raise turns.failures[0]
    committed = whole(store)
    clock.now += 25 * HOUR
    collect_garbage(store)
    assert whole(store) == committed
    artifacts_left = filter(None, map(key_patterns.artifact_of_manifest, names(store)))
    named = sum(len(read_manifest(store, key).files) for key in artifacts_left)
    assert len(names(store)) == committed + named  # nothing is left that nothing names
    return len(refused), committed


@pytest.mark.parametrize("frozen", [False, True])
def test_whatever_is_committed_is_whole_in_any_order_of_operations(tmp_path: Path, frozen: bool) -> None:
    outcomes = [interleave(seed, tmp_path, frozen=frozen) for seed in range(25)]
    assert sum(refused for refused, _ in outcomes) > 0 and sum(committed for _, committed in outcomes) > 0


def test_that_test_finds_a_writer_that_commits_however_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "MAX_ATTEMPT_SECONDS", 1e9)
    with pytest.raises(AssertionError, match="was committed and is gone"):
        for seed in range(100):
            interleave(seed, tmp_path, frozen=True)


# -- a folder --------------------------------------------------------------------------------------------------


def later(store: ObjectStore, hours: float, **options: Any) -> GcReport:
    return collect_garbage(store, now=store.now() + hours * HOUR, **options)


def test_what_killed_writers_left_in_a_folder(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    commit(store)
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
    """A checkpoint of last week is published today, by a link: its data must not be collected before its manifest."""
    store = open_store(tmp_path / "store")
    commit(store)
    stored = store.local_path(read_manifest(store, STEP).files[0].key)
    assert stored is not None
    week_ago = store.now() - 7 * 24 * HOUR
    os.utime(stored, (week_ago, week_ago))
    key = f"{keys.step_artifact('r', '0-s', 2, 'rollouts', 0)}.{ATTEMPT}.parquet"
    store.put_file(key, stored)
    assert collect_garbage(store).names == ()
    assert later(store, 25).names == (key,)
    assert digest(stored.read_bytes()) == read_manifest(store, STEP).files[0].sha256
