"""Loads a dataset into the store, as one committed artifact."""

from __future__ import annotations

from engine.workspace import Workspace
from tasks.datasets.load import LoadedDataset, load_dataset
from tasks.datasets.spec import DatasetSpec, DatasetUse
from tasks.reports.clock import timed
from tasks.task_runs import durable_task


@durable_task("load", "load-{kind}s")
def load_prompts(workspace: Workspace, spec: DatasetSpec, kind: DatasetUse) -> LoadedDataset:
    """The committed table of the dataset's threads or pairs. Its version is a digest of its content, so a repeated call
    returns the same artifact."""
    with timed("storage"):
        return load_dataset(workspace.open_store(), spec, kind=kind, provenance=workspace.provenance)
