"""Where weights wait on their way from one process to another: shared memory where there is room for them."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
SPARE = 1.25
"""Room asked for, in units of what is to be staged: other processes stage there too."""


@contextlib.contextmanager
def staging_folder(need: int, *, inside: Path | None = None) -> Iterator[Path]:
    """A new folder for `need` bytes of files, gone afterwards: `inside` if given, else in shared memory if it holds
    them, else where temporary files go."""
    parent = inside or (SHARED_MEMORY if _has_room(SHARED_MEMORY, need) else None)
    folder = Path(tempfile.mkdtemp(prefix="ostinato-weights-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _has_room(folder: Path, need: int) -> bool:
    try:
        return shutil.disk_usage(folder).free >= SPARE * need
    except OSError:  # no such file system on this machine
        return False
