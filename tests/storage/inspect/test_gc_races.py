"""Garbage collection while writers commit: every committed artifact stays whole, in any order of operations."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from storage.errors import AttemptTooOld
from storage.inspect.gc import collect_garbage
from storage.serialization import digest
from storage.store import artifacts, key_patterns, keys
from storage.store.artifacts import commit_files, find_artifact, read_manifest
from storage.store.backends.memory import MemoryBackend
from storage.store.objects import ObjectStore
from tests.fixtures.clocks import Clock
from tests.fixtures.stores.gc_store import HOUR, NOW, PROVENANCE, STEP, all_keys, commit_rows


@pytest.fixture
def clock() -> Clock:
    return Clock(NOW)


@pytest.fixture(autouse=True)
def one_file_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor of `Turns` has one operation at a time."""
    monkeypatch.setattr(artifacts, "FILES_AT_ONCE", 1)


@pytest.fixture
def store(clock: Clock) -> ObjectStore:
    return ObjectStore(MemoryBackend(f"gc-{uuid4().hex}", clock), clocks=(clock,))


class Meddling(ObjectStore):
    """A store that calls a function before a chosen operation."""

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
    """Even if its data is older than a day, which no rule of the protocol allows."""
    commit_rows(store)
    data = read_manifest(store, STEP).files[0].key
    body = store.get(keys.manifest(STEP))
    store.delete(keys.manifest(STEP))
    commit_rows(store, keys.step_artifact("r", "0-s", 2, "rollouts", 0))
    clock.now += 25 * HOUR

    def arrives() -> None:
        store.put(keys.manifest(STEP), body)

    report = collect_garbage(Meddling(store, verb, times, arrives), threads=1)
    assert report.names == () and find_artifact(store, STEP) is not None
    assert store.exists(data)


class Turns:
    """Runs one of several threads at a time. At every operation on the store, a seeded generator chooses the next."""

    def __init__(self, seed: int, clock: Clock) -> None:
        self.clock = clock
        self.random = random.Random(seed)
        self._turn: dict[str, threading.Semaphore] = {}
        self._back = threading.Semaphore(0)
        self._current = ""
        self.waiting_since: dict[str, float] = {}
        """Time at which the current operation of each thread began."""
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

            threads[name] = threading.Thread(target=body, daemon=True)  # a failed test leaves its threads behind
            threads[name].start()
        while names_alive := [name for name, is_alive in alive.items() if is_alive]:
            self._current = self.random.choice(names_alive)
            self._turn[self._current].release()
            self._back.acquire()
            between()
        for thread in threads.values():
            thread.join()


class TakingTurns(ObjectStore):
    """A store that lets another thread run before every operation."""

    def __init__(self, store: ObjectStore, turns: Turns) -> None:
        super().__init__(store.backend, clocks=store.clocks)
        for verb in ("get", "exists", "list", "put", "put_file", "put_if_absent", "delete", "now"):
            real = getattr(ObjectStore, verb).__get__(self)

            def in_turn(*arguments: Any, _real: Callable[..., Any] = real, **named: Any) -> Any:
                turns.yield_()
                return _real(*arguments, **named)

            setattr(self, verb, in_turn)


def whole(store: ObjectStore) -> int:
    """Returns the number of committed artifacts. Reads and checks each of their files."""
    owners = [key for info in store.list() if (key := key_patterns.artifact_of_manifest(info.key)) is not None]
    for owner in owners:
        for entry in read_manifest(store, owner).files:
            assert store.exists(entry.key), f"{entry.key} was committed and is gone"
            assert digest(store.get(entry.key)) == entry.sha256
    return len(owners)


def interleave(seed: int, folder: Path, *, frozen: bool = False) -> tuple[int, int]:
    """Runs writers and collectors in a random order of their operations, over days. Returns the numbers of refused
    attempts and of committed artifacts.

    A single operation takes less than 12 hours, and then every artifact is whole at any moment. With `frozen`, an
    operation of a writer may take days, and then every artifact is whole at the end.
    """
    clock, refused = Clock(), []
    turns = Turns(seed, clock)
    store = ObjectStore(MemoryBackend(f"gc-{uuid4().hex}", clock), clocks=(clock,))
    shared_store = TakingTurns(store, turns)

    def write(number: int) -> None:
        for step in range(3):  # two writers race for each key
            key = keys.step_artifact("r", "0-s", step, "rollouts", number // 2)
            files = {name: folder / f"{seed}-{number}-{name}" for name in "abcd"}
            for name, path in files.items():
                path.write_text(f"{name} by {number}")
            try:
                if number % 2:
                    commit_rows(shared_store, key, f"by {number}".encode())
                else:
                    checkpoint = keys.checkpoint("r", "0-s", "p", step)
                    commit_files(shared_store, checkpoint, files, kind="checkpoint", provenance=PROVENANCE, move=False)
            except AttemptTooOld:
                refused.append(number)

    def collect() -> None:
        for _ in range(6):
            collect_garbage(shared_store, threads=1)

    def time_passes() -> None:
        hours = turns.random.choice([0, 0, 0.5, 2, 11, 25])
        bounded = [since for name, since in turns.waiting_since.items() if not (frozen and name.startswith("writer"))]
        waited = max((clock.now - since for since in bounded), default=0.0)
        clock.now += min(hours * HOUR, 11.9 * HOUR - waited)
        if not frozen:
            whole(store)

    # run the actors; every artifact must be whole
    actors: dict[str, Callable[[], None]] = {f"writer{n}": (lambda n=n: write(n)) for n in range(4)}
    turns.run(actors | {"gc1": collect, "gc2": collect}, time_passes)
    if turns.failures:
        raise turns.failures[0]
    committed = whole(store)
    # a day later, a last collection leaves only what manifests name
    clock.now += 25 * HOUR
    collect_garbage(store)
    assert whole(store) == committed
    artifacts_left = filter(None, map(key_patterns.artifact_of_manifest, all_keys(store)))
    named = sum(len(read_manifest(store, key).files) for key in artifacts_left)
    assert len(all_keys(store)) == committed + named  # manifests and what they name
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
