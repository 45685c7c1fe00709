"""Every error of boto, aiohttp and s3fs as one of ours."""

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
ANY = (*_NETWORK, BotoCoreError, ClientError, OSError)


@contextmanager
def typed(key: str, url: str) -> Iterator[None]:
    """Raises StorageError only, blaming `key` of the store at `url`."""
    try:
        yield
    except ANY as error:
        raise _storage_error(error, f"{key!r} in {url}") from error


def _storage_error(error: BaseException, where: str) -> StorageError:
    answer = answer_of(error)
    if answer is not None:
        return _refusal(answer, where)
    if isinstance(error, _NETWORK):
        return StorageUnavailable(f"{where}: {type(error).__name__}: {error}")
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return AccessDenied(f"{where}: {error}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    if isinstance(error, FileNotFoundError):
        return ObjectNotFound(f"no object {where}")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull(f"no space on this machine for {where}: {error}")
    return PermanentStorageError(f"{where}: {type(error).__name__}: {error}")


def _refusal(answer: ClientError, where: str) -> StorageError:
    status, code = status_of(answer), answer.response.get("Error", {}).get("Code", "")
    if code == "NoSuchBucket":
        return NoSuchBucket(f"{where}: there is no such bucket; make it first, or mend the URL")
    if code == "NoSuchUpload":
        return StorageUnavailable(f"{where}: the multipart upload was aborted by another hand: {answer}")
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


def answer_of(error: BaseException | None) -> ClientError | None:
    """The server's answer behind an error; s3fs dresses it up as an OSError."""
    while error is not None and not isinstance(error, ClientError):
        error = error.__cause__
    return error


def status_of(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
