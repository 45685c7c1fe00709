"""The files of a committed artifact on this machine: downloaded, or where the store has them, and checked."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from storage.errors import CorruptArtifact, ObjectNotFound
from storage.serialization import digest_file
from storage.store.artifacts import FileEntry, read_manifest
from storage.store.objects import ObjectStore


def materialise_files(
    store: ObjectStore, key: str, to: Path, *, names: Iterable[str] | None = None
) -> dict[str, Path]:
    """The files of an artifact on this machine, by name: the stored ones themselves where the store is local (never
    write to them), else downloads in `to`. Digests are checked. `names` asks for some; those it lacks are left out.

    Raises ObjectNotFound, CorruptArtifact.
    """
    wanted = None if names is None else set(names)
    paths = {}
    try:
        for entry in read_manifest(store, key).files:
            if wanted is None or entry.name in wanted:
                paths[entry.name] = _materialise(store, entry, to)
    except CorruptArtifact:
        read_manifest(store, key)  # not found any more: it was deleted while it was read, which is no corruption
        raise
    return paths


def _materialise(store: ObjectStore, entry: FileEntry, to: Path) -> Path:
    path = store.local_path(entry.key)
    if path is None:
        path = to / entry.name
        if not path.is_file() or digest_file(path)[0] != entry.sha256:
            with suppress(ObjectNotFound):
                store.fetch(entry.key, path)
    if not path.is_file():
        raise CorruptArtifact(f"the file {entry.name} of a committed artifact is gone: {entry.key} in {store.url}")
    entry.check(*digest_file(path))
    return path
