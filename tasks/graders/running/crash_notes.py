"""Keeps notes on this machine about graders that run in the processes of runs, to explain a crash later.

A grader can end its run's process without a message: a crash in native code, os._exit, memory that runs out. The next
process of the run then finds the note of the dead process and logs a warning.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import platform
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from engine.workspace import Workspace
from storage.serialization import digest

logger = logging.getLogger("ostinato.graders")

STDERR_FD = 2
_note_numbers = count()


@contextlib.contextmanager
def note_grading(grader: str, workspace: Workspace) -> Iterator[None]:
    """Keep a note that `grader` grades for the run while the block runs, and warn of notes of dead processes.

    A crash of the interpreter inside the block prints the Python stack to standard error.
    """
    if not faulthandler.is_enabled():
        faulthandler.enable(file=STDERR_FD)
    # A process id is only meaningful on its machine, and a home folder may be shared by several.
    prefix = digest([platform.node(), workspace.store, workspace.run])[:16]
    note = None
    # Without a writable home folder, grading works without notes.
    with contextlib.suppress(OSError, RuntimeError):
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        _warn_of_dead(folder, prefix, workspace.run)
        note = folder / f"{prefix}-{os.getpid()}-{next(_note_numbers)}.json"
        note.write_text(json.dumps({"pid": os.getpid(), "grader": grader}))
    try:
        yield
    finally:
        if note is not None:
            note.unlink(missing_ok=True)


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ostinato" / "grading"


def _warn_of_dead(folder: Path, prefix: str, run: str) -> None:
    """Log one warning for each process that ended while it graded, and remove its notes."""
    graders_by_pid: dict[int, set[str]] = {}
    for path in folder.glob(f"{prefix}-*.json"):
        # Another process may remove the note meanwhile, or may have been killed while it wrote it.
        with contextlib.suppress(OSError, ValueError, KeyError):
            note = json.loads(path.read_text())
            if not _is_alive(note["pid"]):
                path.unlink(missing_ok=True)
                graders_by_pid.setdefault(note["pid"], set()).add(note["grader"])
    for pid, graders in graders_by_pid.items():
        logger.warning(
            "run %s: process %d ended without a message while %s graded. If the grader ended it (a crash in native "
            "code, os._exit, memory that ran out), set 'workers: local' for that grader.",
            run, pid, " and ".join(sorted(graders)),
        )  # fmt: skip


def _is_alive(pid: int) -> bool:
    # Signal 0 checks whether the process exists, and sends nothing.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process exists and belongs to another user
        return True
    return True
