"""A registered model, copied to anywhere that fsspec writes: another folder, a bucket, a hub."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import fsspec

from storage.errors import PermanentStorageError
from storage.store import keys
from storage.store.artifacts import Manifest, read_manifest
from storage.store.download import materialise_files
from storage.store.objects import ObjectStore

CARD = "README.md"
BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss"})
"""Protocols of object stores: a folder is nothing but the names of its files there, and fsspec's makedirs would create
a bucket of a misspelled name."""


class PushRefused(PermanentStorageError):
    """A place that holds something else, or that cannot be written to."""


def push_model(store: ObjectStore, name: str, version: str, url: str, *, card: str, force: bool = False) -> list[str]:
    """Copies the version's files, and `card` as README.md last: a folder with the card is whole. Returns the names.

    What an interrupted push left is completed. A folder with other files is refused without `force`, which writes
    beside and over them. `hf://owner/name` is a repository of a Hugging Face hub, written in one commit.

    Raises PushRefused, ObjectNotFound, CorruptArtifact.
    """
    manifest = read_manifest(store, keys.model_version(name, version))
    with tempfile.TemporaryDirectory(prefix="ostinato-push-") as folder:
        files = materialise_files(store, manifest.key, Path(folder))  # digests are checked
        if url.startswith("hf://"):
            _to_hub(url.removeprefix("hf://"), files, card, message=f"{name}@{version}")
        else:
            _to_filesystem(url, manifest, files, card, force=force)
    return sorted({*files, CARD})


def _to_filesystem(url: str, manifest: Manifest, files: dict[str, Path], card: str, *, force: bool) -> None:
    try:
        filesystem, root = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise PushRefused(f"nothing can be pushed to {url!r}: {error}") from error
    sizes = {entry.name: entry.bytes for entry in manifest.files}
    try:
        there = _there(filesystem, root)
        others = sorted(name for name, size in there.items() if name != CARD and sizes.get(name) != size)
        if others and not force:
            raise PushRefused(
                f"{url} holds other files ({', '.join(others[:5])}); push to an empty folder, or with --force beside "
                "and over them"
            )
        for name, path in files.items():
            if name == CARD:
                continue
            target = f"{root}/{name}"
            _make_folder(filesystem, target.rpartition("/")[0])
            filesystem.put_file(str(path), target)
        _make_folder(filesystem, root)
        filesystem.pipe_file(f"{root}/{CARD}", card.encode())
    except OSError as error:
        raise PushRefused(f"{url} cannot be written: {error}") from error


def _make_folder(filesystem: Any, folder: str) -> None:
    protocols = {filesystem.protocol} if isinstance(filesystem.protocol, str) else set(filesystem.protocol)
    if not protocols & BUCKETS:
        filesystem.makedirs(folder, exist_ok=True)


def _there(filesystem: Any, root: str) -> dict[str, int]:
    """Name -> bytes of what the folder holds already."""
    if not filesystem.exists(root):
        return {}
    found = filesystem.find(root, detail=True)
    prefix = f"{root.rstrip('/')}/"
    return {path.removeprefix(prefix): info["size"] for path, info in found.items()}


def _to_hub(repository: str, files: dict[str, Path], card: str, *, message: str) -> None:
    try:
        from huggingface_hub import CommitOperationAdd, HfApi
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise PushRefused("hf:// needs the package huggingface_hub; pip install huggingface_hub") from error
    api = HfApi()
    operations = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(path))
        for name, path in files.items()
        if name != CARD
    ]
    operations.append(CommitOperationAdd(path_in_repo=CARD, path_or_fileobj=card.encode()))
    try:
        api.create_repo(repository, private=True, exist_ok=True)
        api.create_commit(repository, operations, commit_message=message)
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise PushRefused(f"hf://{repository} cannot be written: {error}") from error
