"""Load a dataset into the store: validated row by row, committed as one artifact."""

from __future__ import annotations

from engine.workspace import Workspace
from tasks.datasets.load import LoadedDataset, load_dataset
from tasks.datasets.spec import DatasetSpec, DatasetUse
from tasks.reports.clock import timed
from tasks.task_runs import durable_task


@durable_task("load", "load-{kind}s")
def load_prompts(workspace: Workspace, spec: DatasetSpec, kind: DatasetUse) -> LoadedDataset:
    """The dataset's `threads` table. Idempotent: its version is a digest of its content."""
    with timed("storage"):
        return load_dataset(workspace.open_store(), spec, kind=kind, provenance=workspace.provenance)
