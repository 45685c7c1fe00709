"""s3://: any S3 server that supports `If-None-Match: *` on PUT (AWS, seaweedfs, MinIO, moto, …), through s3fs.

The store, botocore and aiohttp may each repeat a request. If a connection breaks, aiohttp repeats the PUT, and the
other two do not know. So a conditional put stores an attempt id in the object's metadata. When the server
refuses the put, that id tells whether the existing object was written by an earlier try of the same call.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast
from uuid import uuid4

from fsspec.asyn import sync
from s3fs import S3FileSystem

from storage.errors import InvalidKey, ObjectNotFound, StorageUnavailable, UnsupportedFilesystem
from storage.serialization import FileDigest
from storage.store.backends.protocol import HIDDEN_PREFIX, Folder, Leftover, ObjectInfo, PutResult
from storage.store.backends.s3_errors import S3_EXCEPTIONS, client_error_of, http_status, translated_errors
from storage.store.backends.s3_transfer import (
    ATTEMPT,
    CONNECTIONS,
    PART_BYTES,
    PART_RETRY,
    Transfer,
    lowercase_keys,
)
from storage.store.keys import is_key, validate_prefix
from storage.store.retry import RetryPolicy, with_retries

READ_AHEAD_BYTES = 1 << 20
SMALL_REQUESTS = 32
"""Connections of a store for requests that transfer no files."""
_UPLOAD = "?upload="  # no key holds a question mark
_NEXT_PAGE_ARGUMENTS = {
    "NextContinuationToken": "ContinuationToken", "NextKeyMarker": "KeyMarker", "NextUploadIdMarker": "UploadIdMarker",
}  # fmt: skip
"""Field of a listing's page -> the argument with which the next page is requested."""


