"""Shares the graders that configs name: each is built and set up once per process, event loop, spec and workspace.

All shards use the same grader. It is torn down when too many other graders are idle, or when the run ends. A live
grader that was registered with in_process_spec belongs to the code that created it: it is neither set up nor torn down
here.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import logging
import os
import platform
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, nullcontext
from itertools import count
from pathlib import Path
from weakref import WeakKeyDictionary

from engine.workspace import Workspace
from storage.serialization import digest
from tasks.graders.base import BaseGrader
from tasks.graders.running.grade_threads import retrieve_exception
from tasks.graders.setting import grading_in
from tasks.graders.spec import GraderSpec, build

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


logger = logging.getLogger("ostinato.graders")

MAX_IDLE_GRADERS = 8
"""Largest number of graders that stay set up while they are not in use."""


class _SharedGrader:
    """A grader, its setup, and the number of its users. The constructor starts the setup."""

    def __init__(self, grader: BaseGrader, workspace: Workspace | None) -> None:
        self.grader, self.users = grader, 0
        self.setup_task = asyncio.ensure_future(_set_up(grader, workspace))
        self.setup_task.add_done_callback(retrieve_exception)

    @property
    def setup_failed(self) -> bool:
        return self.setup_task.done() and (self.setup_task.cancelled() or self.setup_task.exception() is not None)


_graders_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, OrderedDict[str, _SharedGrader]] = WeakKeyDictionary()
"""Event loop -> its graders, the least recently used first. Clients and processes of a grader belong to the loop that
set it up."""


@asynccontextmanager
async def shared_grader(spec: GraderSpec, workspace: Workspace | None) -> AsyncIterator[BaseGrader]:
    """The grader that `spec` names, set up in `workspace`.

    An exception of its setup is raised here, and the next caller tries the setup again.
    """
    if spec.in_process:
        yield build(spec)  # returns the live grader itself
        return

    graders = _graders_of_this_loop()
    key = f"{spec.model_dump_json()} {'' if workspace is None else workspace.model_dump_json()}"
    if key not in graders:
        graders[key] = _SharedGrader(build(spec), workspace)
    shared = graders[key]
    graders.move_to_end(key)

    # Lend it. The shield keeps the setup running for other callers if this one is cancelled.
    shared.users += 1
    try:
        await asyncio.shield(shared.setup_task)
        yield shared.grader
    finally:
        shared.users -= 1
        # Forget a failed setup, so that the next caller tries it again.
        if shared.setup_failed and graders.get(key) is shared:
            del graders[key]
        await _tear_down_idle(graders, keep=MAX_IDLE_GRADERS)


async def tear_down_idle_graders() -> None:
    """Tear down every grader of this event loop that is not in use. Called at the end of a run."""
    await _tear_down_idle(_graders_of_this_loop(), keep=0)


def _graders_of_this_loop() -> OrderedDict[str, _SharedGrader]:
    # Forget the graders of closed loops. A grader refers to its loop, so the weak key never disappears by itself.
    closed_loops = [loop for loop in _graders_by_loop if loop.is_closed()]
    for loop in closed_loops:
        del _graders_by_loop[loop]
    return _graders_by_loop.setdefault(asyncio.get_running_loop(), OrderedDict())


async def _set_up(grader: BaseGrader, workspace: Workspace | None) -> None:
    with nullcontext() if workspace is None else grading_in(workspace):
        await grader.setup()


async def _tear_down_idle(graders: OrderedDict[str, _SharedGrader], *, keep: int) -> None:
    """Tear down idle graders, the least recently used first, until at most `keep` are left."""
    idle_keys = [key for key, shared in graders.items() if shared.users == 0 and shared.setup_task.done()]
    surplus = max(0, len(idle_keys) - keep)
    # Remove all of them before the first await, so that a concurrent call cannot lend one that is being torn down.
    surplus_graders = [graders.pop(key) for key in idle_keys[:surplus]]
    for shared in surplus_graders:
        try:
            await shared.grader.teardown()
        except Exception as error:  # noqa: BLE001  the boundary to a user's code: its grades are committed already
            logger.warning("grader %r: teardown raised %r", shared.grader.grader_key, error)
