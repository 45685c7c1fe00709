"""The object store: objects by key, with one interface for folders, S3 and memory."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import SplitResult, unquote, urlsplit
from uuid import uuid4

from storage.errors import (
    CorruptArtifact,
    InvalidKey,
    ObjectNotFound,
    StorageFull,
    TransientStorageError,
    UnsupportedFilesystem,
)
from storage.secrets import refuse_secrets
from storage.serialization import FileDigest, canonical_json
from storage.store import keys
from storage.store.backends.local import LocalBackend, read_store_id
from storage.store.backends.memory import MemoryBackend
from storage.store.backends.protocol import HIDDEN_PREFIX, Backend, Folder, Leftover, ObjectInfo, PutResult
from storage.store.keys import parse_number, validate_key, validate_name, validate_prefix
from storage.store.retry import RetryPolicy, with_retries

__all__ = ["Leftover", "ObjectInfo", "ObjectStore", "PutResult", "list_numbers", "open_store", "read_json"]


Clock = Callable[[], float]


def _uptime() -> float:
    """Seconds since the machine started, including the time it slept on systems that count it."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


CLOCKS: tuple[Clock, ...] = (_uptime, time.time)
"""The clocks that measure the age of an attempt. The first may stop while a machine is paused; the second can be set
back. So the larger difference counts."""


class ObjectStore:
    """Reads and writes whole objects by key.

    An object is visible with all its bytes or not at all, and a write survives a power loss once the call returned.
    Transient failures are retried as `retry` says; the last one raises StorageUnavailable. A full disk or quota raises
    StorageFull, a malformed key InvalidKey.
    """

    def __init__(
        self, backend: Backend, *, retry: RetryPolicy | None = None, clocks: tuple[Clock, ...] = CLOCKS
    ) -> None:
        """`clocks` count seconds. The age of an attempt is the largest that any of them measures."""
        self.backend = backend
        self.retry = retry or RetryPolicy()
        self.clocks = clocks

    @property
    def url(self) -> str:
        return self.backend.url

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"

    def get(self, key: str) -> bytes:
        """Returns all bytes of the object. Raises ObjectNotFound."""
        validate_key(key)
        return with_retries(lambda: self.backend.get(key), self._describe("get", key), self.retry)

    def open(self, key: str) -> BinaryIO:
        """Returns a seekable reader of the object, which the caller closes. Raises ObjectNotFound."""
        validate_key(key)
        return with_retries(lambda: self.backend.open(key), self._describe("open", key), self.retry)

    def exists(self, key: str) -> bool:
        validate_key(key)
        return with_retries(lambda: self.backend.exists(key), self._describe("exists", key), self.retry)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Returns every object whose key begins with `prefix`, sorted by key. The listing is complete before the first
        object is returned, because some servers do not list in order."""
        validate_prefix(prefix)
        return iter(with_retries(lambda: sorted(self.backend.list(prefix)), self._describe("list", prefix), self.retry))

    def folder(self, prefix: str = "") -> Folder:
        """Returns the folders and objects directly below `prefix`, which ends with a slash unless it is empty. The cost
        does not depend on what lies deeper. Some S3 servers go on listing a folder whose last object was deleted:
        `has_objects` tells."""
        validate_prefix(prefix)
        if prefix and not prefix.endswith("/"):
            raise InvalidKey(f"{prefix!r} is not a folder; give a prefix that ends with a slash")
        return with_retries(lambda: self.backend.folder(prefix), self._describe("list", prefix), self.retry)

    def has_objects(self, prefix: str) -> bool:
        """Whether any key begins with `prefix`. It reads one page of the listing."""
        validate_prefix(prefix)
        first = with_retries(
            lambda: next(iter(self.backend.list(prefix)), None), self._describe("list", prefix), self.retry
        )
        return first is not None

    def put(self, key: str, data: bytes) -> None:
        """Writes or replaces the object, atomically and durably."""
        validate_key(key)
        with_retries(lambda: self.backend.put(key, data), self._describe("put", key), self.retry)

    def put_file(self, key: str, path: Path, *, move: bool = False, resume: bool = False) -> FileDigest | None:
        """Like put, with the bytes of a file, in bounded memory. Returns their digest if they had to be read, and None
        on a file:// store, which links or copies the file.

        With `move` the file may be moved instead of copied, and is gone afterwards. A file that is an object of a
        file:// store is never moved. `resume` continues an upload of this key that was interrupted; give it only if
        every writer of the key writes the same bytes. Raises FileNotFoundError.
        """
        validate_key(key)
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not a file, so it cannot be stored as {key!r}")
        return with_retries(
            lambda: self.backend.put_file(key, path, move=move, resume=resume),
            self._describe("put_file", key),
            self.retry,
        )

    def put_if_absent(self, key: str, data: bytes) -> PutResult:
        """Writes the object if there is none at `key`. This is the only commit primitive: of several writers on any
        machines one wins, and all of them get the winner's bytes.

        An attempt that failed may have written the object all the same. So after a failed attempt, an object with
        exactly these bytes counts as a win. A caller that must know whether it won adds an attempt id to its bytes.
        """
        validate_key(key)
        attempt_failed, attempt_id = False, uuid4().hex

        def attempt() -> PutResult:
            nonlocal attempt_failed
            try:
                return self.backend.put_if_absent(key, data, attempt_id)
            except TransientStorageError:
                attempt_failed = True
                raise

        result = with_retries(attempt, self._describe("put_if_absent", key), self.retry)
        return PutResult(True, data) if attempt_failed and result.data == data else result

    def delete(self, key: str) -> None:
        """Deletes the object. Does nothing if there is none."""
        validate_key(key)
        with_retries(lambda: self.backend.delete(key), self._describe("delete", key), self.retry)

    def fetch(self, key: str, to: Path) -> FileDigest:
        """Copies the object to the file `to`, in bounded memory. `to` appears whole or not at all. Returns its digest.

        Raises ObjectNotFound, and StorageFull when the disk of `to` is full.
        """
        validate_key(key)
        to.parent.mkdir(parents=True, exist_ok=True)
        # download to a hidden name, so that `to` appears complete
        temporary = to.with_name(f"{HIDDEN_PREFIX}{uuid4().hex}")
        try:
            fetched = with_retries(
                lambda: self.backend.download(key, temporary), self._describe("fetch", key), self.retry
            )
            os.replace(temporary, to)
            return fetched
        except StorageFull as error:
            raise StorageFull(f"no space in {to.parent} for a copy of {key!r} in {self.url}; free some") from error
        finally:
            temporary.unlink(missing_ok=True)

    def local_path(self, key: str) -> Path | None:
        """The path of the object on this machine, whether or not it exists. None unless this is a file:// store."""
        return self.backend.local_path(validate_key(key))

    def address(self, key: str) -> str:
        """Where a person finds the object: a path for a store on this machine, else a URL."""
        path = self.local_path(key)
        return str(path) if path is not None else f"{self.url}/{key}"

    def now(self) -> float:
        """Epoch seconds by the store's clock, which also sets `ObjectInfo.modified`. The call writes a small hidden
        object and removes it."""
        return with_retries(self.backend.now, self._describe("ask the clock of", ""), self.retry)

    def leftovers(self, prefix: str = "") -> Iterator[Leftover]:
        """Returns temporary files, scratch folders and unfinished multipart uploads below `prefix`, which are no
        objects and appear in no listing. Those of running writers are included."""
        validate_prefix(prefix)
        return iter(
            with_retries(
                lambda: sorted(self.backend.leftovers(prefix)), self._describe("leftovers", prefix), self.retry
            )
        )

    def remove_leftover(self, leftover: Leftover) -> None:
        """Removes a leftover. Does nothing if it is gone."""
        name = leftover.name
        with_retries(lambda: self.backend.remove_leftover(name), self._describe("remove_leftover", name), self.retry)

    def _describe(self, verb: str, key: str) -> str:
        """The call, for the text of an error."""
        return f"{verb} {key!r} in {self.url}"


