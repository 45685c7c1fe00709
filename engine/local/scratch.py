"""Folders on this machine for files on their way to or from the store."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from storage.store.backends.protocol import HIDDEN_PREFIX
from storage.store.objects import ObjectStore


def scratch_folder(store: ObjectStore) -> Path:
    """A new empty folder, whose files can be renamed into the store where that is on this machine: a checkpoint is
    then not copied. The hidden name keeps what a kill leaves behind out of every listing."""
    inside = store.local_path("scratch")
    parent = None if inside is None else inside.parent
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{HIDDEN_PREFIX}scratch-", dir=parent))


@contextlib.contextmanager
def scratch(store: ObjectStore) -> Iterator[Path]:
    """Such a folder, which goes at the end."""
    folder = scratch_folder(store)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
