"""Garbage collection: data that nothing names any more, and what killed writers left.

A writer commits no attempt that is older than 12 hours (storage.store.artifacts), so data that is older than 24 and
that no manifest names can never be named. Ages are told by the store's own clock. What a manifest names, what stands
for itself (records, leases, claims, aliases) and what is not understood is kept.

A file of a registered model has a name that every publisher of that version shares, so its age says nothing about who
is about to commit it: an incomplete version is kept, unless nobody else is writing.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Literal, NamedTuple, TypeVar

from storage.chain.rebase import rebase_at
from storage.chain.records import Chain
from storage.errors import CorruptArtifact, ObjectNotFound, PermanentStorageError
from storage.serialization import Frozen
from storage.store import key_patterns, keys
from storage.store.artifacts import MANIFEST_VERSION, MAX_ATTEMPT_SECONDS, read_manifest
from storage.store.objects import Leftover, ObjectInfo, ObjectStore

T = TypeVar("T")
R = TypeVar("R")

OLDER_THAN = timedelta(hours=24)
MARGIN = timedelta(hours=1)
"""Between the last possible commit of an attempt and the collection of its data: clocks and listings are not exact."""

Reason = Literal[
    "attempt without a manifest",
    "checkpoint of a rebase that was not made",
    "model handed over and not fetched",
    "incomplete version of a model",
    "temporary file",
    "scratch folder",
    "multipart upload",
]
Kept = Literal[
    "live",
    "younger than asked for",
    "incomplete version of a model (publish it again, or collect when nobody writes)",
    "beside a manifest that cannot be read",
    "named since it was looked at",
    "not understood",
]


class ObjectTotals(Frozen):
    """How much of something."""

    objects: int = 0
    bytes: int = 0


class Garbage(NamedTuple):
    """Something that a collection may delete."""

    name: str
    """Key of an object, or the name of a leftover."""
    reason: Reason
    size: int
    modified: float
    leftover: Leftover | None = None


class GcReport(Frozen):
    """What a collection deleted (or, dry, would have) and kept."""

    dry_run: bool
    deleted: dict[Reason, ObjectTotals]
    kept: dict[Kept, ObjectTotals]
    names: tuple[str, ...]
    """What was deleted, sorted."""
    unknown: tuple[str, ...]
    """Keys that are nothing a store keeps."""
    unreadable: tuple[str, ...]
    """Manifests that cannot be read. Nothing beside them is deleted."""

    @property
    def total(self) -> ObjectTotals:
        tallies = self.deleted.values()
        return ObjectTotals(objects=sum(t.objects for t in tallies), bytes=sum(t.bytes for t in tallies))


def collect_garbage(
    store: ObjectStore,
    *,
    now: float | None = None,
    older_than: timedelta = OLDER_THAN,
    dry_run: bool = False,
    exclusive: bool = False,
    threads: int = 8,
) -> GcReport:
    """Deletes what is garbage and older than that; runs may go on meanwhile.

    Args:
        now: Epoch seconds by the store's clock. None: the store is asked.
        older_than: At least 13 hours, unless nobody else writes.
        exclusive: The caller's word for it. Takes incomplete versions of models too.
        threads: Requests at a time.

    Raises ValueError for too small an age, PermanentStorageError when a newer version of this program writes here.
    """
    least = timedelta(seconds=MAX_ATTEMPT_SECONDS) + MARGIN
    if older_than < least and not exclusive:
        raise ValueError(
            f"older_than={older_than} may take what a running writer is about to commit; give at least {least}, or "
            "make sure that nothing writes to the store and say so"
        )
    collection = _Collection(store, older_than=older_than, exclusive=exclusive, threads=threads, now=now)
    return collection.run(dry_run=dry_run)


def garbage_candidates(store: ObjectStore, *, older_than: timedelta = OLDER_THAN) -> list[Garbage]:
    """What a collection with that age would delete now, sorted by name. Nothing is changed. With no age at all: every
    object that no manifest names, of running writers too."""
    collection = _Collection(store, older_than=older_than, exclusive=False, threads=8, now=None)
    return collection.candidates()


class _Collection:
    def __init__(
        self, store: ObjectStore, *, older_than: timedelta, exclusive: bool, threads: int, now: float | None
    ) -> None:
        self.store, self.exclusive, self.threads, self.now = store, exclusive, threads, now
        self.seconds = older_than.total_seconds()
        self.kept: dict[Kept, list[int]] = defaultdict(list)
        self.unknown: list[str] = []
        self.unreadable: set[str] = set()
        self._files_of: dict[tuple[str, float], frozenset[str]] = {}
        """(manifest's key, its modified time) -> the keys it names; a cache for the second listing."""

    def run(self, *, dry_run: bool) -> GcReport:
        garbage = self.candidates()
        if garbage and not dry_run:
            garbage = self._delete(self._still_garbage(garbage))
        counts, sizes = Counter(g.reason for g in garbage), Counter[Reason]()
        for found in garbage:
            sizes[found.reason] += found.size
        return GcReport(
            dry_run=dry_run,
            deleted={reason: ObjectTotals(objects=counts[reason], bytes=sizes[reason]) for reason in sorted(counts)},
            kept={why: ObjectTotals(objects=len(found), bytes=sum(found)) for why, found in sorted(self.kept.items())},
            names=tuple(sorted(found.name for found in garbage)),
            unknown=tuple(self.unknown),
            unreadable=tuple(sorted(self.unreadable)),
        )

    def candidates(self) -> list[Garbage]:
        objects, leftovers = list(self.store.list()), list(self.store.leftovers())
        if not objects and not leftovers:
            return []  # asking the clock would make the store's folder
        if self.now is None:
            self.now = self.store.now()
        named = self._named(objects)
        return sorted([*self._objects(objects, named), *self._leftovers(leftovers)])

    # -- mark --------------------------------------------------------------------------------------------------

    def _named(self, objects: Iterable[ObjectInfo]) -> set[str]:
        """The keys that some manifest names."""
        manifests = [info for info in objects if key_patterns.classify_key(info.key) == "manifest"]
        new = [info for info in manifests if (info.key, info.modified) not in self._files_of]
        for info, files in zip(new, self._each(lambda info: self._files(info.key), new), strict=True):
            self._files_of[info.key, info.modified] = files
        return {key for info in manifests for key in self._files_of[info.key, info.modified]}

    def _files(self, manifest_key: str) -> frozenset[str]:
        artifact = key_patterns.artifact_of_manifest(manifest_key)
        assert artifact is not None
        try:
            return frozenset(entry.key for entry in read_manifest(self.store, artifact).files)
        except ObjectNotFound:
            return frozenset()  # pruned since the listing
        except CorruptArtifact:
            self._refuse_newer(manifest_key)
            self.unreadable.add(manifest_key)
            return frozenset()

    def _refuse_newer(self, manifest_key: str) -> None:
        try:
            version = json.loads(self.store.get(manifest_key)).get("schema_version")
        except (ValueError, AttributeError, ObjectNotFound):
            return  # damaged
        if isinstance(version, int) and version > MANIFEST_VERSION:
            raise PermanentStorageError(
                f"{manifest_key} in {self.store.url} has schema version {version}, this code knows {MANIFEST_VERSION}: "
                "what a newer version needs cannot be told; collect with the newer one. Nothing was deleted"
            )

    # -- sort --------------------------------------------------------------------------------------------------

    def _objects(self, objects: Iterable[ObjectInfo], named: set[str]) -> Iterator[Garbage]:
        unreadable = {key_patterns.artifact_of_manifest(key) for key in self.unreadable}
        handed_over: defaultdict[str | None, float] = defaultdict(float)  # a model is handed over, and goes, as a whole
        unmade = set()
        for info in objects:
            if key_patterns.classify_key(info.key) == "upload":
                owner = key_patterns.owning_artifact(info.key)
                handed_over[owner] = max(handed_over[owner], info.modified)
            elif not self._young(info.modified) and self._unmade(key_patterns.artifact_of_manifest(info.key)):
                unmade.add(key_patterns.artifact_of_manifest(info.key))
        for info in objects:
            kind = key_patterns.classify_key(info.key)
            if kind == "unknown":
                self.unknown.append(info.key)
                self._keep("not understood", info.size)
            elif (owner := key_patterns.owning_artifact(info.key)) in unmade:
                yield Garbage(info.key, "checkpoint of a rebase that was not made", info.size, info.modified)
            elif kind in ("standalone", "manifest") or info.key in named:
                self._keep("live", info.size)
            elif owner in unreadable:
                self._keep("beside a manifest that cannot be read", info.size)
            elif kind == "published" and not self.exclusive:
                self._keep("incomplete version of a model (publish it again, or collect when nobody writes)", info.size)
            elif self._young(handed_over.get(owner, info.modified)):
                self._keep("younger than asked for", info.size)
            else:
                yield Garbage(info.key, _REASONS[kind], info.size, info.modified)

    def _unmade(self, owner: str | None) -> bool:
        """Whether it is the checkpoint of a rebase that nobody committed, or whose race another won."""
        of = None if owner is None else keys.rebase_of_checkpoint(owner)
        if of is None:
            return False
        run, stage, model, step, _ = of
        try:
            rebase = rebase_at(Chain(self.store, run, stage, model), step)
        except CorruptArtifact:
            return False  # it may be the one that names it
        return rebase is None or rebase.checkpoint.key != owner

    def _leftovers(self, leftovers: Iterable[Leftover]) -> Iterator[Garbage]:
        for left in leftovers:
            if self._young(left.modified):
                self._keep("younger than asked for", left.size)
            else:
                yield Garbage(left.name, left.kind, left.size, left.modified, left)

    def _young(self, modified: float) -> bool:
        assert self.now is not None
        return self.now - modified <= self.seconds

    def _keep(self, why: Kept, size: int) -> None:
        self.kept[why].append(size)

    # -- sweep -------------------------------------------------------------------------------------------------

    def _still_garbage(self, garbage: list[Garbage]) -> list[Garbage]:
        """Those that nothing came to name, and nobody wrote again, while the manifests were read."""
        objects, leftovers = list(self.store.list()), list(self.store.leftovers())
        named, unreadable = self._named(objects), {key_patterns.artifact_of_manifest(key) for key in self.unreadable}
        written = {info.key: info.modified for info in objects} | {left.name: left.modified for left in leftovers}
        still = []
        for found in garbage:
            owner = key_patterns.owning_artifact(found.name) if found.leftover is None else None
            if found.reason == "checkpoint of a rebase that was not made":
                lost = not self._unmade(owner)
            else:
                lost = found.leftover is None and (found.name in named or owner in unreadable)
            if lost or written.get(found.name) != found.modified:
                self._keep("named since it was looked at", found.size)
            else:
                still.append(found)
        return still

    def _delete(self, garbage: list[Garbage]) -> list[Garbage]:
        """Deletes, one owner at a time; returns what was deleted."""
        groups: defaultdict[str, list[Garbage]] = defaultdict(list)
        for found in garbage:
            owner = None if found.leftover else key_patterns.owning_artifact(found.name)
            groups[owner or found.name].append(found)
        deleted = [found for group in self._each(self._delete_group, sorted(groups.items())) for found in group]
        for found in set(garbage) - set(deleted):
            self._keep("named since it was looked at", found.size)
        return deleted

    def _delete_group(self, group: tuple[str, list[Garbage]]) -> list[Garbage]:
        """The last look: the one manifest that could name this data is read right before it goes."""
        owner, found = group
        if found[0].leftover is not None:
            self.store.remove_leftover(found[0].leftover)
            return found
        if found[0].reason == "checkpoint of a rebase that was not made" and not self._unmade(owner):
            return []
        if found[0].reason in ("model handed over and not fetched", "checkpoint of a rebase that was not made"):
            # the manifest first: nobody follows one to data that is gone
            found = sorted(found, key=lambda one: key_patterns.artifact_of_manifest(one.name) is None)
        else:
            possible = (keys.manifest(owner), keys.manifest_of_files(owner))
            manifests = [key for key in possible if key_patterns.artifact_of_manifest(key)]
            named = {key for manifest in manifests for key in self._files(manifest)}
            if self.unreadable.intersection(manifests):
                return []
            found = [one for one in found if one.name not in named]
        for one in found:
            self.store.delete(one.name)
        return found

    def _each(self, call: Callable[[T], R], items: list[T]) -> list[R]:
        if self.threads <= 1 or len(items) <= 1:
            return [call(item) for item in items]
        with ThreadPoolExecutor(self.threads) as pool:
            return list(pool.map(call, items))


_REASONS: dict[key_patterns.KeyKind, Reason] = {
    "attempt": "attempt without a manifest",
    "published": "incomplete version of a model",
    "upload": "model handed over and not fetched",
}
