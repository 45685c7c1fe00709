"""What a kind of store must do. Everything here is one attempt; `ObjectStore` retries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, Protocol

HIDDEN_PREFIX = "~"
"""First character of the names of temporary objects. No key can hold it, so they can never meet one."""


class ObjectInfo(NamedTuple):
    """One object as a listing shows it."""

    key: str
    size: int
    """Bytes."""
    modified: float
    """Epoch seconds by the store's clock."""


class Leftover(NamedTuple):
    """Something that is no object: what a killed writer left where no listing of objects shows it."""

    name: str
    """Means something to its store only."""
    kind: Literal["temporary file", "scratch folder", "multipart upload"]
    size: int
    """Bytes; 0 where the store does not tell."""
    modified: float
    """Epoch seconds by the store's clock: the last sign of life."""


class PutResult(NamedTuple):
    """The answer to a conditional put."""

    won: bool
    data: bytes
    """The bytes that are there now: ours if we won, the first writer's if not."""


class Backend(Protocol):
    """Keys are validated by the caller. Errors are storage.errors only."""

    url: str

    def get(self, key: str) -> bytes: ...
    def open(self, key: str) -> BinaryIO: ...
    def exists(self, key: str) -> bool: ...
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key begins with `prefix`, in any order."""
        ...

    def put(self, key: str, data: bytes) -> None: ...
    def put_file(self, key: str, path: Path, *, move: bool) -> None: ...
    def put_if_absent(self, key: str, data: bytes, attempt: str) -> PutResult:
        """`attempt` is one for all tries of the same call: a store that can keep it beside the bytes tells by it that
        the object which is in the way is the caller's own."""
        ...

    def delete(self, key: str) -> None: ...
    def download(self, key: str, to: Path) -> None: ...
    def local_path(self, key: str) -> Path | None: ...

    def now(self) -> float:
        """Epoch seconds by the clock that gives objects their `modified`; the store must be writable."""
        ...

    def leftovers(self) -> Iterator[Leftover]: ...
    def remove_leftover(self, name: str) -> None:
        """Removes a leftover; an absent one is fine."""
        ...
