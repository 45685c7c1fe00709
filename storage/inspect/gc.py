"""Garbage collection: deletes data that no manifest names, what killed writers left, and checkpoints that finished runs
do not need (storage.chain.retention).

A writer commits no attempt that is older than 12 hours (storage.store.artifacts). So data that is older than 24 hours,
and that no manifest names, can never be committed. Ages are measured by the store's own clock. Objects that a manifest
names, objects without a manifest (records, leases, claims, aliases) and unknown objects are kept.

All publishers of a model version write its files at the same keys, so the age of such a file does not tell whether a
publisher is about to commit it. An incomplete version is kept, unless the caller says that no other process writes.

The age does not matter for checkpoints of finished runs: readers go on without a checkpoint that was removed.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Generic, Literal, NamedTuple, TypeVar, cast, get_args

from storage.chain.rebase import rebase_at
from storage.chain.records import Chain
from storage.chain.retention import Surplus, remove, surplus_checkpoints
from storage.errors import CorruptArtifact, ObjectNotFound, PermanentStorageError
from storage.inspect.scopes import Scope, run_scope, scopes_of
from storage.serialization import Frozen
from storage.store import key_patterns, keys
from storage.store.artifacts import MANIFEST_VERSION, MAX_ATTEMPT_SECONDS, read_manifest
from storage.store.objects import Leftover, ObjectInfo, ObjectStore

T = TypeVar("T")
R = TypeVar("R")
Reason = TypeVar("Reason", bound=str)

OLDER_THAN = timedelta(hours=24)
ATTEMPT_LENGTH = 32
"""Characters of the id of an attempt, which follows the artifact's key in the keys of its data."""
MARGIN = timedelta(hours=1)
"""Time between the last possible commit of an attempt and the collection of its data. It allows for inexact clocks and
delayed listings."""

GarbageReason = Literal[
    "attempt without a manifest",
    "checkpoint of a rebase that was not committed",
    "checkpoint that a finished run does not need",
    "uploaded model that was not imported",
    "incomplete version of a model",
    "test object of the store",
    "temporary file",
    "scratch folder",
    "multipart upload",
]
KeptReason = Literal[
    "in use",
    "younger than the given age",
    "incomplete version of a model (publish it again, or collect while no other process writes)",
    "next to a manifest that cannot be read",
    "named or written again meanwhile",
    "unknown kind of object",
]
INCOMPLETE_VERSION: KeptReason = (
    "incomplete version of a model (publish it again, or collect while no other process writes)"
)


class ObjectTotals(Frozen):
    """A number of objects and their bytes."""

    objects: int = 0
    bytes: int = 0


class _Totals(Generic[Reason]):
    """Numbers and bytes of objects by reason, counted without an object for each."""

    def __init__(self) -> None:
        self._counts, self._bytes = Counter[Reason](), Counter[Reason]()

    def add(self, reason: Reason, size: int) -> None:
        self._counts[reason] += 1
        self._bytes[reason] += size

    def by_reason(self) -> dict[Reason, ObjectTotals]:
        reasons = sorted(self._counts)
        return {reason: ObjectTotals(objects=self._counts[reason], bytes=self._bytes[reason]) for reason in reasons}


class Garbage(NamedTuple):
    """An object or a leftover that a collection may delete."""

    name: str
    """Key of an object, or the name of a leftover."""
    reason: GarbageReason
    size: int
    modified: float
    leftover: Leftover | None = None


class GcReport(Frozen):
    """What a collection deleted and kept. With `dry_run`, what it would have deleted."""

    dry_run: bool
    deleted: dict[GarbageReason, ObjectTotals]
    kept: dict[KeptReason, ObjectTotals]
    names: tuple[str, ...]
    """Names of the deleted objects and leftovers, sorted."""
    unknown: tuple[str, ...]
    """Keys that belong to no kind of object of a store. They are kept."""
    unreadable: tuple[str, ...]
    """Keys of manifests that cannot be read. No data of these artifacts is deleted."""

    @property
    def total(self) -> ObjectTotals:
        """Totals of everything that was deleted."""
        totals = self.deleted.values()
        return ObjectTotals(objects=sum(total.objects for total in totals), bytes=sum(total.bytes for total in totals))


