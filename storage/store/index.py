"""The index of a store: which runs it has, and which objects use a run or a registered model.

Without it, both would be found only by reading all runs. An entry is put before the object that it points to. So a
process that is killed between the two leaves an entry without an object, which readers pass over, and never an object
without an entry. An entry is only a pointer: readers look at the object itself.

The users of a run are the forks of it (`fork.json`), the stages that began at one of its policies (the root of their
chain), the models that were made from it and the decisions that are based on its evaluations (their manifests). The
users of a version of a model are the chains that began at it.
"""

from __future__ import annotations

from collections.abc import Iterable

from storage.errors import IndexIncomplete
from storage.failpoints import failpoint
from storage.serialization import canonical_json
from storage.store import keys
from storage.store.objects import ObjectInfo, ObjectStore


def record_run(store: ObjectStore, run: str, kind: keys.RunList = "runs") -> bool:
    """Adds the run to a list of runs. Call it before the first object of the run, or of its first chain, is written.
    Returns whether the entry is new."""
    key = keys.index_run(run, kind)
    # a run is opened more often than created
    return not store.exists(key) and store.put_if_absent(key, canonical_json({"run": run})).won


def record_uses(store: ObjectStore, user: str, used: Iterable[str]) -> int:
    """Records that the object at the key `user` uses runs or models. Call it before that object is written. Returns
    the number of new entries.

    Args:
        used: Prefixes of runs and logical keys of versions of models.
    """
    added = 0
    for owner in sorted(set(used)):
        added += store.put_if_absent(keys.index_use(owner, user), canonical_json({"used": owner, "user": user})).won
    failpoint("index.recorded")
    return added


def used_by(parents: Iterable[str]) -> set[str]:
    """Returns the prefixes of the runs that the parents of an artifact belong to."""
    runs = {keys.run_of_parent(parent) for parent in parents}
    return {keys.run_prefix(run) for run in runs if run is not None and keys.is_run(run)}


def users_of(store: ObjectStore, used: str) -> list[str]:
    """Returns the keys of the objects that may use a run (its prefix) or a model (its logical key), sorted. Some of
    them may not exist."""
    prefix = keys.index_uses_prefix(used)
    return [info.key.removeprefix(prefix) for info in store.list(prefix)]


def run_entries(store: ObjectStore, prefix: str = "", kind: keys.RunList = "runs") -> dict[str, ObjectInfo]:
    """Returns the entries of the runs whose keys begin with `prefix`, by run. It costs one request for 1,000 runs.

    A run that was being created when its process was killed may have no other object."""
    entries = {}
    for info in store.list(f"{keys.index_runs_prefix(kind)}{prefix}"):
        run = keys.indexed_run(info.key)
        if run is not None:
            entries[run] = info
    return entries


def check_index(store: ObjectStore) -> None:
    """Raises IndexIncomplete if the store has lost its index: then what uses a run is not known."""
    if not store.exists(keys.index_complete()) and store.exists(keys.store_json()):
        raise IndexIncomplete(
            f"the index of {store.url} is gone, so what uses a run is not known; rebuild it with: ostinato doctor "
            f"--deep --storage {store.url}"
        )


def forget_run(store: ObjectStore, run: str) -> None:
    """Deletes the entries of a run whose objects are deleted, except those of users that stay, such as models."""
    prefix = keys.run_prefix(run)
    for user in users_of(store, prefix):
        if not store.exists(user):
            store.delete(keys.index_use(prefix, user))
    store.delete(keys.index_run(run, "chains"))
    store.delete(keys.index_run(run))
