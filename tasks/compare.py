"""Commits the table of an evaluation that compares models prompt by prompt."""

from __future__ import annotations

import pyarrow as pa

from engine.workspace import Workspace
from storage.store import keys
from storage.store.artifacts import ArtifactRef, find_artifact
from storage.store.tables import SCHEMAS, commit_table
from tasks.evaluation.model_comparison import Cell, prompt_rows
from tasks.evaluation.several_answers import AnswerScores
from tasks.task_runs import durable_task

STAGE = "0-evaluation"
TABLE = "comparison"


@durable_task("compare", "compare")
def compare_models(workspace: Workspace, cells: list[Cell], scores: AnswerScores = AnswerScores()) -> ArtifactRef:
    """Returns the evaluation's `comparison` table, and makes it first if there is none. It has one row per model,
    dataset, grader and prompt, and one per score of several answers."""
    store = workspace.open_store()
    key = keys.evaluation(workspace.run, STAGE, TABLE)
    committed = find_artifact(store, key)
    if committed is not None:
        return committed
    table = pa.Table.from_pylist(prompt_rows(store, cells, scores), schema=SCHEMAS["comparison"])
    parents: list[ArtifactRef] = []
    for cell in cells:
        parents += cell.graded
    return commit_table(store, key, table, kind="comparison", parents=parents, provenance=workspace.provenance)
