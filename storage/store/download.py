"""Makes the files of a committed artifact available on this machine, with checked digests."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from storage.errors import CorruptArtifact, ObjectNotFound
from storage.serialization import digest_file
from storage.store.artifacts import FileEntry, Manifest, map_files, read_manifest
from storage.store.objects import ObjectStore

BLOCK_BYTES = 1 << 20
"""Bytes of a file that are in memory at a time."""


def materialise_files(store: ObjectStore, key: str, to: Path, *, names: Iterable[str] | None = None) -> dict[str, Path]:
    """Returns the local path of each file of an artifact, by name. Digests are checked.

    For a store on this machine these are the stored files themselves: never write to them. Otherwise the files are
    downloaded to the folder `to`; a download that is already there is used again.

    Args:
        names: Return only these files. Names that the artifact does not have are left out.

    Raises ObjectNotFound, CorruptArtifact.
    """
    selected = None if names is None else set(names)
    entries = [entry for entry in read_manifest(store, key).files if selected is None or entry.name in selected]
    try:
        paths = map_files(lambda entry: _materialise(store, entry, to), entries)
    except CorruptArtifact:
        # raises ObjectNotFound if the artifact was deleted meanwhile: then its missing data is no corruption
        read_manifest(store, key)
        raise
    return {entry.name: path for entry, path in zip(entries, paths, strict=True)}


def _materialise(store: ObjectStore, entry: FileEntry, to: Path) -> Path:
    # a store on this machine: the stored file itself
    stored_path = store.local_path(entry.key)
    if stored_path is not None:
        if not stored_path.is_file():
            raise CorruptArtifact(_gone(store, entry))
        entry.check(*digest_file(stored_path))
        return stored_path
    # a store on another machine: download, unless an earlier call did
    path = to / entry.name
    if not path.is_file() or digest_file(path).sha256 != entry.sha256:
        try:
            fetched = store.fetch(entry.key, path)
        except ObjectNotFound as error:
            raise CorruptArtifact(_gone(store, entry)) from error
        entry.check(*fetched)
    return path


def _gone(store: ObjectStore, entry: FileEntry) -> str:
    return f"the file {entry.name} of a committed artifact is gone: {entry.key} in {store.url}"


def file_blocks(store: ObjectStore, entry: FileEntry) -> Iterator[bytes]:
    """Yields the bytes of a file, one block at a time. The digest is not checked."""
    with store.open(entry.key) as stream:
        while block := stream.read(BLOCK_BYTES):
            yield block


def tar_blocks(store: ObjectStore, manifest: Manifest, folder: str) -> Iterator[bytes]:
    """Yields the files of an artifact as a tar archive, one block at a time. `folder` is their folder in it."""
    for entry in manifest.files:
        header = tarfile.TarInfo(f"{folder}/{entry.name}")
        header.size, header.mode = entry.bytes, 0o644
        yield header.tobuf()
        yield from file_blocks(store, entry)
        yield bytes(-entry.bytes % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)
