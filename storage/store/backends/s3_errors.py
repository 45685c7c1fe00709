"""Translates the errors of boto, aiohttp and s3fs into storage errors."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

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
from fsspec.exceptions import FSTimeoutError

from storage.errors import (
    AccessDenied,
    CorruptArtifact,
    NoSuchBucket,
    ObjectNotFound,
    PermanentStorageError,
    StorageError,
    StorageFull,
    StorageUnavailable,
)

# error codes of servers: no space or quota is left
_FULL_CODES = {"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull"}
# error codes of servers: the same call may succeed later
_TRANSIENT_CODES = {
    "SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "RequestTimeout", "InternalError",
    "ServiceUnavailable", "OperationAborted", "ConditionalRequestConflict", "RequestTimeTooSkewed",
    "XAmzContentSHA256Mismatch", "IncompleteBody", "BadDigest",
    "InvalidPart",  # another writer of the same bytes has uploaded this part once more
}  # fmt: skip
# exceptions of the client: no reply, or an incomplete one
_NETWORK = (
    BotoConnectionError, HTTPClientError, IncompleteReadError, ResponseParserError, FSTimeoutError,
    aiohttp.ClientError, ConnectionError, TimeoutError,
)  # fmt: skip
S3_EXCEPTIONS = (*_NETWORK, BotoCoreError, ClientError, OSError)


@contextmanager
def translated_errors(key: str, url: str) -> Iterator[None]:
    """Raises every S3 error of its block as a StorageError about `key` of the store at `url`."""
    try:
        yield
    except S3_EXCEPTIONS as error:
        raise _storage_error(error, f"{key!r} in {url}") from error


def _storage_error(error: BaseException, where: str) -> StorageError:
    # the server replied
    reply = client_error_of(error)
    if reply is not None:
        return _error_of_reply(reply, where)
    # the server could not be reached, or the client failed
    if isinstance(error, _NETWORK):
        return StorageUnavailable(f"{where}: {type(error).__name__}: {error}")
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return AccessDenied(f"{where}: {error}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    if isinstance(error, FileNotFoundError):
        return ObjectNotFound(f"no object {where}")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull(f"no space on this machine for {where}: {error}")
    return PermanentStorageError(f"{where}: {type(error).__name__}: {error}")


def _error_of_reply(reply: ClientError, where: str) -> StorageError:
    status, code = http_status(reply), reply.response.get("Error", {}).get("Code", "")
    # codes with a meaning of their own come before the status
    if code == "NoSuchBucket":
        return NoSuchBucket(f"{where}: there is no such bucket; create it first, or correct the URL")
    if code == "NoSuchUpload":
        return StorageUnavailable(f"{where}: the multipart upload was aborted by another process: {reply}")
    if status == 404:
        return ObjectNotFound(f"no object {where}")
    if status == 412:
        return CorruptArtifact(f"{where} was replaced while it was read; open it again")
    if status == 507 or code in _FULL_CODES:
        return StorageFull(f"no space for {where}: {reply}")
    if status in (408, 409, 425, 429) or status >= 500 or code in _TRANSIENT_CODES:
        return StorageUnavailable(f"{where}: {reply}")
    if status in (401, 403):
        return AccessDenied(f"{where}: {reply}; check the credentials and the bucket's policy")
    return PermanentStorageError(f"{where}: {reply}")


def client_error_of(error: BaseException | None) -> ClientError | None:
    """Returns the server's error reply behind an exception, or None. s3fs wraps it in an OSError."""
    while error is not None and not isinstance(error, ClientError):
        error = error.__cause__
    return error


def http_status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
