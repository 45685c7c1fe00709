"""Where a grader finds the run that it works for: the engine and the store that judges are spawned on.

`setup()` takes no argument, so that any grader can be set up alike. It works in the RecipeContext that was opened last,
unless another place is named:

    with grading_in(ctx):              # a RecipeContext, a session, anything with a workspace
        await grader.setup()

Deployed flows do so around the setup of the graders that their configs name (tasks.graders.running.shared_graders).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from engine.handles import HasWorkspace
from engine.protocol import Engine
from engine.specs.cluster import ClusterSpec
from engine.specs.engine import LocalEngineSpec
from engine.workspace import Workspace
from tasks.graders.base import GraderError

Client = Engine | HasWorkspace
"""What a judge is told of where its model runs: `ctx.client`, or `ctx` itself."""

_WORKSPACE: ContextVar[Workspace | None] = ContextVar("grading_workspace", default=None)


@contextmanager
def grading_in(ctx: HasWorkspace | Workspace) -> Iterator[None]:
    """Graders that are set up inside work on the engine and the store of `ctx`."""
    token = _WORKSPACE.set(ctx if isinstance(ctx, Workspace) else ctx.workspace)
    try:
        yield
    finally:
        _WORKSPACE.reset(token)


def set_grading_workspace(ctx: HasWorkspace) -> None:
    """Graders that are set up from now on work on the engine and the store of `ctx`: of a context that was opened."""
    _WORKSPACE.set(ctx.workspace)


def grading_workspace(wanted_for: str, client: Client | None = None) -> Workspace:
    """The workspace that graders are set up in. `client`: a context, or the engine of the one that is open.

    Raises GraderError where no context is open, and for an engine that is not the open context's.
    """
    named = getattr(client, "workspace", None)
    if isinstance(named, Workspace):
        return named
    workspace = _WORKSPACE.get()
    if workspace is None:
        raise GraderError(
            f"{wanted_for} needs an engine, and setup() was called where none is known; open a RecipeContext first, "
            "call it inside `with grading_in(ctx):`, or give the grader a spawned model instead of its key"
        )
    if client is not None and client is not workspace.connect():
        raise GraderError(
            f"{wanted_for}: client={client!r} is not the engine of the run in which setup() was called, "
            f"{workspace.run!r}; give client=ctx.client of this run, or leave client out"
        )
    return workspace


def grading_cluster() -> ClusterSpec:
    """The Ray cluster for graders that are set up now: the one of the run's embedded engine if its config names one,
    else the one in Ray's own variable RAY_ADDRESS, else a private Ray on this machine."""
    workspace = _WORKSPACE.get()
    if workspace is not None and isinstance(workspace.engine, LocalEngineSpec) and workspace.engine.cluster.address:
        return workspace.engine.cluster
    return ClusterSpec(address=os.environ.get("RAY_ADDRESS") or None)
