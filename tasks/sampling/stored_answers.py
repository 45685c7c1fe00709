"""Commits answers that another system gave, as shards that are graded like sampled completions."""

from __future__ import annotations

from functools import partial
from typing import Any

import pyarrow as pa

from engine.text.threads import StringThread
from engine.workspace import Workspace
from storage.serialization import canonical_json, digest
from storage.store import keys
from storage.store.artifacts import ArtifactRef, find_artifact, require_parent
from storage.store.tables import SCHEMAS, commit_table, read_rows
from tasks.datasets.errors import DatasetError
from tasks.datasets.load import LoadedDataset, thread_id
from tasks.datasets.naming import NameRow, row_name


def answers_stage_name(data: LoadedDataset, column: str | None, rows_per_shard: int) -> str:
    """The name of the stage of the shards: a digest of everything that decides them."""
    body = {"dataset": data.ref.sha256, "column": column, "rows_per_shard": rows_per_shard}
    return digest(canonical_json(body))[:16]


def store_answers(
    workspace: Workspace, data: LoadedDataset, column: str | None, *, rows_per_shard: int
) -> list[ArtifactRef]:
    """Returns the committed shards of a dataset's answers, and commits those that are missing.

    Rows with the same prompt and metadata are one prompt with several answers. Raises DatasetError for a row without an
    answer.
    """
    store = workspace.open_store()
    refs: list[ArtifactRef] = []
    name_row = partial(row_name, store, data.ref)
    stage = answers_stage_name(data, column, rows_per_shard)
    # prompt id -> (index of its first row, number of its answers so far)
    prompts: dict[str, tuple[int, int]] = {}
    for shard, first in enumerate(range(0, data.rows, rows_per_shard)):
        rows = read_rows(store, data.ref, range(first, min(first + rows_per_shard, data.rows)))
        answers = []
        for row in rows:
            thread, texts = _prompt_and_answers(row, column, name_row)
            prompt_json = thread.to_json()
            prompt = thread_id(prompt_json)
            index, number = prompts.get(prompt, (row["index"], 0))
            prompts[prompt] = index, number + len(texts)
            names = {"prompt_index": index, "prompt_id": prompt, "thread": prompt_json}
            answers += [names | {"completion": number + place, "text": text} for place, text in enumerate(texts)]

        key = keys.step_artifact(workspace.run, stage, 0, "answers", shard)
        committed = find_artifact(store, key)
        if committed is None:
            table = pa.Table.from_pylist(answers, schema=SCHEMAS["answers"])
            committed = commit_table(
                store, key, table, kind="answers", parents=(data.ref.uri,), provenance=workspace.provenance
            )
        refs.append(require_parent(committed, data.ref.uri))
    return refs


def _prompt_and_answers(row: dict[str, Any], column: str | None, name_row: NameRow) -> tuple[StringThread, list[str]]:
    """The prompt of a row and its answers, which are in the metadata, or in the last turn if `column` is None."""
    thread = StringThread.from_json(str(row["thread"]))
    if column is None:
        # without the weights of the turns, so that the prompt is the same as in a dataset of prompts
        return StringThread(thread.turns[:-1], thread.metadata, tools=thread.tools), [thread.last_content()]
    metadata = dict(thread.metadata)
    value = metadata.pop(column, None)
    values = value if isinstance(value, list) else [value]
    answers = [answer for answer in values if isinstance(answer, str)]
    if not answers or len(answers) < len(values):
        raise DatasetError(
            f"{name_row(row['index'])}: the column {column!r} is {value!r:.80}; expected an answer, which is a text, "
            "or a list of at least one"
        )
    return thread.with_metadata(metadata), answers
