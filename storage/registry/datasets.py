"""The datasets of a store, by name and version. A version is a digest of the rows and never changes."""

from __future__ import annotations

from storage.serialization import Frozen
from storage.store import key_patterns, keys
from storage.store.artifacts import ArtifactRef, Manifest, read_manifest
from storage.store.objects import ObjectStore


class DatasetVersion(Frozen):
    """One version of a dataset."""

    name: str
    version: str
    use: str | None
    """prompt, completion, preference or rating. None if the manifest does not say it."""
    source: str | None
    """The files or the code that the rows were read from."""
    created: str
    """ISO time at which the version was added, UTC."""
    ref: ArtifactRef
    skipped: int = 0
    """Number of rows that were left out when the version was added."""

    @property
    def key(self) -> str:
        """`name@version`."""
        return f"{self.name}@{self.version}"


def list_datasets(store: ObjectStore, name: str | None = None) -> list[DatasetVersion]:
    """Returns the versions of all datasets, or of one, oldest first. Raises CorruptArtifact."""
    versions = []
    for info in store.list(keys.datasets_prefix(name)):
        key = key_patterns.artifact_of_manifest(info.key)
        if key is not None:
            versions.append(_version_of(read_manifest(store, key)))
    return sorted(versions, key=lambda version: (version.created, version.key))


def _version_of(manifest: Manifest) -> DatasetVersion:
    name, version = keys.dataset_of(manifest.key)
    use, source, skipped = (manifest.extra.get(field) for field in ("use", "source", "skipped"))
    return DatasetVersion(
        name=name,
        version=version,
        use=use if isinstance(use, str) else None,
        source=source if isinstance(source, str) else None,
        created=manifest.created,
        ref=manifest.ref,
        skipped=skipped if isinstance(skipped, int) else 0,
    )
