"""The workspace (engine, store and run) in which graders are set up, where judges spawn their models.

`setup()` takes no argument, so that all graders can be set up alike. It uses the RecipeContext that was opened last,
unless another workspace is named:

    with grading_in(ctx):              # a RecipeContext, a session, or any object with a workspace
        await grader.setup()

Deployed flows do this when they set up the graders of their configs (tasks.graders.running.shared_graders).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from engine.handles import HasWorkspace
from engine.protocol import Engine
from engine.specs.engine import ClusterSpec, LocalEngineSpec
from engine.workspace import Workspace
from tasks.graders.base import GraderError

Client = Engine | HasWorkspace
"""Where a judge spawns its model: `ctx.client`, or `ctx` itself."""

_WORKSPACE: ContextVar[Workspace | None] = ContextVar("grading_workspace", default=None)


@dataclass(frozen=True)
class WorkspaceContext:
    """The smallest context that model handles accept: a workspace and nothing else."""

    workspace: Workspace


@contextmanager
def grading_in(ctx: HasWorkspace | Workspace) -> Iterator[None]:
    """Graders that are set up in this block use the engine and the store of `ctx`."""
    token = _WORKSPACE.set(ctx if isinstance(ctx, Workspace) else ctx.workspace)
    try:
        yield
    finally:
        _WORKSPACE.reset(token)


def set_grading_workspace(ctx: HasWorkspace) -> None:
    """Graders that are set up from now on use the engine and the store of `ctx`. Called when a context is opened."""
    _WORKSPACE.set(ctx.workspace)


def grading_workspace(user: str, client: Client | None = None) -> Workspace:
    """The workspace in which graders are set up now.

    `user` names the grader in messages. `client` is a context, whose workspace is returned, or the engine of the open
    context. Raises GraderError if no context is open, or if `client` is another engine.
    """
    # A context names its workspace itself.
    client_workspace = getattr(client, "workspace", None)
    if isinstance(client_workspace, Workspace):
        return client_workspace
    workspace = _WORKSPACE.get()
    if workspace is None:
        raise GraderError(
            f"{user} needs an engine, and setup() was called where none is known; open a RecipeContext first, "
            "call it inside 'with grading_in(ctx):', or give the grader a spawned model instead of its key"
        )
    # An engine does not know its run, so it must be the engine of the open context.
    if client is not None and client is not workspace.connect():
        raise GraderError(
            f"{user}: client={client!r} is not the engine of the run in which setup() was called, "
            f"{workspace.run!r}; give client=ctx.client of this run, or leave client out"
        )
    return workspace


def grading_cluster() -> ClusterSpec:
    """The Ray cluster for graders that are set up now.

    It is the cluster of the run's embedded engine if its config names one, else that of the environment variable
    RAY_ADDRESS, else a private Ray on this machine.
    """
    workspace = _WORKSPACE.get()
    if workspace is not None and isinstance(workspace.engine, LocalEngineSpec) and workspace.engine.cluster.address:
        return workspace.engine.cluster
    return ClusterSpec(address=os.environ.get("RAY_ADDRESS") or None)
