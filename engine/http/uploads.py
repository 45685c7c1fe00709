"""Imports model folders from a client's machine. The files travel through the store, not through HTTP.

The client puts the files under a key that contains the digest of their content. The server checks that they load,
publishes them as the embedded engine does, and deletes the upload. Each part may be repeated at any time.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Protocol

from engine.models.folder import ModelFolder, registry_version
from engine.protocol import Engine
from storage.errors import CorruptArtifact, ObjectNotFound, StorageError
from storage.registry.models import find_published
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Provenance, commit_files, read_manifest
from storage.store.download import materialise_files
from storage.store.objects import ObjectStore
from storage.temporary import process_folder


class EngineWithUploads(Engine, Protocol):
    """The engine of a server: it can also import a folder on its own machine."""

    async def import_folder(self, folder: ModelFolder, *, provenance: Provenance) -> ArtifactRef:
        """Publishes a checked folder in the registry. Idempotent."""
        ...


def stage_upload(store: ObjectStore, folder: ModelFolder, digest: str, *, provenance: Provenance) -> ArtifactRef:
    """Uploads the folder to the store for the server. Idempotent; the local files stay."""
    key = keys.upload(folder.name, digest)
    return commit_files(store, key, folder.files, kind="upload", provenance=provenance, move=False)


def drop_published_upload(store: ObjectStore, name: str, digest: str) -> ArtifactRef | None:
    """Deletes what is left of an upload that was published, and returns the model. None: it was not published."""
    ref = find_published(store, name, registry_version(digest))
    if ref is None or ref.sha256 != digest:
        return None
    discard_upload(store, name, digest)
    return ref


def fetch_upload(store: ObjectStore, name: str, digest: str, scratch: Path) -> ModelFolder:
    """Downloads an uploaded folder. Raises ObjectNotFound, CorruptArtifact, BadModelFolder."""
    files = materialise_files(store, keys.upload(name, digest), scratch)
    folder = ModelFolder.of(next(iter(files.values())).parent, name=name)
    # A local store gives its own files, which may be deleted at this moment.
    if folder.digest() != digest:
        key = keys.upload(name, digest)
        raise CorruptArtifact(f"the content of the upload {key} does not match its digest; import the folder again")
    return folder


def discard_upload(store: ObjectStore, name: str, digest: str) -> None:
    """Deletes the upload, its manifest first, so that no manifest ever names missing files."""
    key = keys.upload(name, digest)
    try:
        manifest = read_manifest(store, key)
    except ObjectNotFound:
        return
    store.delete(keys.manifest_of_files(key))
    for entry in manifest.files:
        store.delete(entry.key)


async def import_upload(
    engine: EngineWithUploads, store: ObjectStore, name: str, digest: str, *, provenance: Provenance
) -> ArtifactRef:
    """Publishes an uploaded folder and deletes the upload. Idempotent.

    Raises ObjectNotFound when neither the upload nor the model published from it exists.
    """
    published = await asyncio.to_thread(drop_published_upload, store, name, digest)
    if published is not None:
        return published
    with tempfile.TemporaryDirectory(prefix="upload-", dir=process_folder()) as scratch:
        try:
            folder = await asyncio.to_thread(fetch_upload, store, name, digest, Path(scratch))
            ref = await engine.import_folder(folder, provenance=provenance)
        except (StorageError, OSError, ValueError):
            # Another call or server may have published the model and deleted the files in the meantime.
            published = await asyncio.to_thread(drop_published_upload, store, name, digest)
            if published is None:
                raise
            return published
    await asyncio.to_thread(discard_upload, store, name, digest)
    return ref