def open_store(url: str | Path, options: Mapping[str, Any] | None = None) -> ObjectStore:
    """Returns the store at `url`: file:///folder or a plain path, memory://name, s3://bucket/prefix.

    `options` are those of s3fs (endpoint_url, key, secret, client_kwargs …) and only for s3://. Options that are left
    out come from the environment, as for any AWS client (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID …). The call contacts
    and creates nothing. Raises UnsupportedFilesystem for another scheme, SecretInURL for a password in the URL.
    """
    text = str(url)
    refuse_secrets(text)
    scheme, separator, _ = text.partition("://")
    parts = urlsplit(text)
    # one backend per scheme
    if not separator or scheme == "file":
        folder = _folder_of_url(text, parts) if separator else Path(text).expanduser()
        backend: Backend = LocalBackend(Path(os.path.abspath(folder)))
    elif scheme == "memory":
        backend = MemoryBackend(validate_name((parts.netloc + parts.path).strip("/")))
    elif scheme == "s3":
        # imported here because s3fs and botocore take long to import
        from storage.store.backends.s3 import S3Backend

        backend = S3Backend(parts.netloc, parts.path.strip("/"), dict(options or {}))
    else:
        raise UnsupportedFilesystem(
            f"no store for {text!r}: {scheme}:// is not supported; use file:///folder, s3://bucket/prefix or memory://name"
        )
    # no other backend has options
    if options and scheme != "s3":
        raise UnsupportedFilesystem(f"{text!r} takes no options, {sorted(options)} given; options are for s3://")
    return ObjectStore(backend)


def _folder_of_url(text: str, parts: SplitResult) -> Path:
    if parts.netloc not in ("", "localhost"):
        raise UnsupportedFilesystem(f"{text!r} names a host; a folder is file:///absolute/path, or a plain path")
    return Path(unquote(parts.path))


def list_numbers(store: ObjectStore, prefix: str) -> list[int]:
    """Returns the number 42 of each key like <prefix>000042.json, ascending."""
    numbers = []
    for info in store.list(prefix):
        number = parse_number(info.key)
        if number is not None:
            numbers.append(number)
    return sorted(numbers)


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


log = logging.getLogger(__name__)


def store_id(store: ObjectStore) -> str:
    """Returns the id of the store. A store without an id gets a new one."""
    # a new store has a whole index from its first object on (storage.store.index)
    if not store.exists(keys.store_json()):
        store.put_if_absent(keys.index_complete(), canonical_json({"schema_version": 1}))
    # of two processes that begin a store at once, one decides its id
    put = store.put_if_absent(keys.store_json(), canonical_json({"schema_version": 1, "id": uuid4().hex}))
    if put.won:
        log.info("a new store was begun at %s", store.url)
    return read_store_id(put.data, store.address(keys.store_json()))


def find_store_id(store: ObjectStore) -> str | None:
    """Returns the id of the store, or None if it has none yet."""
    try:
        return read_store_id(store.get(keys.store_json()), store.address(keys.store_json()))
    except ObjectNotFound:
        return None
