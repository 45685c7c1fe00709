"""Requests and seconds to open, resume, finish, list, show, collect, check and delete one run of a store with many
other runs.

    PYTHONPATH=. .venv/bin/python bench/store_growth.py --runs 10 1000 10000 --steps 1000

The code of the store and of the chains is real. S3 is simulated in memory, on a virtual clock: each request has the
latency of S3Model (p50 30 ms, p99 100 ms), a listing makes one request for 1,000 keys, and threads wait at the same
time. The objects of the run `mine` exist. Of the other runs only the small objects exist (14 for each run); the objects
of their steps are counted in the pages of every listing above them, and not returned.
"""

from __future__ import annotations

import argparse
import bisect
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import BinaryIO

from bench.scale_sim_store import PAGE_KEYS, Clock, S3Model
from storage.chain.checkpoint_names import share_name
from storage.chain.deletion import plan_deletion
from storage.chain.fork import check_fork
from storage.chain.leases import acquire_lease, release_lease
from storage.chain.listing import committed_steps
from storage.chain.rebase import checkpoints_up_to
from storage.chain.records import Chain, CommitRecord, Numerics, OptimizerSpec, Root, StepRequest
from storage.chain.retention import Retention, prune_checkpoints
from storage.chain.run_record import claim_stage, create_or_check_run
from storage.errors import ObjectNotFound
from storage.inspect.audit import audit_store
from storage.inspect.gc import collect_garbage
from storage.inspect.run_details import describe_run, summarize_run
from storage.serialization import canonical_json
from storage.store import keys
from storage.store.artifacts import ArtifactRef, FileEntry, Manifest, Provenance
from storage.store.backends.protocol import Folder, Leftover, ObjectInfo, PutResult
from storage.store.index import record_uses, run_entries
from storage.store.objects import ObjectStore, read_json
from tasks.evaluation.validation_curve import read_validations
from tasks.loggers.base import SentLog
from tasks.reports.metrics import StepMetrics
from tasks.reports.step_metrics import read_metrics

STAGE, MODEL = "0-grpo", "policy"
SHARDS = 8
"""Shards of rollouts per step: 128 prompts, 16 in a shard."""
STEP_OBJECTS = 2 * (2 * SHARDS + 1)
"""Objects of a step: rollouts and grades of each shard, and the batch, each with its manifest."""
MODEL_FILES = 8
ATTEMPT = "0" * 32
PROVENANCE = Provenance(code_version="bench", config_digest="0" * 64, seed=0)
BASE = ArtifactRef(kind="model", key="models/base/1", sha256="0" * 64, bytes=1, rows=None, parents=())


