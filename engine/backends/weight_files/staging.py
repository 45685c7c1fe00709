"""Temporary folders for weights on their way from one process to another, in shared memory if it has enough room."""

from __future__ import annotations

import contextlib
import errno
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from storage.errors import StorageFull
from storage.temporary import process_folder

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
SHARED_MEMORY = Path("/dev/shm")
SPARE = 1.25
"""Free space that is required, as a multiple of the bytes to be staged: other processes stage there too."""


@contextlib.contextmanager
def staging_folder(nbytes: int, *, inside: Path | None = None) -> Iterator[Path]:
    """A new folder for `nbytes` of files, deleted afterwards. It is created inside `inside` if that is given, else in
    shared memory if there is room, else in the system's folder for temporary files.

    Raises StorageFull if the space is gone before the files are written, because other processes took it.
    """
    parent = inside or process_folder(SHARED_MEMORY if _has_room(SHARED_MEMORY, nbytes) else None)
    folder = Path(tempfile.mkdtemp(prefix="weights-", dir=parent))
    try:
        yield folder
    except OSError as error:
        if error.errno in DISK_FULL:
            raise StorageFull(f"no space for {nbytes} bytes of weights in {folder.parent}") from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _has_room(folder: Path, nbytes: int) -> bool:
    try:
        return shutil.disk_usage(folder).free >= SPARE * nbytes
    except OSError:  # this machine has no such file system
        return False
