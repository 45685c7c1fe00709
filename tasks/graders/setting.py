"""Where a grader finds the run that it works for: the engine and the store that judges are spawned on.

`setup()` takes no argument, so that any grader can be set up alike. Whoever owns a grader says where it works:

    with grading_in(ctx):              # a RecipeContext, a session, anything with a workspace
        await grader.setup()

Deployed flows do so around the setup of the graders that their configs name (tasks.graders.owner).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from engine.handles import HasWorkspace
from engine.workspace import Workspace
from tasks.graders.base import GraderError

_WORKSPACE: ContextVar[Workspace | None] = ContextVar("grading_workspace", default=None)


@contextmanager
def grading_in(ctx: HasWorkspace | Workspace) -> Iterator[None]:
    """Graders that are set up inside work on the engine and the store of `ctx`."""
    token = _WORKSPACE.set(ctx if isinstance(ctx, Workspace) else ctx.workspace)
    try:
        yield
    finally:
        _WORKSPACE.reset(token)


def grading_workspace(wanted_for: str) -> Workspace:
    """The workspace that graders are set up in. Raises GraderError when nobody said which."""
    workspace = _WORKSPACE.get()
    if workspace is None:
        raise GraderError(
            f"{wanted_for} needs an engine, and setup() was called where none is known; call it inside "
            "`with grading_in(ctx):`, or give the grader a spawned model instead of its key"
        )
    return workspace
