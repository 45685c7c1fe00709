"""Temporary folders on this machine for files that come from the store or go to it."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from storage.store.backends.protocol import HIDDEN_PREFIX
from storage.store.objects import ObjectStore


def scratch_folder(store: ObjectStore) -> Path:
    """Creates a new empty folder, on the same disk as the store if the store is on this machine.

    Its files can then be renamed into the store instead of being copied. The prefix of its name hides a folder that a
    killed process left behind from every listing of the store.
    """
    store_path = store.local_path("scratch")
    parent = None
    if store_path is not None:
        parent = store_path.parent
        parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{HIDDEN_PREFIX}scratch-", dir=parent))


@contextlib.contextmanager
def scratch(store: ObjectStore) -> Iterator[Path]:
    """Creates a scratch folder and removes it at the end of the block."""
    folder = scratch_folder(store)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
