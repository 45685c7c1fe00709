"""Finds and adds the entries that the index of a store lacks (storage.store.index).

The index of a store lacks entries only if objects were lost: an entry is written before the object that it points to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from storage.chain.fork import read_fork
from storage.chain.records import Chain, used_by_root
from storage.errors import CorruptArtifact, ObjectNotFound
from storage.inspect.scopes import scopes_of
from storage.registry.decisions import parents_of_evaluations
from storage.serialization import canonical_json
from storage.store import key_patterns, keys
from storage.store.artifacts import read_manifest
from storage.store.index import record_run, record_uses, used_by
from storage.store.objects import ObjectInfo, ObjectStore


def rebuild_index(store: ObjectStore) -> int:
    """Adds the missing entries of the index, and the mark that it is complete. Returns the number of new entries.

    It lists every object of the store. What cannot be read gets no entry; the audit reports it.
    """
    added = 0
    if store.folder() == ([], []):
        return 0  # a write would create the folder of an empty store
    for scope in scopes_of(store):
        if scope.prefix.startswith((keys.runs_prefix(), keys.models_prefix())):
            objects = scope.objects(store)
            added += sum(record_run(store, run, kind) for run, kind in sorted(_runs_in(objects)))
            added += sum(record_uses(store, info.key, _used_by_object(store, info.key)) for info in objects)
    store.put_if_absent(keys.index_complete(), canonical_json({"schema_version": 1}))
    return added


def missing_entries(store: ObjectStore, objects: Collection[ObjectInfo]) -> Iterator[str]:
    """Yields the keys of the entries that these objects of one scope should have and the index lacks."""
    entries = [keys.index_run(run, kind) for run, kind in sorted(_runs_in(objects))]
    for info in objects:
        entries += [keys.index_use(used, info.key) for used in sorted(_used_by_object(store, info.key))]
    for key in entries:
        if not store.exists(key):
            yield key


def _runs_in(objects: Iterable[ObjectInfo]) -> set[tuple[str, keys.RunList]]:
    """Returns the lists of runs that the runs of these objects belong to."""
    lists: set[tuple[str, keys.RunList]] = set()
    for info in objects:
        run, chain_name = keys.run_of(info.key), keys.chain_of(info.key)
        if run is not None:
            lists.add((run, "runs"))
        if chain_name is not None:
            lists.add((chain_name[0], "chains"))
    return lists


def _used_by_object(store: ObjectStore, key: str) -> set[str]:
    """Returns the runs (prefixes) and models (logical keys) that the object uses: see storage.store.index."""
    run, chain_name, artifact = keys.run_of(key), keys.chain_of(key), key_patterns.artifact_of_manifest(key)
    try:
        if chain_name is not None and key == keys.chain_root(*chain_name):
            root = Chain(store, *chain_name).root()
            return set() if root is None else set(used_by_root(root))
        if run is not None and key == keys.fork_json(run):
            fork = read_fork(store, run)
            return set() if fork is None else {keys.run_prefix(fork.run)}
        if artifact is not None and key.startswith(keys.models_prefix()):
            manifest = read_manifest(store, artifact)
            origins = parents_of_evaluations(store, manifest.parents) if manifest.kind == "decision" else []
            return used_by([*manifest.parents, *origins])
    except (CorruptArtifact, ObjectNotFound):
        pass  # the audit reports what cannot be read
    return set()
