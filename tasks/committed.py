"""Commits an artifact once: a task that runs again returns what an earlier attempt committed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from engine.workspace import Workspace
from storage.store.artifacts import ArtifactRef, find_artifact, require_parent
from tasks.reports.clock import timed


async def commit_once(
    workspace: Workspace, key: str, build: Callable[[], Awaitable[ArtifactRef]], *, parent: str | None = None
) -> ArtifactRef:
    """Returns the committed table of `key`. If there is none, returns what `build` commits, which is the table of
    another process if that one was faster.

    Raises ArtifactConflict unless the URI `parent` is among the table's parents.
    """
    with timed("storage"):
        committed = find_artifact(workspace.open_store(), key)
    if committed is None:
        committed = await build()
    if parent is None:
        return committed
    return require_parent(committed, parent)
