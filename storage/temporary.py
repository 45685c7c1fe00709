"""Folders for temporary files, which outlive no process for long: those of dead processes are swept.

A process marks a folder as in use by a lock on a file in it. The kernel releases the lock when the process ends,
however it ends, so neither a reused process id nor a clock can make a folder of a live process look unused.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

LOCK_NAME = ".ostinato-in-use"
"""Name of the locked file in a folder that is in use."""
PREFIX = "ostinato-process-"
"""Prefix of the folders of `process_folder`."""

_locks: dict[Path, BinaryIO] = {}
"""The locked files of this process, by folder."""
_creation = threading.Lock()
_folders: dict[Path, Path] = {}
"""The folders of this process, by the folder that they are in."""


def process_folder(parent: Path | None = None) -> Path:
    """Returns the folder for the temporary files of this process. It is removed when the process exits.

    The first call removes the folders of processes that were killed. `parent`: where it is created; None for the
    system's folder for temporary files.
    """
    parent = parent or Path(tempfile.gettempdir())
    with _creation:
        # a cleaner of temporary files may have removed it from a process that runs for weeks
        if parent not in _folders or not _folders[parent].is_dir():
            sweep_unused(parent, f"{PREFIX}*")
            for mark in parent.glob(f"{PREFIX}*{LOCK_NAME}"):
                _sweep(mark, Path(str(mark).removesuffix(LOCK_NAME)))
            folder = _create_marked(parent)
            atexit.register(_remove, folder, os.getpid())
            _folders[parent] = folder
        return _folders[parent]


def _create_marked(parent: Path) -> Path:
    """Creates a folder that a sweep can recognise at each moment: its mark is next to it, and then in it."""
    while True:
        descriptor, name = tempfile.mkstemp(prefix=PREFIX, suffix=LOCK_NAME, dir=parent)
        lock = os.fdopen(descriptor, "wb")
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = Path(name.removesuffix(LOCK_NAME))
        folder.mkdir(mode=0o700)
        try:
            os.replace(name, folder / LOCK_NAME)
        except FileNotFoundError:  # another process swept the file before it was locked
            folder.rmdir()
            lock.close()
            continue
        _locks[folder] = lock
        return folder


def mark_in_use(folder: Path) -> None:
    """Keeps `sweep_unused` of all processes away from a folder until this process ends."""
    # The file gets its name after it is locked. Else another process could lock it in between and sweep the folder.
    descriptor, name = tempfile.mkstemp(dir=folder)
    lock = os.fdopen(descriptor, "wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.replace(name, folder / LOCK_NAME)
    _locks[folder] = lock


def sweep_unused(parent: Path, pattern: str) -> None:
    """Removes the folders in `parent` that a process marked as in use and that no live process uses.

    A folder without a mark is not touched. What cannot be removed now is left to the next sweep.
    """
    for path in parent.glob(f"{pattern}/{LOCK_NAME}"):
        _sweep(path, path.parent)


def _sweep(mark: Path, folder: Path) -> None:
    """Removes a folder and its mark, if no live process holds the mark."""
    # NFS locks only a file that is open for writing
    with suppress(OSError), mark.open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if folder.is_dir():
            _remove_contents(folder)
        mark.unlink(missing_ok=True)


def _remove_contents(folder: Path) -> None:
    """Removes the folder, and the mark in it last, so that an interrupted removal is finished by the next sweep."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != LOCK_NAME:
            entry.unlink()
    shutil.rmtree(folder)


def _remove(folder: Path, pid: int) -> None:
    # A forked child inherits the registration, but not the folder.
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
