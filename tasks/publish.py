"""Publishes a model to the registry, as a folder in the format of Hugging Face."""

from __future__ import annotations

from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.store.artifacts import ArtifactRef
from tasks.reports.clock import timed
from tasks.task_runs import durable_task


@durable_task("publish", "publish-{model_name}")
async def publish_model(workspace: Workspace, policy: PolicyRef, model_name: str) -> ArtifactRef:
    """The registry's artifact of this policy under `model_name`. The alias "latest" then points to it."""
    with timed("storage"):
        return await workspace.connect().export_model(
            policy, model_name, provenance=workspace.provenance, epoch=workspace.epoch
        )
