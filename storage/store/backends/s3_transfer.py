"""Transfers files of any size to and from S3: in parts, many at a time, in bounded memory, and hashed on the way.

An object that is uploaded in parts becomes visible with the last request. The upload of a process that died stays
unfinished. The next upload of the same key continues it, if the caller allows that; else garbage collection aborts it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid4, uuid5
from weakref import WeakKeyDictionary

from s3fs import S3FileSystem

from storage.errors import ObjectNotFound, PermanentStorageError, StorageError, StorageUnavailable
from storage.serialization import FileDigest, digest_file
from storage.store.backends.s3_errors import translated_errors
from storage.store.retry import RetryPolicy, with_retries_async

ATTEMPT = "ostinato-attempt"
"""Name of the object metadata that holds the id of the call that wrote the object."""
PART_BYTES = 8 << 20
CONNECTIONS = 32
"""Largest number of parts that this process transfers at a time, over all files and stores. Each part is in memory, so
this bounds the memory, too. One connection of S3 gives up to 90 MB/s, so 32 need more than this process's one event
loop can handle (docs/scaling.md), and more would only cost memory."""
MAX_PARTS = 10_000
"""Limit of S3. Larger files are uploaded in larger parts."""
PART_RETRY = RetryPolicy(attempts=4)

_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
"""The slots for parts that are free. s3fs has one event loop per process, and all its stores share it."""


@dataclass
class _Upload:
    """An upload in parts that is under way."""

    name: str
    id: str
    attempt: str
    """What the metadata of the object says when it is complete."""
    stored: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The parts that an earlier process has uploaded, by part number, as the server lists them."""


