"""How many shards a step works on at a time, and the prompts that its shards can hold."""

from __future__ import annotations

from engine.errors import BadSpec
from engine.protocol import SamplingParams
from engine.text.stored_models import renderer_of
from engine.text.threads import StringThread
from engine.workspace import Workspace
from storage.store.artifacts import ArtifactRef
from storage.store.tables import read_column
from tasks.datasets.load import LoadedDataset
from tasks.sampling.completions import prompt_limit, without_answer

SHARDS_AT_ONCE = 256
"""Shards of a step that are sampled or graded at a time: as many as an engine server admits by default
(engine.http.calls.CallLimits), and few enough that memory does not grow with the number of shards."""


def rows_that_fit(
    workspace: Workspace,
    data: LoadedDataset,
    base: ArtifactRef,
    *,
    max_prompt_tokens: int | None,
    sampling: SamplingParams,
    answered: bool = False,
) -> list[int]:
    """The rows whose prompts have at most `max_prompt_tokens` tokens and leave room for a completion. `base` is the
    model whose tokenizer counts. `answered`: the rows end with answers, which are no part
    of the prompts. Raises BadSpec if there is no such row."""
    store = workspace.open_store()
    limit = prompt_limit(workspace, base, max_prompt_tokens, sampling)
    if limit is None:
        return list(range(data.rows))
    renderer = renderer_of(store, base)
    rows = []
    for row, thread_json in enumerate(read_column(store, data.ref, "thread")):
        thread = without_answer(str(thread_json)) if answered else StringThread.from_json(str(thread_json))
        prompt = renderer.prompt_sequence(thread)
        if len(prompt.token_ids) <= limit:
            rows.append(row)
    if not rows:
        raise BadSpec(f"all {data.rows} prompts have more than {limit} tokens; raise max_prompt_tokens")
    return rows