class CountedStore:
    """Implements storage.store.backends.protocol.Backend in memory, and counts requests on a virtual clock."""

    url = "sim://growth"

    def __init__(self, seed: int = 0) -> None:
        self.clock, self.requests, self.largest_listing = Clock(), Counter[str](), 0
        self.objects: dict[str, bytes] = {}
        self._sorted: list[str] = []
        self._uncounted: dict[str, int] = {}
        self._folders: list[str] = []
        self._model, self._random, self._lock = S3Model(), Random(seed), threading.RLock()

    def add(self, objects: dict[str, bytes], unlisted: dict[str, int]) -> None:
        """Adds objects, and numbers of objects by folder that are only counted. Costs no request."""
        self.objects |= objects
        self._sorted = sorted(self.objects)
        self._uncounted |= unlisted
        self._folders = sorted(self._uncounted)

    def _charge(self, verb: str, times: int = 1) -> None:
        with self._lock:
            self.requests[verb] += times
            seconds = sum(self._model.latency(self._random) for _ in range(times))
        self.clock.advance(seconds)
        if threading.current_thread() is not threading.main_thread():
            # the threads of a pool share the requests as they would if each waited for its own
            time.sleep(0.001)

    def _below(self, names: list[str], prefix: str) -> tuple[int, int]:
        return bisect.bisect_left(names, prefix), bisect.bisect_left(names, f"{prefix}\x7f")

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._lock:
            first, last = self._below(self._sorted, prefix)
            listed = [ObjectInfo(key, len(self.objects[key]), 0.0) for key in self._sorted[first:last]]
            first, last = self._below(self._folders, prefix)
            count = len(listed) + sum(self._uncounted[folder] for folder in self._folders[first:last])
            self.largest_listing = max(self.largest_listing, count)
        self._charge("LIST", max(1, -(-count // PAGE_KEYS)))
        return iter(listed)

    def folder(self, prefix: str) -> Folder:
        folders, objects = [], []
        with self._lock:
            at, last = self._below(self._sorted, prefix)
            while at < last:
                key = self._sorted[at]
                name, separator, _ = key.removeprefix(prefix).partition("/")
                if separator:
                    folders.append(name)
                    # the next key that is not in this folder: 0 follows the slash
                    at = bisect.bisect_left(self._sorted, f"{prefix}{name}0", at)
                else:
                    objects.append(ObjectInfo(key, len(self.objects[key]), 0.0))
                    at += 1
        self._charge("LIST", max(1, -(-(len(folders) + len(objects)) // PAGE_KEYS)))
        return Folder(folders, objects)

    def get(self, key: str) -> bytes:
        self._charge("GET")
        if key not in self.objects:
            raise ObjectNotFound(f"no object {key!r} in {self.url}")
        return self.objects[key]

    def exists(self, key: str) -> bool:
        self._charge("HEAD")
        return key in self.objects

    def put(self, key: str, data: bytes) -> None:
        self._charge("PUT")
        self._write(key, data)

    def put_if_absent(self, key: str, data: bytes, attempt: str) -> PutResult:
        self._charge("PUT")
        with self._lock:
            if key not in self.objects:
                self._write(key, data)
                return PutResult(True, data)
        return PutResult(False, self.get(key))

    def delete(self, key: str) -> None:
        self._charge("DELETE")
        with self._lock:
            if self.objects.pop(key, None) is not None:
                self._sorted.remove(key)

    def _write(self, key: str, data: bytes) -> None:
        with self._lock:
            if key not in self.objects:
                bisect.insort(self._sorted, key)
            self.objects[key] = data

    def now(self) -> float:
        self._charge("PUT", 3)
        return 0.0

    def leftovers(self, prefix: str) -> Iterator[Leftover]:
        self._charge("LIST")
        return iter(())

    def local_path(self, key: str) -> Path | None:
        return None

    def open(self, key: str) -> BinaryIO:
        raise NotImplementedError

    def put_file(self, key: str, path: Path, *, move: bool) -> None:
        raise NotImplementedError

    def download(self, key: str, to: Path) -> None:
        raise NotImplementedError

    def remove_leftover(self, name: str) -> None:
        raise NotImplementedError


# -- the objects of runs -----------------------------------------------------------------------------------------


def begun_run(run: str) -> CountedStore:
    """Returns a store with one run that has begun and taken no step."""
    backend = CountedStore()
    store = ObjectStore(backend)  # type: ignore[arg-type]
    create_or_check_run(store, run, semantic={}, other={"checkpoints": {}}, code_version="bench")
    release_lease(store, run, acquire_lease(store, run, {}))
    # the model that the chain begins at, as its publication claims it
    store.put(keys.model_claim("base", "1"), b"{}")
    chain = Chain(store, run, STAGE, MODEL)
    chain.create_root(Root(base=BASE, base_digest="0" * 64))
    claim_stage(store, chain.policy(0))
    return backend


def other_runs(count: int, steps: int) -> tuple[dict[str, bytes], dict[str, int]]:
    """Returns the small objects of `count` finished runs with published models, and the numbers of their others."""
    # one run, as the code makes it
    name = "other-00000"
    backend = begun_run(name)
    store = ObjectStore(backend)  # type: ignore[arg-type]
    store.put(keys.result_json(name), b"{}")
    policy, version = Chain(store, name, STAGE, MODEL).policy(0), keys.model_version(name, "1")
    record_uses(store, keys.manifest_of_files(version), [keys.run_prefix(name)])
    store.put(keys.manifest_of_files(version), manifest(version, "model", parents=(policy.uri,)))
    store.put(keys.model_claim(name, "1"), b"{}")
    store.put(keys.model_alias(name, "latest", 1), b'{"version": "1"}')
    template = backend.objects
    # its copies under other names
    objects: dict[str, bytes] = {}
    unlisted: dict[str, int] = {}
    uses = hashlib.sha256(keys.run_prefix(name).encode()).hexdigest()
    for number in range(count):
        run = f"other-{number:05d}"
        uses_of_run = hashlib.sha256(keys.run_prefix(run).encode()).hexdigest()
        for key, data in template.items():
            objects[key.replace(uses, uses_of_run).replace(name, run)] = data.replace(name.encode(), run.encode())
        unlisted[f"{keys.stage_prefix(run, STAGE)}steps/"] = steps * STEP_OBJECTS
        unlisted[keys.step_metrics_prefix(run, STAGE)] = steps
        unlisted[keys.chain_prefix(run, STAGE, MODEL)] = steps
        unlisted[f"{keys.model_version(run, '1')}/"] = MODEL_FILES
    return objects, unlisted


def own_run(run: str, steps: int) -> dict[str, bytes]:
    """Returns all objects of a run with `steps` steps and a checkpoint after each fifth of them."""
    backend = begun_run(run)
    store = ObjectStore(backend)  # type: ignore[arg-type]
    chain = Chain(store, run, STAGE, MODEL)
    numerics = Numerics(backend="b", device="cpu", compute_dtype="float32", threads=1, max_tokens=1)
    parent = chain.policy(0)
    for step in range(steps):
        for kind, shards in (("rollouts", SHARDS), ("graded", SHARDS), ("batch", 1)):
            for shard in range(shards):
                put_artifact(backend, keys.step_artifact(run, STAGE, step, kind, shard), kind)
        batch = BASE.model_copy(update={"kind": "batch", "key": keys.step_artifact(run, STAGE, step, "batch", 0)})
        request = StepRequest(parent=parent, batch=batch, loss={}, optimizer=OptimizerSpec(lr=1.0))
        record = CommitRecord(
            request=request, state=request.next_state(), updates=1, numerics=numerics, weights_digest="0"
        )
        parent = chain.commit(record).policy
        metrics = StepMetrics(step=step, loss=1.0, grad_norm=1.0, learning_rate=1.0)
        store.put(keys.step_metrics(run, STAGE, step), metrics.model_dump_json().encode())
        if (step + 1) % max(1, steps // 5) == 0:
            key = keys.checkpoint(run, STAGE, MODEL, step + 1)
            name = share_name(MODEL, (step + 1) / steps)
            body = manifest(key, "checkpoint", extra={"name": name, "state": parent.state, "rebase": None})
            backend.add({keys.manifest_of_files(key): body, f"{key}/{ATTEMPT}/file": b""}, {})
    SentLog(store, run, STAGE, "wandb").mark_step(steps)
    return backend.objects


def put_artifact(backend: CountedStore, key: str, kind: str) -> None:
    # a copy of one manifest: a run has tens of thousands
    backend.objects[f"{key}.{ATTEMPT}.parquet"] = b""
    backend.objects[keys.manifest(key)] = step_manifest(kind).replace(b"the-key", key.encode())


@cache
def step_manifest(kind: str) -> bytes:
    return manifest("the-key", kind, data=f"the-key.{ATTEMPT}.parquet")


def manifest(
    key: str, kind: str, *, data: str = "", parents: tuple[str, ...] = (), extra: dict[str, str | None] | None = None
) -> bytes:
    file = FileEntry(name="file", key=data or f"{key}/{ATTEMPT}/file", sha256="0" * 64, bytes=0)
    fields = {"sha256": "0" * 64, "bytes": 0, "rows": None, "attempt": ATTEMPT, "created": "2026-01-01T00:00:00+00:00"}
    return canonical_json(
        Manifest(kind=kind, key=key, files=(file,), parents=parents, provenance=PROVENANCE, extra=extra or {}, **fields)
    )


# -- what is done with one run -----------------------------------------------------------------------------------


def open_run(store: ObjectStore, run: str = "new") -> int:
    """The store's part of flows.runs.session.open_run and of the first stage. Returns the epoch."""
    check_fork(store, run)
    store.exists(keys.run_json(run))
    read_json(store, keys.result_json(run))
    committed_steps(store, run)
    create_or_check_run(store, run, semantic={}, other={"checkpoints": {}}, code_version="bench")
    epoch = acquire_lease(store, run, {})
    chain = Chain(store, run, STAGE, MODEL)
    root = Root(base=BASE, base_digest="0" * 64)
    if chain.root() is None:
        chain.create_root(root)
    claim_stage(store, chain.policy(0))
    chain.head()
    return epoch


def resume(store: ObjectStore) -> None:
    """Like open_run, and what the first step after a restart reads: a checkpoint, and the metrics for one logger, which
    has them all, and for the page."""
    open_run(store, "mine")
    head = Chain(store, "mine", STAGE, MODEL).head()
    next(checkpoints_up_to(Chain.of(store, head), head.step))
    read_metrics(store, "mine", STAGE, first=SentLog(store, "mine", STAGE, "wandb").steps, steps=head.step)
    read_metrics(store, "mine", STAGE, steps=head.step)
    read_validations(store, "mine", STAGE, last_step=head.step)


def finish(store: ObjectStore) -> None:
    """Deletes the checkpoints that a finished run does not need, reads what the report shows and stores the result."""
    head = Chain(store, "mine", STAGE, MODEL).head()
    prune_checkpoints(store, head, Retention(finished=True))
    read_metrics(store, "mine", STAGE, steps=head.step)
    read_validations(store, "mine", STAGE, last_step=head.step)
    store.put(keys.report("mine"), b"")
    store.put_if_absent(keys.result_json("mine"), b"{}")
    release_lease(store, "mine", 1)


def list_one(store: ObjectStore) -> None:
    """`ostinato runs ls mine`."""
    for run in run_entries(store, "mine"):
        summarize_run(store, run)


OPERATIONS: dict[str, Callable[[ObjectStore], object]] = {
    "open a new run": open_run,
    "resume": resume,
    "finish": finish,
    "runs ls RUN": list_one,
    "runs show RUN": lambda store: describe_run(store, "mine"),
    "gc --run RUN": lambda store: collect_garbage(store, run="mine", now=0.0),
    "doctor --deep --run RUN": lambda store: audit_store(store, run="new", read_bytes=False, now=0.0),
    "runs delete RUN --dry-run": lambda store: plan_deletion(store, "mine", no_active_runs=True),
}
"""The operations in the order in which they are measured. The checked run has no step: reading tables is not measured
here."""


@dataclass(frozen=True)
class Cost:
    """What one operation costs."""

    requests: dict[str, int]
    seconds: float
    """Virtual seconds."""
    largest_listing: int
    """Objects of its largest listing."""


def measure(own: dict[str, bytes], runs: int, steps: int) -> dict[str, Cost]:
    """Returns the cost of each operation in a store with the objects `own` of the run `mine`, and `runs` other runs of
    `steps` steps."""
    backend = CountedStore()
    backend.add(own, {})
    backend.add(*other_runs(runs, steps))
    store = ObjectStore(backend)  # type: ignore[arg-type]
    costs = {}
    for name, operation in OPERATIONS.items():
        backend.requests.clear()
        backend.largest_listing, began = 0, backend.clock.settle()
        operation(store)
        seconds = backend.clock.settle() - began
        costs[name] = Cost(dict(sorted(backend.requests.items())), seconds, backend.largest_listing)
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, nargs="+", default=[10, 1000, 10000])
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
    print(f"one run of {arguments.steps:,} steps; S3 simulated; requests and virtual seconds")
    print("| operation | " + " | ".join(f"{runs:,} other runs" for runs in arguments.runs) + " |")
    print("|---" * (len(arguments.runs) + 1) + "|")
    own = own_run("mine", arguments.steps)
    costs = [measure(own, runs, arguments.steps) for runs in arguments.runs]
    for name in OPERATIONS:
        cells = []
        for cost in costs:
            kinds = ", ".join(f"{count:,} {verb}" for verb, count in cost[name].requests.items())
            cells.append(f"{sum(cost[name].requests.values()):,} ({kinds}), {cost[name].seconds:,.1f} s")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