class Transfer:
    """Uploads and downloads files of one bucket. Its methods run on the event loop of s3fs and raise StorageErrors."""

    def __init__(self, fs: S3FileSystem, bucket: str, url: str, part_bytes: int, retry: RetryPolicy) -> None:
        self._fs, self._bucket, self._url = fs, bucket, url
        self._part_bytes, self._retry = part_bytes, retry

    async def upload(self, name: str, path: Path, resume: bool) -> FileDigest:
        """Uploads a file as the object `name`, a full key of the bucket. Returns the digest of the uploaded bytes.

        With `resume`, parts that an earlier call stored are not sent again if they are equal to those of the file. A
        failed upload then stays on the server, unless the error is permanent."""
        size = path.stat().st_size
        if size <= self._part_bytes:
            return await self._upload_whole(name, path)
        # Of an upload whose completion was not acknowledged, only the object is left.
        upload = await self._unfinished_upload(name) if resume else None
        if upload is None:
            attempt = uuid5(NAMESPACE_URL, name).hex if resume else uuid4().hex
            if resume and await self._is_complete(name, attempt, size):
                return await asyncio.to_thread(digest_file, path)
            created = await self._call("create_multipart_upload", name, Metadata={ATTEMPT: attempt})
            upload = _Upload(name, created["UploadId"], attempt)
        try:
            parts, sha256 = await self._upload_parts(upload, path, size)
            await self._complete(upload, parts, size)
        except BaseException as error:
            # also when this task is cancelled
            if not (resume and isinstance(error, StorageUnavailable)):
                await asyncio.shield(self._abort(upload))
            raise
        return FileDigest(sha256, size)

    async def download(self, name: str, to: Path) -> FileDigest:
        """Downloads the object to the file `to`. Returns the digest of the written bytes. Raises CorruptArtifact if the
        object is replaced meanwhile."""
        # the size, and the ETag that all parts must have
        head = await self._call("head_object", name)
        size: int = head["ContentLength"]
        await asyncio.to_thread(to.write_bytes, b"")
        count = -(-size // self._part_bytes)
        arrived = [asyncio.Event() for _ in range(count)]
        hasher = hashlib.sha256()

        def range_of(index: int) -> tuple[int, int]:
            start = index * self._part_bytes
            return start, min(start + self._part_bytes, size)

        async def download_part(index: int) -> None:
            start, stop = range_of(index)
            data = await with_retries_async(
                lambda: self._range(name, start, stop, head["ETag"]), f"read {name!r} of {self._url}", self._retry
            )
            await asyncio.to_thread(_write_at, to, data, start)
            arrived[index].set()

        async def hash_in_order() -> None:
            # Parts arrive in any order. They are read back from the memory of the file system.
            for index in range(count):
                await arrived[index].wait()
                start, stop = range_of(index)
                await asyncio.to_thread(_hash_at, hasher, to, stop - start, start)

        async def start_part(index: int) -> Callable[[], Awaitable[None]]:
            return partial(download_part, index)

        await _run_concurrently(start_part, range(count), background=hash_in_order)
        return FileDigest(hasher.hexdigest(), size)

    async def _upload_whole(self, name: str, path: Path) -> FileDigest:
        """Uploads a small file in one request."""
        async with _part_slots():
            data = await asyncio.to_thread(path.read_bytes)
            await self._call("put_object", name, Body=data)
        return FileDigest(hashlib.sha256(data).hexdigest(), len(data))

    async def _upload_parts(self, upload: _Upload, path: Path, size: int) -> tuple[list[dict[str, Any]], str]:
        """Uploads the parts that are not stored. Returns all parts, as the completion needs them, and the sha256 of the
        file."""
        # parts large enough that there are at most MAX_PARTS
        part_bytes = max(self._part_bytes, -(-size // MAX_PARTS))
        parts: list[dict[str, Any]] = [{}] * -(-size // part_bytes)
        hasher = hashlib.sha256()

        async def read_part(index: int) -> Callable[[], Awaitable[None]]:
            # The parts are read in order, one after the other, because the hash of the file needs them so.
            start = index * part_bytes
            expected = min(part_bytes, size - start)
            data = await asyncio.to_thread(_read_at, path, expected, start)
            await asyncio.to_thread(hasher.update, data)
            if len(data) != expected:
                raise PermanentStorageError(f"{path} became shorter while it was uploaded to {self._url}")
            return partial(send_part, index, data)

        async def send_part(index: int, data: bytes) -> None:
            number = index + 1
            reply = upload.stored.get(number)
            if reply is None or not await asyncio.to_thread(_is_part, reply, data):
                reply = await with_retries_async(
                    lambda: self._call("upload_part", upload.name, UploadId=upload.id, PartNumber=number, Body=data),
                    f"upload part {number} of {upload.name!r} to {self._url}",
                    self._retry,
                )
            # the completion of the upload repeats the ETag and the checksums of each part
            checksums = {name: value for name, value in reply.items() if name.startswith("Checksum") and value}
            checksums.pop("ChecksumType", None)
            parts[index] = {"PartNumber": number, "ETag": reply["ETag"]} | checksums

        await _run_concurrently(read_part, range(len(parts)))
        return parts, hasher.hexdigest()

    async def _unfinished_upload(self, name: str) -> _Upload | None:
        """The newest unfinished upload of this key, with the parts that are stored. None if there is none, or if the
        server does not list them for us."""
        try:
            listed = await self._call("list_multipart_uploads", None, Prefix=name)
        except PermanentStorageError:
            return None
        uploads = [upload for upload in listed.get("Uploads") or () if upload["Key"] == name]
        if not uploads:
            return None
        newest = max(uploads, key=lambda upload: upload["Initiated"])
        upload = _Upload(name, newest["UploadId"], uuid5(NAMESPACE_URL, name).hex)
        marker: dict[str, Any] = {}
        while True:
            page = await self._call("list_parts", name, UploadId=upload.id, **marker)
            upload.stored |= {part["PartNumber"]: part for part in page.get("Parts") or ()}
            if not page.get("IsTruncated"):
                return upload
            marker = {"PartNumberMarker": page["NextPartNumberMarker"]}

    async def _complete(self, upload: _Upload, parts: list[dict[str, Any]], size: int) -> None:
        """Completes the upload. If the reply to a successful request was lost, the retry fails, but the object has this
        attempt in its metadata: then the upload is complete."""

        async def complete() -> None:
            try:
                await self._call(
                    "complete_multipart_upload",
                    upload.name,
                    UploadId=upload.id,
                    MultipartUpload={"Parts": parts},
                )
            except StorageUnavailable:
                if not await self._is_complete(upload.name, upload.attempt, size):
                    raise

        await with_retries_async(complete, f"complete {upload.name!r} in {self._url}", self._retry)

    async def _is_complete(self, name: str, attempt: str, size: int) -> bool:
        try:
            head = await self._call("head_object", name)
        except ObjectNotFound:
            return False
        is_ours = lowercase_keys(head.get("Metadata", {})).get(ATTEMPT) == attempt
        return is_ours and head["ContentLength"] == size

    async def _abort(self, upload: _Upload) -> None:
        try:
            await self._call("abort_multipart_upload", upload.name, UploadId=upload.id)
        except StorageError:
            return  # the caller raises the failure of the upload itself; garbage collection aborts it later

    async def _range(self, name: str, start: int, stop: int, etag: str) -> bytes:
        with translated_errors(name, self._url):
            reply = await self._fs._call_s3(
                "get_object", Bucket=self._bucket, Key=name, Range=f"bytes={start}-{stop - 1}", IfMatch=etag
            )
            async with reply["Body"] as body:
                data: bytes = await body.read()
        if len(data) != stop - start:
            raise StorageUnavailable(f"{name!r} in {self._url}: {len(data)} of {stop - start} bytes arrived")
        return data

    async def _call(self, method: str, name: str | None, **arguments: Any) -> dict[str, Any]:
        """Makes one request about the object `name`, or about the bucket (None)."""
        if name is not None:
            arguments["Key"] = name
        with translated_errors(name or self._bucket, self._url):
            reply: dict[str, Any] = await self._fs._call_s3(method, Bucket=self._bucket, **arguments)
        return reply


def _part_slots() -> asyncio.Semaphore:
    loop = asyncio.get_running_loop()
    if loop not in _slots:
        _slots[loop] = asyncio.Semaphore(CONNECTIONS)
    return _slots[loop]


async def _run_concurrently(
    start: Callable[[int], Awaitable[Callable[[], Awaitable[None]]]],
    indices: Iterable[int],
    *,
    background: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Awaits start(index) for one index after the other, each in a free slot. The functions that it returns run
    concurrently; a slot is free again when its function has ended. `background` runs at the same time, without a slot.

    The first failure cancels the others and is raised."""
    slots = _part_slots()

    async def run(call: Callable[[], Awaitable[None]]) -> None:
        await call()

    try:
        async with asyncio.TaskGroup() as group:
            if background is not None:
                group.create_task(run(background))
            for index in indices:
                await slots.acquire()
                try:
                    task = group.create_task(run(await start(index)))
                except BaseException:
                    slots.release()
                    raise
                # a callback, because a task that is cancelled before it began runs no code of its own
                task.add_done_callback(lambda _: slots.release())
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__


def lowercase_keys(metadata: dict[str, str]) -> dict[str, str]:
    """Object metadata with lower-case names: some servers change the case."""
    return {name.lower(): value for name, value in metadata.items()}


def _is_part(stored: dict[str, Any], data: bytes) -> bool:
    """Whether a part that the server lists has these bytes. The answer is always no where the ETag is no MD5, as with
    some encryptions."""
    if stored["Size"] != len(data):
        return False
    return bool(stored["ETag"].strip('"') == hashlib.md5(data, usedforsecurity=False).hexdigest())


# A cancelled call leaves its thread running. So each call opens the file itself: a descriptor that was closed meanwhile
# may be that of another file.


def _read_at(path: Path, size: int, start: int) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return os.pread(file.fileno(), size, start)


def _write_at(path: Path, data: bytes, start: int) -> None:
    with open(path, "r+b", buffering=0) as file:
        # pwrite may write less than it was given
        view = memoryview(data)
        while view:
            written = os.pwrite(file.fileno(), view, start)
            view, start = view[written:], start + written


def _hash_at(hasher: Any, path: Path, size: int, start: int) -> None:
    hasher.update(_read_at(path, size, start))
