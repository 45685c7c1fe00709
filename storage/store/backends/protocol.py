"""The interface of a backend, a kind of store. A call is one attempt; `ObjectStore` retries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, Protocol

from storage.serialization import FileDigest

HIDDEN_PREFIX = "~"
"""First character of the names of temporary objects. No key contains it, so they never collide with an object."""


class ObjectInfo(NamedTuple):
    """One object as a listing shows it."""

    key: str
    size: int
    """Bytes."""
    modified: float
    """Epoch seconds by the store's clock."""


class Folder(NamedTuple):
    """What lies directly below a prefix that ends with a slash, or directly in the store for the empty prefix."""

    folders: list[str]
    """Names of the folders that hold at least one object at any depth, sorted."""
    objects: list[ObjectInfo]
    """The objects of the folder itself, sorted by key."""


class Leftover(NamedTuple):
    """A temporary file, scratch folder or unfinished upload that a killed writer left. Listings do not show it."""

    name: str
    """Name by which the backend finds it. It is not a key."""
    kind: Literal["temporary file", "scratch folder", "multipart upload"]
    size: int
    """Bytes; 0 if the store does not tell."""
    modified: float
    """Epoch seconds of the last change, by the store's clock."""


class PutResult(NamedTuple):
    """The answer to a conditional put."""

    won: bool
    data: bytes
    """The bytes that are stored now: those of the caller if it won, else those of the first writer."""


class Backend(Protocol):
    """Reads and writes objects. The caller validates the keys. All errors are StorageErrors."""

    url: str

    def get(self, key: str) -> bytes: ...
    def open(self, key: str) -> BinaryIO: ...
    def exists(self, key: str) -> bool: ...
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Returns the objects whose key begins with `prefix`, in any order."""
        ...

    def folder(self, prefix: str) -> Folder:
        """Returns the contents of one folder. The cost does not depend on what lies deeper."""
        ...

    def put(self, key: str, data: bytes) -> None: ...
    def put_file(self, key: str, path: Path, *, move: bool, resume: bool) -> FileDigest | None:
        """Writes the bytes of a file. Returns their digest if the backend read them, None if it need not read them.

        `resume`: every writer of this key writes the same bytes, so an upload that was interrupted can be continued."""
        ...

    def put_if_absent(self, key: str, data: bytes, attempt: str) -> PutResult:
        """Writes the object if there is none. `attempt` is the same for all retries of a call: a backend that stores it
        with the bytes can tell by it that an existing object was written by an earlier try of the same call."""
        ...

    def delete(self, key: str) -> None: ...
    def download(self, key: str, to: Path) -> FileDigest:
        """Copies the object to the file `to`. Returns the digest of what was written."""
        ...

    def local_path(self, key: str) -> Path | None: ...

    def now(self) -> float:
        """Epoch seconds by the clock that sets `ObjectInfo.modified`. The store must be writable."""
        ...

    def leftovers(self, prefix: str) -> Iterator[Leftover]:
        """Returns the leftovers whose name begins with `prefix`, in any order."""
        ...

    def remove_leftover(self, name: str) -> None:
        """Removes a leftover. Does nothing if it is gone."""
        ...
