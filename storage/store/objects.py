"""Objects by key, wherever they are: the one public class over every kind of store."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from storage.errors import CorruptArtifact, ObjectNotFound, StorageFull, TransientStorageError, UnsupportedFilesystem
from storage.store.backends.local import LocalBackend
from storage.store.backends.memory import MemoryBackend
from storage.store.backends.protocol import HIDDEN_PREFIX, Backend, Leftover, ObjectInfo, PutResult
from storage.store.keys import validate_key, validate_name, validate_prefix
from storage.store.retry import RetryPolicy, with_retries

__all__ = ["Leftover", "ObjectInfo", "ObjectStore", "PutResult", "open_store", "read_json"]


Clock = Callable[[], float]


def _uptime() -> float:
    """Seconds that also pass while the machine sleeps, where the system counts those."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


CLOCKS: tuple[Clock, ...] = (_uptime, time.time)  # neither alone: one misses a paused machine, the other may be set


class ObjectStore:
    """Whole immutable-minded objects by key.

    An object is there with all its bytes or not at all, and survives power loss once a call returned. Transient
    failures are retried by `retry`, then StorageUnavailable; a full disk or quota is StorageFull; a bad key InvalidKey.
    """

    def __init__(
        self, backend: Backend, *, retry: RetryPolicy | None = None, clocks: tuple[Clock, ...] = CLOCKS
    ) -> None:
        """`clocks` count seconds; the age of a writer's attempt is what the fastest of them says."""
        self.backend = backend
        self.retry = retry or RetryPolicy()
        self.clocks = clocks

    @property
    def url(self) -> str:
        return self.backend.url

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"

    def get(self, key: str) -> bytes:
        """All bytes. Raises ObjectNotFound."""
        validate_key(key)
        return with_retries(lambda: self.backend.get(key), self._what("get", key), self.retry)

    def open(self, key: str) -> BinaryIO:
        """A seekable reader. Raises ObjectNotFound. The caller closes it."""
        validate_key(key)
        return with_retries(lambda: self.backend.open(key), self._what("open", key), self.retry)

    def exists(self, key: str) -> bool:
        validate_key(key)
        return with_retries(lambda: self.backend.exists(key), self._what("exists", key), self.retry)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key begins with `prefix`, sorted by key. Taken whole before the first is given, since
        some servers list in an order of their own."""
        validate_prefix(prefix)
        return iter(with_retries(lambda: sorted(self.backend.list(prefix)), self._what("list", prefix), self.retry))

    def put(self, key: str, data: bytes) -> None:
        """Writes or replaces the object, atomically and durably."""
        validate_key(key)
        with_retries(lambda: self.backend.put(key, data), self._what("put", key), self.retry)

    def put_file(self, key: str, path: Path, *, move: bool = False) -> None:
        """Like put, from a file, in bounded memory. With `move` the file may be taken instead of copied, and is gone
        afterwards; a file that already is an object of a file:// store is never taken. Raises FileNotFoundError."""
        validate_key(key)
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not a file, so it cannot be stored as {key!r}")
        with_retries(lambda: self.backend.put_file(key, path, move=move), self._what("put_file", key), self.retry)

    def put_if_absent(self, key: str, data: bytes) -> PutResult:
        """The only commit primitive: of any number of writers, on any machines, one wins; all see its bytes.

        A try that failed half-way may have written all the same. So after one, finding exactly our bytes is a win:
        callers to whom winning matters make their bytes unlike any other's by an attempt id.
        """
        validate_key(key)
        unsure, attempt_id = False, uuid4().hex

        def attempt() -> PutResult:
            nonlocal unsure
            try:
                return self.backend.put_if_absent(key, data, attempt_id)
            except TransientStorageError:
                unsure = True
                raise

        result = with_retries(attempt, self._what("put_if_absent", key), self.retry)
        return PutResult(True, data) if unsure and result.data == data else result

    def delete(self, key: str) -> None:
        """Removes the object; an absent one is fine."""
        validate_key(key)
        with_retries(lambda: self.backend.delete(key), self._what("delete", key), self.retry)

    def fetch(self, key: str, to: Path) -> None:
        """Copies the object to the file `to`, in bounded memory; `to` appears whole or not at all. Raises
        ObjectNotFound, and StorageFull when the disk of `to` is full."""
        validate_key(key)
        to.parent.mkdir(parents=True, exist_ok=True)
        temporary = to.with_name(f"{HIDDEN_PREFIX}{uuid4().hex}")
        try:
            with_retries(lambda: self.backend.download(key, temporary), self._what("fetch", key), self.retry)
            os.replace(temporary, to)
        except StorageFull as error:
            raise StorageFull(f"no space in {to.parent} for a copy of {key!r} in {self.url}; free some") from error
        finally:
            temporary.unlink(missing_ok=True)

    def local_path(self, key: str) -> Path | None:
        """Where the object lies on this machine, for file:// stores (whether it exists or not); else None."""
        return self.backend.local_path(validate_key(key))

    def address(self, key: str) -> str:
        """Where a person finds the object: a path for a store on this machine, else a url."""
        path = self.local_path(key)
        return str(path) if path is not None else f"{self.url}/{key}"

    def now(self) -> float:
        """Epoch seconds by the store's clock, the one that `ObjectInfo.modified` is read from. Asking writes a small
        hidden object and removes it."""
        return with_retries(self.backend.now, self._what("ask the clock of", ""), self.retry)

    def leftovers(self) -> Iterator[Leftover]:
        """What is no object and is seen by no listing: temporary files, scratch folders, unfinished multipart uploads;
        those of living writers too."""
        return iter(with_retries(lambda: sorted(self.backend.leftovers()), self._what("leftovers", ""), self.retry))

    def remove_leftover(self, leftover: Leftover) -> None:
        """Removes it; an absent one is fine."""
        name = leftover.name
        with_retries(lambda: self.backend.remove_leftover(name), self._what("remove_leftover", name), self.retry)

    def _what(self, verb: str, key: str) -> str:
        return f"{verb} {key!r} in {self.url}"


