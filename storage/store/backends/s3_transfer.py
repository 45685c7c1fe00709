"""Transfers files of any size to and from S3 in bounded memory: in parts, a few at a time, each retried by itself.

An object that is uploaded in parts becomes visible with the last request. A failed upload is aborted. The upload of a
process that died stays unfinished, and garbage collection aborts it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

from s3fs import S3FileSystem

from storage.errors import ObjectNotFound, PermanentStorageError, StorageError, StorageUnavailable
from storage.store.backends.s3_errors import translated_errors
from storage.store.retry import RetryPolicy, with_retries_async

ATTEMPT = "ostinato-attempt"
"""Name of the object metadata that holds the id of the call that wrote the object."""
PART_BYTES = 8 << 20
CONCURRENT_PARTS = 2
MAX_PARTS = 10_000
"""Limit of S3. Larger files are uploaded in larger parts."""
PART_RETRY = RetryPolicy(attempts=4)


class Transfer:
    """Uploads and downloads files of one bucket. Its methods run on the event loop of s3fs and raise StorageErrors."""

    def __init__(self, fs: S3FileSystem, bucket: str, url: str, part_bytes: int, retry: RetryPolicy) -> None:
        self._fs, self._bucket, self._url = fs, bucket, url
        self._part_bytes, self._retry = part_bytes, retry

    async def upload(self, name: str, path: Path) -> None:
        """Uploads a file as the object `name`, a full key of the bucket."""
        size = path.stat().st_size
        if size <= self._part_bytes:
            # a small file is one request
            await self._call("put_object", name, Body=await asyncio.to_thread(path.read_bytes))
            return
        # a large file is uploaded in parts, and becomes visible on completion
        attempt = uuid4().hex
        created = await self._call("create_multipart_upload", name, Metadata={ATTEMPT: attempt})
        upload = {"Key": name, "UploadId": created["UploadId"]}
        try:
            parts = await self._upload_parts(upload, path, size)
            await self._complete(upload, parts, attempt)
        except BaseException:
            # also when this task is cancelled
            await asyncio.shield(self._abort(upload))
            raise

    async def download(self, name: str, to: Path) -> None:
        """Downloads the object to the file `to`. Raises CorruptArtifact if the object is replaced meanwhile."""
        # the size, and the ETag that all parts must have
        head = await self._call("head_object", name)
        size: int = head["ContentLength"]
        descriptor = await asyncio.to_thread(os.open, to, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

        async def download_part(index: int) -> None:
            start = index * self._part_bytes
            stop = min(start + self._part_bytes, size)
            data = await with_retries_async(
                lambda: self._range(name, start, stop, head["ETag"]), f"read {name!r} of {self._url}", self._retry
            )
            await asyncio.to_thread(_write_at, descriptor, data, start)

        try:
            await _run_concurrently(download_part, -(-size // self._part_bytes))
        finally:
            os.close(descriptor)

    async def _upload_parts(self, upload: dict[str, str], path: Path, size: int) -> list[dict[str, Any]]:
        # parts large enough that there are at most MAX_PARTS
        part_bytes = max(self._part_bytes, -(-size // MAX_PARTS))
        parts: list[dict[str, Any]] = [{}] * -(-size // part_bytes)
        descriptor = await asyncio.to_thread(os.open, path, os.O_RDONLY | os.O_CLOEXEC)

        async def upload_part(index: int) -> None:
            # read the part
            start = index * part_bytes
            expected = min(part_bytes, size - start)
            data = await asyncio.to_thread(_read_at, descriptor, expected, start)
            if len(data) != expected:
                raise PermanentStorageError(f"{path} became shorter while it was uploaded to {self._url}")
            # upload it, with its own retries
            reply = await with_retries_async(
                lambda: self._call("upload_part", upload["Key"], UploadId=upload["UploadId"], PartNumber=index + 1,
                                   Body=data),
                f"upload part {index + 1} of {upload['Key']!r} to {self._url}",
                self._retry,
            )  # fmt: skip
            # the completion of the upload repeats the ETag and the checksums of each part
            checksums = {name: value for name, value in reply.items() if name.startswith("Checksum") and value}
            checksums.pop("ChecksumType", None)
            parts[index] = {"PartNumber": index + 1, "ETag": reply["ETag"]} | checksums

        try:
            await _run_concurrently(upload_part, len(parts))
        finally:
            os.close(descriptor)
        return parts

    async def _complete(self, upload: dict[str, str], parts: list[dict[str, Any]], attempt: str) -> None:
        """Completes the upload. If the reply to a successful request was lost, the retry fails, but the object has this
        attempt in its metadata: then the upload is complete."""

        async def complete() -> None:
            try:
                await self._call(
                    "complete_multipart_upload",
                    upload["Key"],
                    UploadId=upload["UploadId"],
                    MultipartUpload={"Parts": parts},
                )
            except StorageUnavailable:
                if not await self._is_ours(upload["Key"], attempt):
                    raise

        await with_retries_async(complete, f"complete {upload['Key']!r} in {self._url}", self._retry)

    async def _is_ours(self, name: str, attempt: str) -> bool:
        try:
            head = await self._call("head_object", name)
        except ObjectNotFound:
            return False
        return lowercase_keys(head.get("Metadata", {})).get(ATTEMPT) == attempt

    async def _abort(self, upload: dict[str, str]) -> None:
        try:
            await self._call("abort_multipart_upload", upload["Key"], UploadId=upload["UploadId"])
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

    async def _call(self, method: str, name: str, **arguments: Any) -> dict[str, Any]:
        with translated_errors(name, self._url):
            reply: dict[str, Any] = await self._fs._call_s3(method, Bucket=self._bucket, Key=name, **arguments)
        return reply


async def _run_concurrently(transfer_part: Callable[[int], Awaitable[None]], count: int) -> None:
    """Calls transfer_part(0) … transfer_part(count - 1), CONCURRENT_PARTS at a time. The first failure cancels the
    others and is raised."""
    # all workers take indices from one iterator
    indices = iter(range(count))

    async def work() -> None:
        for index in indices:
            await transfer_part(index)

    workers = [asyncio.ensure_future(work()) for _ in range(min(CONCURRENT_PARTS, count))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def lowercase_keys(metadata: dict[str, str]) -> dict[str, str]:
    """Object metadata with lower-case names: some servers change the case."""
    return {name.lower(): value for name, value in metadata.items()}


def _read_at(descriptor: int, size: int, start: int) -> bytes:
    return os.pread(descriptor, size, start)


def _write_at(descriptor: int, data: bytes, start: int) -> None:
    # pwrite may write less than it was given
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, start)
        view, start = view[written:], start + written