class S3Backend:
    """Objects of one bucket below one prefix."""

    def __init__(self, bucket: str, prefix: str, options: dict[str, Any]) -> None:
        if not bucket:
            raise InvalidKey("an s3:// URL names its bucket; give s3://bucket/prefix")
        self.bucket, self._prefix = bucket, f"{validate_prefix(prefix)}/" if prefix else ""
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        # botocore makes few attempts, because ObjectStore retries, too. Its pool must have a connection for every part
        # that is transferred at a time, and more for small requests meanwhile.
        config = {
            "retries": {"mode": "standard", "total_max_attempts": 2},
            "max_pool_connections": CONNECTIONS + SMALL_REQUESTS,
        } | options.get("config_kwargs", {})
        self.page_size = 1000
        self.part_bytes, self.part_retry = PART_BYTES, PART_RETRY
        # fsspec caches instances by arguments, but the endpoint and the credentials may come from the environment
        backend_options = {"config_kwargs": config, "use_listings_cache": False, "skip_instance_cache": True}
        self._fs = S3FileSystem(**(options | backend_options))
        self._conditional_lock = threading.Lock()
        self._conditional_checked = False

    def get(self, key: str) -> bytes:
        with translated_errors(key, self.url):
            return self._get(Key=self._prefix + key)

    def open(self, key: str) -> BinaryIO:
        with translated_errors(key, self.url):
            head = self._call("head_object", Key=self._prefix + key)

        def read(start: int, stop: int) -> bytes:
            # If-Match: if the object is replaced while it is read, fail instead of mixing old and new bytes
            with translated_errors(key, self.url):
                return self._get(Key=self._prefix + key, Range=f"bytes={start}-{stop - 1}", IfMatch=head["ETag"])

        # a buffer on top, because Parquet readers make many small reads
        raw = _RangeReader(read, head["ContentLength"], description=f"read {key!r} in {self.url}")
        return cast(BinaryIO, io.BufferedReader(raw, READ_AHEAD_BYTES))

    def exists(self, key: str) -> bool:
        try:
            with translated_errors(key, self.url):
                self._call("head_object", Key=self._prefix + key)
        except ObjectNotFound:
            return False
        return True

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        where = {"Prefix": self._prefix + prefix, "MaxKeys": self.page_size}
        for page in self._pages("list_objects_v2", **where):
            yield from self._objects_of(page)

    def _objects_of(self, page: dict[str, Any]) -> Iterator[ObjectInfo]:
        for item in page.get("Contents") or ():
            key = item["Key"][len(self._prefix) :]
            # leave out temporary objects and those of other programs
            if is_key(key):
                yield ObjectInfo(key, item["Size"], item["LastModified"].timestamp())

    def folder(self, prefix: str) -> Folder:
        where = {"Prefix": self._prefix + prefix, "MaxKeys": self.page_size, "Delimiter": "/"}
        folders: list[str] = []
        objects: list[ObjectInfo] = []
        for page in self._pages("list_objects_v2", **where):
            for item in page.get("CommonPrefixes") or ():
                name = item["Prefix"][len(self._prefix) + len(prefix) :].removesuffix("/")
                if is_key(name):
                    folders.append(name)
            objects += self._objects_of(page)
        return Folder(sorted(folders), sorted(objects))

    def put(self, key: str, data: bytes) -> None:
        with translated_errors(key, self.url):
            self._call("put_object", Key=self._prefix + key, Body=data)

    def put_file(self, key: str, path: Path, *, move: bool, resume: bool) -> FileDigest:
        """Uploads a large file in parts. The object becomes visible when the upload is completed."""
        with translated_errors(key, self.url):
            uploaded = sync(self._fs.loop, self._transfer().upload, self._prefix + key, path, resume)
        if move:
            path.unlink(missing_ok=True)
        return cast(FileDigest, uploaded)

    def put_if_absent(self, key: str, data: bytes, attempt: str) -> PutResult:
        self._check_conditional_puts()
        with translated_errors(key, self.url):
            if self._put_new(key, data, attempt):
                return PutResult(True, data)
        # the server refused the put: the stored object may be from an earlier try of this call
        try:
            with translated_errors(key, self.url):
                stored, metadata = self._get_with_metadata(Key=self._prefix + key)
        except ObjectNotFound as error:
            raise StorageUnavailable(f"{key!r} was there and is gone again in {self.url}") from error
        return PutResult(metadata.get(ATTEMPT) == attempt, stored)

    def delete(self, key: str) -> None:
        with translated_errors(key, self.url):
            self._call("delete_object", Key=self._prefix + key)

    def download(self, key: str, to: Path) -> FileDigest:
        with translated_errors(key, self.url):
            return cast(FileDigest, sync(self._fs.loop, self._transfer().download, self._prefix + key, to))

    def local_path(self, key: str) -> Path | None:
        return None

    def now(self) -> float:
        """Returns the server's time: writes a small object, reads its time, deletes it."""
        name = f"{self._prefix}{HIDDEN_PREFIX}clock-{uuid4().hex}"
        with translated_errors("the store's clock", self.url):
            self._call("put_object", Key=name, Body=b"")
            now = self._call("head_object", Key=name)["LastModified"].timestamp()
            self._call("delete_object", Key=name)
        return float(now)

    def leftovers(self, prefix: str) -> Iterator[Leftover]:
        """Yields the clock objects that exist, and the unfinished multipart uploads, including those that still run."""
        if not prefix:
            for page in self._pages("list_objects_v2", Prefix=f"{self._prefix}{HIDDEN_PREFIX}clock-"):
                for item in page.get("Contents") or ():
                    name = item["Key"][len(self._prefix) :]
                    yield Leftover(name, "temporary file", item["Size"], item["LastModified"].timestamp())
        for page in self._pages("list_multipart_uploads", Prefix=self._prefix + prefix):
            for upload in page.get("Uploads") or ():
                name = f"{upload['Key'][len(self._prefix) :]}{_UPLOAD}{upload['UploadId']}"
                yield Leftover(name, "multipart upload", 0, upload["Initiated"].timestamp())

    def remove_leftover(self, name: str) -> None:
        key, separator, upload_id = name.partition(_UPLOAD)
        with translated_errors(name, self.url):
            try:
                if separator:
                    self._call("abort_multipart_upload", Key=self._prefix + key, UploadId=upload_id)
                else:
                    self._call("delete_object", Key=self._prefix + key)
            except S3_EXCEPTIONS as error:
                reply = client_error_of(error)
                if reply is None or http_status(reply) != 404:
                    raise

    def _transfer(self) -> Transfer:
        return Transfer(self._fs, self.bucket, self.url, self.part_bytes, self.part_retry)

    def _pages(self, method: str, **where: Any) -> Iterator[dict[str, Any]]:
        """Yields the pages of a listing."""
        while True:
            with translated_errors(where["Prefix"], self.url):
                page = self._call(method, **where)
            yield page
            if not page.get("IsTruncated"):
                return
            for token, argument in _NEXT_PAGE_ARGUMENTS.items():
                if page.get(token):
                    where[argument] = page[token]

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return self._fs.call_s3(method, Bucket=self.bucket, **arguments)

    def _get(self, **arguments: Any) -> bytes:
        return self._get_with_metadata(**arguments)[0]

    def _get_with_metadata(self, **arguments: Any) -> tuple[bytes, dict[str, str]]:
        async def read() -> tuple[bytes, dict[str, str]]:
            reply = await self._fs._call_s3("get_object", Bucket=self.bucket, **arguments)
            async with reply["Body"] as body:
                data = await body.read()
            return data, lowercase_keys(reply.get("Metadata", {}))

        return cast(tuple[bytes, dict[str, str]], sync(self._fs.loop, read))

    def _put_new(self, key: str, data: bytes, attempt: str) -> bool:
        """Makes one conditional put. Returns False if there was an object already."""
        try:
            self._call("put_object", Key=self._prefix + key, Body=data, IfNoneMatch="*", Metadata={ATTEMPT: attempt})
        except S3_EXCEPTIONS as error:
            reply = client_error_of(error)
            status = None if reply is None else http_status(reply)
            if status == 412:
                return False
            if status == 501:
                raise UnsupportedFilesystem(self._no_conditional_puts_message()) from error
            raise
        return True

    def _check_conditional_puts(self) -> None:
        """Tests once per backend object that the server refuses the second of two conditional puts.

        Some servers (rclone serve s3, s3rver) accept `If-None-Match` and let both writers win.
        """
        with self._conditional_lock:
            if self._conditional_checked:
                return
            # the probe object stays, so that later processes make only one request
            probe = f"{HIDDEN_PREFIX}conditional-put"
            with translated_errors(probe, self.url):
                if self._put_new(probe, b"1", "") and self._put_new(probe, b"2", ""):
                    raise UnsupportedFilesystem(self._no_conditional_puts_message())
            self._conditional_checked = True

    def _no_conditional_puts_message(self) -> str:
        return (
            f"the server of {self.url} does not honour 'If-None-Match: *', so two writers of a key could both win; "
            "use AWS S3, MinIO, seaweedfs, or a file:// store"
        )


class _RangeReader(io.RawIOBase):
    """A seekable reader of a remote object. Each read is one ranged request, which is retried."""

    def __init__(self, read: Callable[[int, int], bytes], size: int, *, description: str) -> None:
        self._read, self._size, self._description = read, size, description
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = max(0, offset + (0, self._position, self._size)[whence])
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self._next(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        return self._next(self._size)  # the inherited method makes a request for every few KiB

    def _next(self, size: int) -> bytes:
        # a read at the end returns no bytes, like that of a file
        start, stop = self._position, min(self._position + size, self._size)
        if start >= stop:
            return b""
        data = with_retries(lambda: self._read(start, stop), self._description, RetryPolicy())
        self._position += len(data)
        return data
