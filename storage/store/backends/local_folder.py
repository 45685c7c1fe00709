"""Detects that the folder of a file:// store is gone or holds another store, because a disk was unmounted or a folder
was moved.

A process expects the store that it saw first. `store.json` holds the id of a store. Of a store without an id, only the
existence of the folder is checked.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from storage.errors import CorruptArtifact, OtherStore, StoreGone
from storage.store.backends.local_errors import storage_error_of
from storage.store.keys import store_json


class StoreFolder:
    """The folder of a store, and what earlier checks of this process found there."""

    def __init__(self, root: Path, url: str) -> None:
        self._root, self._url = root, url
        self._file = root / store_json()
        self._folder_existed = False
        """Whether an earlier check found the folder."""
        self._id: str | None = None
        """The id that an earlier check read from store.json; None if there was no such file yet."""
        self._file_signature: tuple[int, ...] | None = None
        """Device, inode, time and size of store.json when its id was read. It is read again when one changes."""

    def check(self) -> None:
        """Compares the folder with what earlier checks found. This costs one `stat` if nothing changed.

        Raises:
            StoreGone: the folder or its store.json was there and is gone.
            OtherStore: store.json has another id than before.
            CorruptArtifact: store.json has no id.
        """
        # read first: another thread may create store.json after this one looked for it
        known_id, folder_existed = self._id, self._folder_existed
        # unchanged since the last check: the id need not be read again
        try:
            stat = os.stat(self._file)
            signature = (stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if signature == self._file_signature:
                return
            store_id = read_store_id(self._file.read_bytes(), str(self._file))
        except (FileNotFoundError, NotADirectoryError):
            self._check_absence(known_id, folder_existed=folder_existed)
            return
        except OSError as error:
            raise storage_error_of(error, store_json(), self._url) from error
        # changed: compare the id with the one that was read first
        if self._id not in (None, store_id):
            raise OtherStore(
                f"{self._url} holds another store than before: {self._file} had the id {self._id}, now it has "
                f"{store_id}; mount the disk or move back the folder of the first one"
            )
        self._folder_existed, self._id, self._file_signature = True, store_id, signature

    def _check_absence(self, known_id: str | None, *, folder_existed: bool) -> None:
        """Handles a folder without store.json: either the store has no id yet, or it is gone.

        `known_id` and `folder_existed` are what was known before the file was looked for. Raises StoreGone if an
        earlier check found store.json, or found the folder and now it is not there."""
        exists = self._root.is_dir()
        if known_id is not None:
            state = "the folder has no such file" if exists else "there is no such folder"
            expected = f"expected {self._file} with the id {known_id}, but {state}"
        elif folder_existed and not exists:
            expected = f"expected the folder {self._root}, but there is none"
        else:
            self._folder_existed |= exists
            return
        raise StoreGone(
            f"the store at {self._url} was there and is gone: {expected}; mount its disk or move the folder back. "
            "No new store was begun in its place"
        )


def read_store_id(data: bytes, where: str) -> str:
    """Returns the id in the bytes of a store.json. Raises CorruptArtifact, which names `where` they are from."""
    try:
        return str(json.loads(data)["id"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptArtifact(
            f"{where} does not say which store this is ({error!r}); restore it from a backup"
        ) from error
