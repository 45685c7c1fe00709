"""Model folders from a client's machine: through the store, never through the engine's door.

The client puts the files under a key that names their content, the server checks that they load, publishes them as
the embedded engine would, and deletes the upload. Each part may be repeated at any moment.
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


class ServedEngine(Engine, Protocol):
    """An engine that can stand behind a server."""

    async def import_folder(self, folder: ModelFolder, *, provenance: Provenance) -> ArtifactRef:
        """A checked folder brought into the registry. Idempotent."""
        ...


def stage_upload(store: ObjectStore, folder: ModelFolder, digest: str, *, provenance: Provenance) -> ArtifactRef:
    """Puts the folder where the server looks for it. Idempotent; the files stay."""
    key = keys.upload(folder.name, digest)
    return commit_files(store, key, folder.files, kind="upload", provenance=provenance, move=False)


def published_upload(store: ObjectStore, name: str, digest: str) -> ArtifactRef | None:
    """The model that an upload of this content became, or None; what is left of the upload is deleted."""
    ref = find_published(store, name, registry_version(digest))
    if ref is None or ref.sha256 != digest:
        return None
    discard_upload(store, name, digest)
    return ref


def fetch_upload(store: ObjectStore, name: str, digest: str, scratch: Path) -> ModelFolder:
    """The uploaded folder on this machine. Raises ObjectNotFound, CorruptArtifact, BadModelFolder."""
    files = materialise_files(store, keys.upload(name, digest), scratch)
    folder = ModelFolder.of(next(iter(files.values())).parent, name=name)
    if folder.digest() != digest:  # in a local store the files are the upload's own, and may be on their way out
        raise CorruptArtifact(f"the upload {keys.upload(name, digest)} is not what it says; hand the folder over again")
    return folder


def discard_upload(store: ObjectStore, name: str, digest: str) -> None:
    """Deletes the upload, its manifest first: there is no moment at which a manifest names missing files."""
    key = keys.upload(name, digest)
    try:
        manifest = read_manifest(store, key)
    except ObjectNotFound:
        return
    store.delete(keys.manifest_of_files(key))
    for entry in manifest.files:
        store.delete(entry.key)


async def import_upload(
    engine: ServedEngine, store: ObjectStore, name: str, digest: str, *, provenance: Provenance
) -> ArtifactRef:
    """Raises ObjectNotFound when neither the upload nor the model it became is there."""
    published = await asyncio.to_thread(published_upload, store, name, digest)
    if published is not None:
        return published
    with tempfile.TemporaryDirectory(prefix="ostinato-upload-") as scratch:
        try:
            folder = await asyncio.to_thread(fetch_upload, store, name, digest, Path(scratch))
            ref = await engine.import_folder(folder, provenance=provenance)
        except (StorageError, OSError, ValueError):
            # another call, or server, may have imported it meanwhile, and deleted the files under our hands
            published = await asyncio.to_thread(published_upload, store, name, digest)
            if published is None:
                raise
            return published
    await asyncio.to_thread(discard_upload, store, name, digest)
    return ref
