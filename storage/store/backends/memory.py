"""memory://name: a store in the memory of this process, for tests. It uses fsspec's file system under a lock."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from fsspec.implementations.memory import MemoryFileSystem

from storage.errors import ObjectNotFound
from storage.serialization import FileDigest, digest
from storage.store.backends.protocol import Folder, Leftover, ObjectInfo, PutResult

_lock = threading.RLock()  # one per process, because fsspec's memory store is one dict per process


class MemoryBackend:
    """Stores with the same name share their objects within a process."""

    def __init__(self, name: str, clock: Callable[[], float] = time.time) -> None:
        self.url = f"memory://{name}"
        self._clock = clock
        self._fs = MemoryFileSystem()
        self._root = f"/{name}/"

    def get(self, key: str) -> bytes:
        with _lock:
            file = self._fs.store.get(self._root + key)
            if file is None:
                raise ObjectNotFound(f"no object {key!r} in {self.url}")
            return file.getvalue()

    def open(self, key: str) -> BinaryIO:
        return io.BytesIO(self.get(key))

    def exists(self, key: str) -> bool:
        return self._root + key in self._fs.store

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with _lock:
            listed = []
            for path, file in self._fs.store.items():
                if path.startswith(self._root + prefix):
                    key = path.removeprefix(self._root)
                    listed.append(ObjectInfo(key, file.getbuffer().nbytes, file.modified.timestamp()))
        yield from listed

    def folder(self, prefix: str) -> Folder:
        return folder_of(self.list(prefix), prefix)

    def put(self, key: str, data: bytes) -> None:
        with _lock:
            self._fs.pipe_file(self._root + key, data)
            # the clock of the store may be a test's
            self._fs.store[self._root + key].modified = datetime.fromtimestamp(self._clock(), UTC)

    def put_file(self, key: str, path: Path, *, move: bool, resume: bool) -> FileDigest:
        data = path.read_bytes()
        self.put(key, data)
        if move:
            path.unlink(missing_ok=True)
        return FileDigest(digest(data), len(data))

    def put_if_absent(self, key: str, data: bytes, attempt: str) -> PutResult:
        with _lock:
            if self.exists(key):
                return PutResult(False, self.get(key))
            self.put(key, data)
            return PutResult(True, data)

    def delete(self, key: str) -> None:
        with _lock:
            self._fs.store.pop(self._root + key, None)

    def download(self, key: str, to: Path) -> FileDigest:
        data = self.get(key)
        to.write_bytes(data)
        return FileDigest(digest(data), len(data))

    def local_path(self, key: str) -> Path | None:
        return None

    def now(self) -> float:
        return self._clock()

    def leftovers(self, prefix: str) -> Iterator[Leftover]:
        return iter(())

    def remove_leftover(self, name: str) -> None:
        """Does nothing, since this backend has no leftovers."""


def folder_of(listed: Iterable[ObjectInfo], prefix: str) -> Folder:
    """Returns what lies directly below `prefix`, from the listing of everything below it."""
    folders, objects = set(), []
    for info in listed:
        name, separator, _ = info.key.removeprefix(prefix).partition("/")
        if separator:
            folders.add(name)
        else:
            objects.append(info)
    return Folder(sorted(folders), sorted(objects))
