"""Translates the OSErrors of a file:// store into storage errors."""

from __future__ import annotations

import errno

from storage.errors import (
    AccessDenied,
    InvalidKey,
    PermanentStorageError,
    StorageError,
    StorageFull,
    StorageUnavailable,
)

# the disk or a quota is full
_FULL = {errno.ENOSPC, errno.EDQUOT}
# the process has no permission
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
# the same call may succeed later
_TRANSIENT = {
    errno.EIO, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE,
    errno.ENOMEM, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN,
    errno.ENOENT,  # a folder was removed under a writer
}  # fmt: skip


def storage_error_of(error: OSError, key: str, url: str) -> StorageError:
    """Returns the storage error for an `error` about the object `key` of the store at `url`."""
    if error.errno in _FULL:
        return StorageFull(f"no space for {key!r} in {url}: {error.strerror}; free some, nothing was written")
    if error.errno in _DENIED:
        return AccessDenied(f"{key!r} in {url}: {error}; give this user the permission, or choose another folder")
    if error.errno == errno.ENAMETOOLONG:
        return InvalidKey(
            f"the path of {key!r} in {url} is too long for its file system: {error.strerror}; give shorter names, or "
            "put the store in a folder with a shorter path"
        )
    if error.errno in _TRANSIENT:
        return StorageUnavailable(f"{key!r} in {url}: {error}")
    return PermanentStorageError(f"{key!r} in {url}: {error}")
