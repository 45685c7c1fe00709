"""Loads a dataset into the store, as one committed artifact."""

from __future__ import annotations

from collections.abc import Callable

from engine.workspace import Workspace
from storage.store import keys
from storage.store.artifacts import ArtifactRef
from tasks.datasets.load import DatasetUse, DeclaredDataset, LoadedDataset, LoadProgress, load_dataset
from tasks.reports.clock import timed
from tasks.sampling.stored_answers import store_answers
from tasks.task_runs import durable_task


@durable_task("load", "store-answers")
def load_answers(
    workspace: Workspace, data: LoadedDataset, column: str | None, *, rows_per_shard: int
) -> list[ArtifactRef]:
    """The committed shards of the answers in a dataset. A repeated call returns the same shards."""
    return store_answers(workspace, data, column, rows_per_shard=rows_per_shard)


@durable_task("load", "load-{use}s")
def load_prompts(
    workspace: Workspace,
    spec: DeclaredDataset,
    use: DatasetUse,
    on_progress: Callable[[LoadProgress], None] = lambda progress: None,
) -> LoadedDataset:
    """The committed table of the dataset's threads or pairs. Its version is a digest of its content, so a repeated call
    returns the same artifact.

    A run that exists records the version of a registered dataset, and later calls return that version.
    """
    store = workspace.open_store()
    with timed("storage"):
        source = spec.resolved(store, use, run=workspace.run, commits=workspace.hub)
        data = load_dataset(store, source, use=use, provenance=workspace.provenance, on_progress=on_progress)
        if store.exists(keys.run_json(workspace.run)):
            spec.record_version(store, workspace.run, use, data)
        return data
