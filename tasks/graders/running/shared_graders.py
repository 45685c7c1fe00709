"""Who owns the graders that configs name: each is built and set up once per process, event loop, spec and workspace,
shared by all shards, and torn down when others take its place or the run ends.

A live grader that was registered with in_process_spec belongs to whoever made it: it is neither set up nor torn down
here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from weakref import WeakKeyDictionary

from engine.workspace import Workspace
from tasks.graders.base import BaseGrader
from tasks.graders.running.workspace import grading_in
from tasks.graders.spec import GraderSpec, build

logger = logging.getLogger("ostinato.graders")

IDLE_GRADERS = 8
"""Graders that stay set up while nobody uses them."""


class _Owned:
    """A grader, its setup, and how many use it now."""

    def __init__(self, grader: BaseGrader, workspace: Workspace | None) -> None:
        self.grader, self.users = grader, 0
        self.ready = asyncio.ensure_future(_set_up(grader, workspace))
        self.ready.add_done_callback(_retrieve)


_owned: WeakKeyDictionary[asyncio.AbstractEventLoop, OrderedDict[str, _Owned]] = WeakKeyDictionary()
"""Per loop: clients and processes of a grader belong to the loop that set it up."""


@asynccontextmanager
async def shared_grader(spec: GraderSpec, workspace: Workspace | None) -> AsyncIterator[BaseGrader]:
    """The grader that `spec` names, set up in `workspace`. What its setup raises is raised here, and tried anew by the
    next caller."""
    if spec.in_process:
        yield build(spec)
        return
    graders = _graders_of_this_loop()
    key = f"{spec.model_dump_json()} {'' if workspace is None else workspace.model_dump_json()}"
    if key not in graders:
        graders[key] = _Owned(build(spec), workspace)
    owned = graders[key]
    graders.move_to_end(key)
    owned.users += 1
    try:
        await asyncio.shield(owned.ready)  # a caller that is cancelled takes the setup from no other
        yield owned.grader
    finally:
        owned.users -= 1
        failed = owned.ready.done() and (owned.ready.cancelled() or owned.ready.exception() is not None)
        if failed and graders.get(key) is owned:
            del graders[key]
        await _tear_down_idle(graders, keep=IDLE_GRADERS)


async def tear_down_idle_graders() -> None:
    """Tear down every grader of this event loop that nobody uses: what the owner of a run does at its end."""
    await _tear_down_idle(_graders_of_this_loop(), keep=0)


def _graders_of_this_loop() -> OrderedDict[str, _Owned]:
    for loop in [loop for loop in _owned if loop.is_closed()]:  # a grader holds its loop, which would never be freed
        del _owned[loop]
    return _owned.setdefault(asyncio.get_running_loop(), OrderedDict())


async def _set_up(grader: BaseGrader, workspace: Workspace | None) -> None:
    with nullcontext() if workspace is None else grading_in(workspace):
        await grader.setup()


async def _tear_down_idle(graders: OrderedDict[str, _Owned], *, keep: int) -> None:
    idle = [key for key, owned in graders.items() if owned.users == 0 and owned.ready.done()]
    leaving = [graders.pop(key) for key in idle[: max(0, len(idle) - keep)]]
    for owned in leaving:
        try:
            await owned.grader.teardown()
        except Exception as error:  # noqa: BLE001  the boundary to a user's code: its grades are committed already
            logger.warning("grader %r: teardown raised %r", owned.grader.grader_key, error)


def _retrieve(ready: asyncio.Future[None]) -> None:
    """Look at a failure that nobody waited for, so that asyncio does not print it."""
    if not ready.cancelled():
        ready.exception()
