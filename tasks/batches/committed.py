"""Finds the committed batch of a step: every batch task returns it before it prepares anything."""

from __future__ import annotations

from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.store import keys
from storage.store.artifacts import ArtifactRef, find_artifact, require_parent
from tasks.reports.clock import timed


def find_batch(workspace: Workspace, policy: PolicyRef, step: int) -> tuple[str, ArtifactRef | None]:
    """The key of the step's batch, and the batch if it is committed. Raises the error of `require_parent` if it was
    prepared for another policy."""
    key = keys.step_artifact(policy.run, policy.stage, step, "batch", 0)
    with timed("storage"):
        committed = find_artifact(workspace.open_store(), key, one_file=True)
    return key, None if committed is None else require_parent(committed, policy.uri)