def open_store(url: str | Path, options: Mapping[str, Any] | None = None) -> ObjectStore:
    """The store at `url`: file:///folder or a plain path, memory://name, s3://bucket/prefix.

    `options` are s3fs's (endpoint_url, key, secret, client_kwargs …), for s3:// only; what they leave out comes from
    the environment as for any AWS client (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID …). Nothing is contacted or made yet.
    Raises UnsupportedFilesystem for another scheme.
    """
    text = str(url)
    scheme, found, _ = text.partition("://")
    parts = urlsplit(text)
    if not found or scheme == "file":
        if found and parts.netloc not in ("", "localhost"):
            raise UnsupportedFilesystem(f"{text!r} names a host; a folder is file:///absolute/path, or a plain path")
        folder = Path(unquote(parts.path)) if found else Path(text).expanduser()
        backend: Backend = LocalBackend(Path(os.path.abspath(folder)))
    elif scheme == "memory":
        backend = MemoryBackend(validate_name((parts.netloc + parts.path).strip("/")))
    elif scheme == "s3":
        from storage.store.backends.s3 import (
            S3Backend,  # s3fs and botocore take long to import; only who uses them pays
        )

        backend = S3Backend(parts.netloc, parts.path.strip("/"), dict(options or {}))
    else:
        raise UnsupportedFilesystem(
            f"no store for {text!r}: {scheme}:// is not supported; use file:///folder, s3://bucket/prefix or memory://name"
        )
    if options and scheme != "s3":
        raise UnsupportedFilesystem(f"{text!r} takes no options, {sorted(options)} given; options are for s3://")
    return ObjectStore(backend)


def read_json(store: ObjectStore, key: str) -> dict[str, Any] | None:
    """Reads a small JSON object. Returns None if there is no object at `key`. Raises CorruptArtifact if its bytes are
    not a JSON object."""
    try:
        body = json.loads(store.get(key))
    except ObjectNotFound:
        return None
    except ValueError as error:
        raise CorruptArtifact(f"{key} is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise CorruptArtifact(f"{key} is not a JSON object")
    return body
