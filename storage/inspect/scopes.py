"""Divides a store into scopes, so that garbage collection and audit hold the listing of one scope in memory.

A scope is a run, the versions of one model, the versions of one dataset, or an area without artifacts. The keys of an
artifact's data begin with its logical key, so an artifact never belongs to two scopes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from storage.chain.listing import run_objects
from storage.store import keys
from storage.store.objects import ObjectInfo, ObjectStore


class Scope(NamedTuple):
    """A part of a store."""

    prefix: str
    """What the keys of its objects begin with."""
    run: str | None = None
    """The run, if the scope is one."""
    extent: Literal["all", "folder", "parts"] = "all"
    """all: everything below the prefix. folder: the objects directly in it that belong to no run. parts: the objects of
    the run, where the runs `run/time` of a schedule lie below the prefix, too."""

    def objects(self, store: ObjectStore) -> list[ObjectInfo]:
        """Returns the objects of the scope, sorted by key."""
        if self.extent == "parts" and self.run is not None:
            return sorted(run_objects(store, self.run))
        if self.extent == "folder":
            return [info for info in store.folder(self.prefix).objects if keys.run_of(info.key) is None]
        return list(store.list(self.prefix))


def run_scope(run: str) -> Scope:
    """Returns the scope of one run."""
    return Scope(keys.run_prefix(run), run, "all" if "/" in run else "parts")


def scopes_of(store: ObjectStore) -> Iterator[Scope]:
    """Yields the scopes of a whole store, which are disjoint. It costs one listing of one folder for each run, and none
    of its objects is listed."""
    yield Scope("", extent="folder")
    for area in store.folder().folders:
        prefix = f"{area}/"
        if prefix == keys.runs_prefix():
            yield from _scopes_of_runs(store)
        elif prefix in (keys.models_prefix(), keys.datasets_prefix()):
            yield Scope(prefix, extent="folder")
            for name in store.folder(prefix).folders:
                yield Scope(f"{prefix}{name}/")
        else:
            yield Scope(prefix)


def runs_of(store: ObjectStore) -> Iterator[str]:
    """Yields every run that has an object, without the index of the store."""
    for scope in _scopes_of_runs(store):
        if scope.run is not None:
            yield scope.run


def _scopes_of_runs(store: ObjectStore) -> Iterator[Scope]:
    runs_prefix = keys.runs_prefix()
    yield Scope(runs_prefix, extent="folder")
    for name in store.folder(runs_prefix).folders:
        prefix = f"{runs_prefix}{name}/"
        folders, objects = store.folder(prefix)
        parts = {*folders, *(info.key.removeprefix(prefix) for info in objects)} & set(keys.RUN_PARTS)
        children = [folder for folder in folders if folder not in keys.RUN_PARTS]
        if not children:
            yield Scope(prefix, name if keys.is_run(name) else None)
            continue
        if parts and keys.is_run(name):
            yield Scope(prefix, name, "parts")
        yield Scope(prefix, extent="folder")
        for child in children:
            run = f"{name}/{child}"
            yield Scope(f"{prefix}{child}/", run if keys.is_run(run) else None)
