"""s3://: any server that speaks S3 and honours `If-None-Match: *` on PUT (AWS, seaweedfs, MinIO, moto, …).

s3fs moves the bytes. Requests are repeated by several hands: by the store, by botocore, and, seen by neither, by
aiohttp, which repeats a PUT whose connection was cut. So a conditional put carries an attempt id in the object's
metadata, and whoever is refused looks whether the object in the way is its own.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import aiohttp
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError
from botocore.parsers import ResponseParserError
from fsspec.asyn import sync
from fsspec.exceptions import FSTimeoutError
from s3fs import S3FileSystem

from storage.backends.protocol import HIDDEN, ObjectInfo, PutResult
from storage.errors import (
    AccessDenied,
    CorruptArtifact,
    InvalidKey,
    ObjectNotFound,
    PermanentStorageError,
    StorageError,
    StorageFull,
    StorageUnavailable,
    UnsupportedFilesystem,
)
from storage.keys import is_key, validate_prefix
from storage.retry import RetryPolicy, retried

_ATTEMPT = "ostinato-attempt"
READ_AHEAD_BYTES = 1 << 20
_FULL_CODES = {"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull"}
_PASSING_CODES = {
    "SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "RequestTimeout", "InternalError",
    "ServiceUnavailable", "OperationAborted", "ConditionalRequestConflict", "RequestTimeTooSkewed",
    "XAmzContentSHA256Mismatch", "IncompleteBody", "BadDigest",
}  # fmt: skip
_NETWORK = (
    BotoConnectionError, HTTPClientError, IncompleteReadError, ResponseParserError, FSTimeoutError,
    aiohttp.ClientError, ConnectionError, TimeoutError,
)  # fmt: skip
_ANY = (*_NETWORK, BotoCoreError, ClientError, OSError)


class S3Backend:
    """Objects of one bucket below one prefix."""

    def __init__(self, bucket: str, prefix: str, options: dict[str, Any]) -> None:
        if not bucket:
            raise InvalidKey("an s3:// URL names its bucket; give s3://bucket/prefix")
        self.bucket, self._prefix = bucket, f"{validate_prefix(prefix)}/" if prefix else ""
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        # few attempts inside a request: the store retries around it
        config = {"retries": {"mode": "standard", "total_max_attempts": 2}} | options.get("config_kwargs", {})
        self.page_size = 1000
        # fsspec keeps instances by arguments, but the endpoint and the credentials may come from the environment
        fixed = {"config_kwargs": config, "use_listings_cache": False, "skip_instance_cache": True}
        self._fs = S3FileSystem(**(options | fixed))
        self._conditional = threading.Lock()
        self._conditional_checked = False

    def get(self, key: str) -> bytes:
        with _typed(key, self.url):
            return self._get(Key=self._prefix + key)

    def open(self, key: str) -> BinaryIO:
        with _typed(key, self.url):
            head = self._call("head_object", Key=self._prefix + key)

        def read(start: int, stop: int) -> bytes:
            # If-Match: an object replaced while it is read must not be read as a mixture
            with _typed(key, self.url):
                return self._get(Key=self._prefix + key, Range=f"bytes={start}-{stop - 1}", IfMatch=head["ETag"])

        raw = _RangeReader(read, head["ContentLength"], what=f"read {key!r} in {self.url}")
        return cast(BinaryIO, io.BufferedReader(raw, READ_AHEAD_BYTES))

    def exists(self, key: str) -> bool:
        try:
            with _typed(key, self.url):
                self._call("head_object", Key=self._prefix + key)
        except ObjectNotFound:
            return False
        return True

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        where: dict[str, Any] = {"Prefix": self._prefix + prefix, "MaxKeys": self.page_size}
        while True:
            with _typed(prefix, self.url):
                page = self._call("list_objects_v2", **where)
            for found in page.get("Contents", ()):
                key = found["Key"][len(self._prefix) :]
                if is_key(key):  # not a temporary or foreign object
                    yield ObjectInfo(key, found["Size"], found["LastModified"].timestamp())
            if not page.get("IsTruncated"):
                return
            where["ContinuationToken"] = page["NextContinuationToken"]

    def put(self, key: str, data: bytes) -> None:
        with _typed(key, self.url):
            self._call("put_object", Key=self._prefix + key, Body=data)

    def put_file(self, key: str, path: Path, *, move: bool) -> None:
        """In parts when large; the object appears when the last part is complete."""
        with _typed(key, self.url):
            self._fs.put_file(str(path), f"{self.bucket}/{self._prefix}{key}", max_concurrency=4)
        if move:
            path.unlink(missing_ok=True)

    def put_if_absent(self, key: str, data: bytes, attempt: str) -> PutResult:
        self._check_conditional_puts()
        with _typed(key, self.url):
            if self._put_new(key, data, attempt):
                return PutResult(True, data)
        try:
            with _typed(key, self.url):
                there, metadata = self._get_with_metadata(Key=self._prefix + key)
        except ObjectNotFound as error:
            raise StorageUnavailable(f"{key!r} was there and is gone again in {self.url}") from error
        return PutResult(metadata.get(_ATTEMPT) == attempt, there)

    def delete(self, key: str) -> None:
        with _typed(key, self.url):
            self._call("delete_object", Key=self._prefix + key)

    def download(self, key: str, to: Path) -> None:
        with _typed(key, self.url):
            self._fs.get_file(f"{self.bucket}/{self._prefix}{key}", str(to), max_concurrency=4)

    def local_path(self, key: str) -> Path | None:
        return None

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return self._fs.call_s3(method, Bucket=self.bucket, **arguments)

    def _get(self, **arguments: Any) -> bytes:
        return self._get_with_metadata(**arguments)[0]

    def _get_with_metadata(self, **arguments: Any) -> tuple[bytes, dict[str, str]]:
        async def read() -> tuple[bytes, dict[str, str]]:
            answer = await self._fs._call_s3("get_object", Bucket=self.bucket, **arguments)
            async with answer["Body"] as body:
                return await body.read(), {k.lower(): v for k, v in answer.get("Metadata", {}).items()}

        return cast(tuple[bytes, dict[str, str]], sync(self._fs.loop, read))

    def _put_new(self, key: str, data: bytes, attempt: str) -> bool:
        """One conditional put; False when there was an object already."""
        try:
            self._call(
                "put_object", Key=self._prefix + key, Body=data, IfNoneMatch="*", Metadata={_ATTEMPT: attempt}
            )
        except _ANY as error:
            answer = _answer(error)
            if answer is not None and _status(answer) == 412:
                return False
            if answer is not None and _status(answer) == 501:
                raise UnsupportedFilesystem(self._no_conditional_puts()) from error
            raise
        return True

    def _check_conditional_puts(self) -> None:
        """Once per process: some servers (rclone serve s3, s3rver) take `If-None-Match` and let both writers win."""
        with self._conditional:
            if self._conditional_checked:
                return
            probe = f"{HIDDEN}conditional-put"
            with _typed(probe, self.url):
                if self._put_new(probe, b"1", "") and self._put_new(probe, b"2", ""):
                    raise UnsupportedFilesystem(self._no_conditional_puts())
            self._conditional_checked = True

    def _no_conditional_puts(self) -> str:
        return (
            f"the server of {self.url} does not honour `If-None-Match: *`, so the first of two writers cannot be told; "
            "use AWS S3, MinIO, seaweedfs, or a file:// store"
        )


class _RangeReader(io.RawIOBase):
    """A seekable view of a remote object; each read is one ranged request, retried."""

    def __init__(self, read: Callable[[int, int], bytes], size: int, *, what: str) -> None:
        self._read, self._size, self._at, self._what = read, size, 0, what

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._next(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        return self._next(self._size)  # the inherited one makes a request for every few KiB

    def _next(self, size: int) -> bytes:
        start, stop = self._at, min(self._at + size, self._size)
        if start >= stop:
            return b""
        data = retried(lambda: self._read(start, stop), self._what, RetryPolicy())
        self._at += len(data)
        return data


@contextmanager
def _typed(key: str, url: str) -> Iterator[None]:
    """Every error of boto, aiohttp and s3fs as one of ours."""
    try:
        yield
    except _ANY as error:
        raise _storage_error(error, f"{key!r} in {url}") from error


def _storage_error(error: BaseException, where: str) -> StorageError:
    answer = _answer(error)
    if answer is not None:
        return _refusal(answer, where)
    if isinstance(error, _NETWORK):
        return StorageUnavailable(f"{where}: {type(error).__name__}: {error}")
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return AccessDenied(f"{where}: {error}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    if isinstance(error, FileNotFoundError):
        return ObjectNotFound(f"no object {where}")
    return PermanentStorageError(f"{where}: {type(error).__name__}: {error}")


def _refusal(answer: ClientError, where: str) -> StorageError:
    status, code = _status(answer), answer.response.get("Error", {}).get("Code", "")
    if code == "NoSuchBucket":
        return ObjectNotFound(f"{where}: there is no such bucket; make it first, or mend the URL")
    if status == 404:
        return ObjectNotFound(f"no object {where}")
    if status == 412:
        return CorruptArtifact(f"{where} was replaced while it was read; open it again")
    if status == 507 or code in _FULL_CODES:
        return StorageFull(f"no space for {where}: {answer}")
    if status in (408, 409, 425, 429) or status >= 500 or code in _PASSING_CODES:
        return StorageUnavailable(f"{where}: {answer}")
    if status in (401, 403):
        return AccessDenied(f"{where}: {answer}; check the credentials and the bucket's policy")
    return PermanentStorageError(f"{where}: {answer}")


def _answer(error: BaseException | None) -> ClientError | None:
    """The server's answer behind an error; s3fs dresses it up as an OSError."""
    while error is not None and not isinstance(error, ClientError):
        error = error.__cause__
    return error


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