def collect_garbage(
    store: ObjectStore,
    *,
    run: str | None = None,
    now: float | None = None,
    older_than: timedelta = OLDER_THAN,
    dry_run: bool = False,
    exclusive: bool = False,
    threads: int = 8,
) -> GcReport:
    """Deletes garbage that is older than `older_than`. Runs may be in progress.

    The store is collected one scope after the other (storage.inspect.scopes), each with a listing of its own.

    Args:
        run: Collect only this run. Other runs are not read, except those that use it.
        now: Epoch seconds by the store's clock. None: ask the store.
        older_than: At least 13 hours, unless `exclusive`.
        exclusive: The caller guarantees that no other process writes. Incomplete versions of models are deleted, too.
        threads: Number of concurrent requests.

    Raises ValueError for too small an age, ObjectNotFound if there is no such run, PermanentStorageError if a newer
    version of this program writes to the store.
    """
    # an attempt that may still be committed must not be collected
    least = timedelta(seconds=MAX_ATTEMPT_SECONDS) + MARGIN
    if older_than < least and not exclusive:
        raise ValueError(
            f"data that is {older_than} old may belong to a running writer, which can still commit it; give at least "
            f"{least}, or --no-active-runs (exclusive=True) if nothing writes to the store"
        )
    collection = _Collection(
        store, older_than=older_than, exclusive=exclusive, threads=threads, now=now, dry_run=dry_run
    )
    if run is None:
        for scope in scopes_of(store):
            collection.collect(scope)
        collection.collect_leftovers("")
    elif not collection.collect(run_scope(run)):
        raise ObjectNotFound(f"no run {run!r} in {store.url}; 'ostinato runs ls' lists the runs")
    else:
        # only artifacts, which are in the stages, are large enough to be uploaded in parts
        collection.collect_leftovers(keys.stages_prefix(run))
    return collection.report()


