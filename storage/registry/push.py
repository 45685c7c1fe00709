"""Copies a registered model to a folder, a bucket or a Hugging Face hub, through fsspec."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import fsspec

from storage.errors import PermanentStorageError
from storage.secrets import refuse_secrets
from storage.store import keys
from storage.store.artifacts import Manifest, read_manifest
from storage.store.download import materialise_files
from storage.store.objects import ObjectStore
from storage.temporary import process_folder

CARD = "README.md"
BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss"})
"""Protocols of object stores. They have no folders, and fsspec's makedirs would create a bucket if its name is
misspelled."""


class PushRefused(PermanentStorageError):
    """Raised when the target holds other files, or cannot be written."""


def push_model(store: ObjectStore, name: str, version: str, url: str, *, card: str, force: bool = False) -> list[str]:
    """Copies the files of a version, then `card` as README.md, and returns the names of all files.

    The card is written last, so that a folder with a card is complete. A repetition completes an interrupted push. A
    folder with other files is refused; with `force`, files are added to it and overwritten. `hf://owner/name` is a
    repository of a Hugging Face hub, and is written in one commit.

    Raises PushRefused, ObjectNotFound, CorruptArtifact, SecretInURL.
    """
    refuse_secrets(url)
    manifest = read_manifest(store, keys.model_version(name, version))
    with tempfile.TemporaryDirectory(prefix="push-", dir=process_folder()) as folder:
        files = materialise_files(store, manifest.key, Path(folder))  # digests are checked
        if url.startswith("hf://"):
            _to_hub(url.removeprefix("hf://"), files, card, message=f"{name}@{version}")
        else:
            _to_filesystem(url, manifest, files, card, force=force)
    return sorted({*files, CARD})


def _to_filesystem(url: str, manifest: Manifest, files: dict[str, Path], card: str, *, force: bool) -> None:
    # the file system of the URL
    try:
        filesystem, root = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise PushRefused(f"nothing can be pushed to {url!r}: {error}") from error
    sizes = {entry.name: entry.bytes for entry in manifest.files}
    try:
        # refuse a folder with files that an interrupted push of this version cannot have left
        existing_sizes = _existing_sizes(filesystem, root)
        others = sorted(name for name, size in existing_sizes.items() if name != CARD and sizes.get(name) != size)
        if others and not force:
            raise PushRefused(
                f"{url} holds other files ({', '.join(others[:5])}); push to an empty folder, or use "
                "--force to add files and overwrite existing ones"
            )
        # copy the files, then the card
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


def _existing_sizes(filesystem: Any, root: str) -> dict[str, int]:
    """Returns the size in bytes of each file in the folder, by name."""
    if not filesystem.exists(root):
        return {}
    listed = filesystem.find(root, detail=True)
    prefix = f"{root.rstrip('/')}/"
    return {path.removeprefix(prefix): info["size"] for path, info in listed.items()}


def _to_hub(repository: str, files: dict[str, Path], card: str, *, message: str) -> None:
    try:
        from huggingface_hub import CommitOperationAdd, HfApi
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise PushRefused("hf:// needs the package huggingface_hub; pip install huggingface_hub") from error
    api = HfApi()
    operations = []
    for name, path in files.items():
        if name != CARD:
            operations.append(CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(path)))
    operations.append(CommitOperationAdd(path_in_repo=CARD, path_or_fileobj=card.encode()))
    # one commit, so that the repository is never incomplete
    try:
        api.create_repo(repository, private=True, exist_ok=True)
        api.create_commit(repository, operations, commit_message=message)
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise PushRefused(f"hf://{repository} cannot be written: {error}") from error
