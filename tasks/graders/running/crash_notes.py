"""Notes on this machine of the graders that grade now in the processes of runs.

Such a grader can end its run's process without a message (a crash in native code, os._exit, memory that runs out). The
next process of the run then finds the note and warns.
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
_serial = count()


@contextlib.contextmanager
def note_grading(grader: str, workspace: Workspace) -> Iterator[None]:
    """Notes that the grader grades for the run until the block is left, and warns of notes that a dead process of the
    run left behind. A crash of the interpreter inside the block prints the Python stack to standard error."""
    if not faulthandler.is_enabled():
        faulthandler.enable(file=STDERR_FD)
    prefix = digest([platform.node(), workspace.store, workspace.run])[:16]
    note = None
    with contextlib.suppress(OSError, RuntimeError):  # no home, or it cannot be written: a note is only a help
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        _warn_of_dead(folder, prefix, workspace.run)
        note = folder / f"{prefix}-{os.getpid()}-{next(_serial)}.json"
        note.write_text(json.dumps({"pid": os.getpid(), "grader": grader}))
    try:
        yield
    finally:
        if note is not None:
            note.unlink(missing_ok=True)


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ostinato" / "grading"


def _warn_of_dead(folder: Path, prefix: str, run: str) -> None:
    """One warning per process that ended while it graded. Its notes are removed."""
    dead: dict[int, set[str]] = {}
    for path in folder.glob(f"{prefix}-*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):  # another process removes it, or was cut off
            note = json.loads(path.read_text())
            if not _alive(note["pid"]):
                path.unlink(missing_ok=True)
                dead.setdefault(note["pid"], set()).add(note["grader"])
    for pid, graders in dead.items():
        logger.warning(
            "run %s: process %d ended without a word while %s graded. If the grader ended it (a crash in native code, "
            "os._exit, memory that ran out), set `workers: local` for that grader.",
            run, pid, " and ".join(sorted(graders)),
        )  # fmt: skip


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