class _Collection:
    """One garbage collection. In each scope: list, find what manifests name, sort the rest, check again, delete."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        older_than: timedelta,
        exclusive: bool,
        threads: int,
        now: float | None,
        dry_run: bool,
    ) -> None:
        self.store, self.exclusive, self.threads, self.dry_run = store, exclusive, threads, dry_run
        self.max_age = older_than.total_seconds()
        self._now = now
        # what the report says
        self.deleted, self.kept = _Totals[GarbageReason](), _Totals[KeptReason]()
        self.names: list[str] = []
        self.unknown: list[str] = []
        self.unreadable: set[str] = set()
        # the scope that is being collected
        self.surplus: dict[str, Surplus] = {}
        self._manifest_files: dict[tuple[str, float], frozenset[str]] = {}
        """Keys that a manifest names, by (key of the manifest, time of its last change). A cache for the second
        listing."""

    def collect(self, scope: Scope) -> bool:
        """Collects the garbage of one scope. Returns whether it has any object."""
        self._manifest_files.clear()
        objects = scope.objects(self.store)
        garbage = self._garbage_objects(objects)
        manifests = [info for info in objects if key_patterns.classify_key(info.key) == "manifest"] if garbage else []
        if manifests:
            # the newest manifest tells whether a newer version writes here, which may name data in another way
            self._files_of_manifest(max(manifests, key=lambda info: info.modified).key)
        if garbage and not self.dry_run:
            garbage = self._delete(self._still_garbage(scope, garbage))
        self._count(garbage)
        return bool(objects)

    def collect_leftovers(self, prefix: str) -> None:
        """Collects the leftovers of killed writers below a prefix."""
        garbage = self._garbage_leftovers(self.store.leftovers(prefix))
        if garbage and not self.dry_run:
            # a leftover that was written to again has another time of change
            modified = {leftover.name: leftover.modified for leftover in self.store.leftovers(prefix)}
            unchanged = [item for item in garbage if modified.get(item.name) == item.modified]
            for item in set(garbage) - set(unchanged):
                self._keep("named or written again meanwhile", item.size)
            garbage = self._delete(unchanged)
        self._count(garbage)

    def report(self) -> GcReport:
        return GcReport(
            dry_run=self.dry_run,
            deleted=self.deleted.by_reason(),
            kept=self.kept.by_reason(),
            names=tuple(sorted(self.names)),
            unknown=tuple(sorted(self.unknown)),
            unreadable=tuple(sorted(self.unreadable)),
        )

    def _count(self, garbage: list[Garbage]) -> None:
        for item in garbage:
            self.deleted.add(item.reason, item.size)
            self.names.append(item.name)

    # -- which data is named by a manifest ---------------------------------------------------------------------

    def _named_keys(self, objects: Iterable[ObjectInfo]) -> set[str]:
        """Returns the keys of data that some manifest names.

        A manifest names data of one attempt. If there is data of one attempt only, it is taken to be that data, so
        that manifests need not be read: a run has tens of them per step.
        """
        # the data and the manifest of each artifact
        manifests: dict[str, ObjectInfo] = {}
        data: defaultdict[str, list[str]] = defaultdict(list)
        published: set[str] = set()
        for info in objects:
            kind, artifact = key_patterns.classify_key(info.key), key_patterns.owning_artifact(info.key)
            if artifact is None or kind == "upload":
                continue
            if kind == "manifest":
                manifests[artifact] = info
            else:
                data[artifact].append(info.key)
                if kind == "published":
                    published.add(artifact)
        # take the data of a single attempt, and read the other manifests that were not read before
        named_keys: set[str] = set()
        doubtful = []
        for artifact, manifest in manifests.items():
            attempts = {key[len(artifact) + 1 :][:ATTEMPT_LENGTH] for key in data[artifact]}
            if artifact in published or len(attempts) > 1:
                doubtful.append(manifest)
            else:
                named_keys.update(data[artifact])
        unread = [info for info in doubtful if (info.key, info.modified) not in self._manifest_files]
        files_of_unread = self._map(lambda info: self._files_of_manifest(info.key), unread)
        for info, files in zip(unread, files_of_unread, strict=True):
            self._manifest_files[info.key, info.modified] = files
        return named_keys.union(*(self._manifest_files[info.key, info.modified] for info in doubtful))

    def _files_of_manifest(self, manifest_key: str) -> frozenset[str]:
        artifact = key_patterns.artifact_of_manifest(manifest_key)
        assert artifact is not None
        try:
            return frozenset(entry.key for entry in read_manifest(self.store, artifact).files)
        except ObjectNotFound:
            return frozenset()  # pruned after the listing
        except CorruptArtifact:
            self._refuse_newer_version(manifest_key)
            self.unreadable.add(manifest_key)
            return frozenset()

    def _refuse_newer_version(self, manifest_key: str) -> None:
        try:
            version = json.loads(self.store.get(manifest_key)).get("schema_version")
        except (ValueError, AttributeError, ObjectNotFound):
            return  # the manifest is damaged
        if isinstance(version, int) and version > MANIFEST_VERSION:
            raise PermanentStorageError(
                f"{manifest_key} in {self.store.url} has schema version {version}, this code knows {MANIFEST_VERSION}: "
                "what a newer version needs cannot be told; collect with the newer one. Nothing more was deleted"
            )

    # -- which objects and leftovers are garbage ---------------------------------------------------------------

    def _garbage_objects(self, objects: list[ObjectInfo]) -> list[Garbage]:
        garbage: list[Garbage] = []
        named_keys = self._named_keys(objects)
        self.surplus = surplus_checkpoints(self.store, [info.key for info in objects])
        unreadable_artifacts = {key_patterns.artifact_of_manifest(key) for key in self.unreadable}
        upload_times = _upload_times(objects)
        orphans = self._orphaned_rebase_checkpoints(objects)
        for info in objects:
            artifact = key_patterns.owning_artifact(info.key)
            age_from = upload_times.get(artifact, info.modified)
            if artifact in orphans:
                verdict: GarbageReason | KeptReason = "checkpoint of a rebase that was not committed"
            else:
                verdict = self._verdict(info.key, artifact, age_from, named_keys, unreadable_artifacts)
            if verdict in get_args(GarbageReason):
                garbage.append(Garbage(info.key, cast(GarbageReason, verdict), info.size, info.modified))
            else:
                self._keep(cast(KeptReason, verdict), info.size)
        return sorted(garbage)

    def _verdict(
        self,
        key: str,
        artifact: str | None,
        age_from: float,
        named_keys: set[str],
        unreadable_artifacts: set[str | None],
    ) -> GarbageReason | KeptReason:
        """Returns why an object is garbage, or why it is kept."""
        kind = key_patterns.classify_key(key)
        if kind == "unknown":
            self.unknown.append(key)
            return "unknown kind of object"
        if artifact in self.surplus and (kind == "manifest" or key in named_keys):
            return "checkpoint that a finished run does not need"
        if kind in ("standalone", "manifest") or key in named_keys:
            return "in use"
        if artifact in unreadable_artifacts:
            return "next to a manifest that cannot be read"
        if kind == "published" and not self.exclusive:
            return INCOMPLETE_VERSION
        return "younger than the given age" if self._is_young(age_from) else _REASONS[kind]

    def _orphaned_rebase_checkpoints(self, objects: Iterable[ObjectInfo]) -> set[str]:
        """Returns the old checkpoints of rebases that were not committed."""
        orphans = set()
        for info in objects:
            if key_patterns.classify_key(info.key) == "upload" or self._is_young(info.modified):
                continue
            artifact = key_patterns.artifact_of_manifest(info.key)
            if artifact is not None and self._is_orphaned(artifact):
                orphans.add(artifact)
        return orphans

    def _is_orphaned(self, artifact: str) -> bool:
        """Whether it is the checkpoint of a rebase that was not committed, or that lost against another rebase."""
        parts = keys.rebase_of_checkpoint(artifact)
        if parts is None:
            return False
        run, stage, model, step, _ = parts
        try:
            rebase = rebase_at(Chain(self.store, run, stage, model), step)
        except CorruptArtifact:
            return False  # the unreadable rebase may name this checkpoint
        return rebase is None or rebase.checkpoint.key != artifact

    def _garbage_leftovers(self, leftovers: Iterable[Leftover]) -> list[Garbage]:
        garbage = []
        for leftover in leftovers:
            if self._is_young(leftover.modified):
                self._keep("younger than the given age", leftover.size)
            else:
                garbage.append(Garbage(leftover.name, leftover.kind, leftover.size, leftover.modified, leftover))
        return garbage

    def _is_young(self, modified: float) -> bool:
        if self._now is None:
            # asked late, because the request would create the folder of an empty store
            self._now = self.store.now()
        return self._now - modified <= self.max_age

    def _keep(self, reason: KeptReason, size: int) -> None:
        self.kept.add(reason, size)

    # -- deletion ----------------------------------------------------------------------------------------------

    def _still_garbage(self, scope: Scope, garbage: list[Garbage]) -> list[Garbage]:
        """Returns the garbage that was neither named by a new manifest nor written again after the first listing."""
        objects = scope.objects(self.store)
        named_keys = self._named_keys(objects)
        unreadable_artifacts = {key_patterns.artifact_of_manifest(key) for key in self.unreadable}
        self.surplus = surplus_checkpoints(self.store, [info.key for info in objects])
        # an object that was written again has another time of change
        modified = {info.key: info.modified for info in objects}
        still_garbage = []
        for item in garbage:
            artifact = key_patterns.owning_artifact(item.name)
            if item.reason == "checkpoint of a rebase that was not committed":
                is_named = artifact is None or not self._is_orphaned(artifact)
            elif item.reason == "checkpoint that a finished run does not need":
                is_named = artifact not in self.surplus
            else:
                is_named = item.name in named_keys or artifact in unreadable_artifacts
            if is_named or modified.get(item.name) != item.modified:
                self._keep("named or written again meanwhile", item.size)
            else:
                still_garbage.append(item)
        return still_garbage

    def _delete(self, garbage: list[Garbage]) -> list[Garbage]:
        """Deletes the garbage, grouped by artifact and reason. Returns what was deleted."""
        groups: defaultdict[tuple[str, GarbageReason], list[Garbage]] = defaultdict(list)
        for item in garbage:
            artifact = None if item.leftover else key_patterns.owning_artifact(item.name)
            groups[artifact or item.name, item.reason].append(item)
        deleted: list[Garbage] = []
        for deleted_group in self._map(self._delete_group, sorted(groups.items())):
            deleted += deleted_group
        for item in set(garbage) - set(deleted):
            self._keep("named or written again meanwhile", item.size)
        return deleted

    def _delete_group(self, group: tuple[tuple[str, GarbageReason], list[Garbage]]) -> list[Garbage]:
        """Deletes the garbage of one artifact, right after a last look at the manifest that could name it."""
        (artifact, reason), items = group
        leftover = items[0].leftover
        if leftover is not None:
            self.store.remove_leftover(leftover)
            return items
        if reason == "checkpoint that a finished run does not need":
            return items if remove(self.store, *self.surplus[artifact]) else []
        if reason == "checkpoint of a rebase that was not committed" and not self._is_orphaned(artifact):
            return []
        if reason in ("uploaded model that was not imported", "checkpoint of a rebase that was not committed"):
            # the manifest is deleted first, so that no reader follows it to deleted data
            items = sorted(items, key=lambda item: key_patterns.artifact_of_manifest(item.name) is None)
        else:
            possible_keys = (keys.manifest(artifact), keys.manifest_of_files(artifact))
            manifests = [key for key in possible_keys if key_patterns.artifact_of_manifest(key)]
            named_keys = frozenset[str]().union(*map(self._files_of_manifest, manifests))
            if self.unreadable.intersection(manifests):
                return []
            items = [item for item in items if item.name not in named_keys]
        # what is left is garbage
        for item in items:
            self.store.delete(item.name)
        return items

    def _map(self, call: Callable[[T], R], items: list[T]) -> list[R]:
        """Calls the function for each item, in `threads` threads."""
        if self.threads <= 1 or len(items) <= 1:
            return [call(item) for item in items]
        with ThreadPoolExecutor(self.threads) as pool:
            return list(pool.map(call, items))


_REASONS: dict[key_patterns.KeyKind, GarbageReason] = {
    "attempt": "attempt without a manifest",
    "published": "incomplete version of a model",
    "upload": "uploaded model that was not imported",
    "probe": "test object of the store",
}


def _upload_times(objects: Iterable[ObjectInfo]) -> dict[str | None, float]:
    """Returns the last change of each uploaded model: all its files are deleted together."""
    times: defaultdict[str | None, float] = defaultdict(float)
    for info in objects:
        if key_patterns.classify_key(info.key) == "upload":
            artifact = key_patterns.owning_artifact(info.key)
            times[artifact] = max(times[artifact], info.modified)
    return times
