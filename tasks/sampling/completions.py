"""Plain code behind the rollout task: from prompts to a table of completions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pyarrow as pa
from pydantic import Field

from engine.errors import BadSpec, SampleTooLong
from engine.models.images import images_or_none, images_to_rows
from engine.protocol import Completion, GenerateRequest, SamplingParams, TokenSequence
from engine.text.errors import UnsupportedFragment
from engine.text.rendering import Renderer
from engine.text.stored_models import context_length_of, renderer_of
from engine.text.threads import StringThread
from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.failpoints import failpoint
from storage.serialization import Frozen
from storage.store import keys
from storage.store.artifacts import ArtifactRef, find_artifact, require_parent
from storage.store.tables import commit_table, read_rows, table_schema
from storage.worklog import log_work
from tasks.batches.truncation import shortest
from tasks.datasets.naming import NameRow, row_name
from tasks.reports.clock import timed

Truncation = Literal["error", "left", "right", "drop"]


class PromptShard(Frozen):
    """Some prompts of a step: which rows, and how many completions of each. A shard is sampled as one fixed batch."""

    base: ArtifactRef
    """The model whose tokenizer renders the prompts."""
    dataset: ArtifactRef
    index: int = Field(ge=0)
    rows: tuple[int, ...]
    completions: int = Field(ge=1)
    repetitions: tuple[int, ...] = ()
    """How often each row came earlier in the same step, when the batch is larger than what is left of an epoch: its
    completions are numbered on from there, so that no two of a step share a random stream. Empty: no row did."""
    max_prompt_tokens: int | None = None
    truncation: Truncation = "error"


async def sample_shard(
    workspace: Workspace, policy: PolicyRef, shard: PromptShard, sampling: SamplingParams, *, step: int
) -> ArtifactRef:
    """The committed rollouts of a shard, sampled now if nobody did before."""
    store = workspace.open_store()
    key = keys.step_artifact(policy.run, policy.stage, step, "rollouts", shard.index)
    with timed("storage"):
        found = find_artifact(store, key)
        if found is not None:
            return require_parent(found, policy.uri)
        rows = read_rows(store, shard.dataset, shard.rows)
    earlier = shard.repetitions or (0,) * len(rows)
    rows = [row | {"first": n * shard.completions} for row, n in zip(rows, earlier, strict=True)]
    limit = prompt_limit(workspace, shard, sampling)
    name_row = partial(row_name, store, shard.dataset)
    prompts = render_prompts(renderer_of(store, shard.base), rows, limit, shard.truncation, name_row)
    jobs = [(row, prompt, row["first"] + c) for row, prompt in prompts for c in range(shard.completions)]
    seeds = [workspace.seed_for(policy.stage, step, row["id"], c) for row, _, c in jobs]
    failpoint("rollout.sampling")
    with timed("rollout"):
        request = generate_request(policy, [prompt for _, prompt, _ in jobs], seeds, sampling)
        completions = await workspace.connect().generate(request, epoch=workspace.epoch)
    table = rollout_table(renderer_of(store, shard.base), policy, jobs, seeds, completions)
    log_work("shard", stage=policy.stage, step=step, shard=shard.index)
    with timed("storage"):
        committed = commit_table(
            store,
            key,
            table,
            kind="rollouts",
            parents=(policy.uri, shard.dataset.uri),
            provenance=workspace.provenance,
            extra={
                "prompts": len(shard.rows),
                "dropped": len(rows) - len(prompts),
                "completion_tokens": sum(len(done.token_ids) for done in completions),
            },
        )
    return require_parent(committed, policy.uri)


def generate_request(
    policy: PolicyRef, prompts: list[TokenSequence], seeds: list[int], sampling: SamplingParams
) -> GenerateRequest:
    """One completion of each prompt."""
    ids, images = [prompt.token_ids for prompt in prompts], images_or_none(prompt.images for prompt in prompts)
    return GenerateRequest(policy, ids, seeds, sampling, images=images)


def prompt_limit(workspace: Workspace, shard: PromptShard, sampling: SamplingParams) -> int | None:
    """Tokens a prompt may have: as configured, and with its completion no more than the model's context and the
    max_batch_size that the model was spawned with."""
    context = context_length_of(workspace.open_store(), shard.base)
    longest = shortest(context, workspace.max_tokens)
    if longest is None:
        return shard.max_prompt_tokens
    room = longest - sampling.max_new_tokens
    if room < 1:
        what = "the model's context" if longest == context else "the model's max_batch_size"
        raise BadSpec(
            f"max_new_tokens={sampling.max_new_tokens} leaves no room for a prompt in {what} of {longest} tokens; "
            "lower it (model.max_gen_len)"
        )
    return shortest(room, shard.max_prompt_tokens)


def render_prompts(
    renderer: Renderer, rows: list[dict[str, Any]], limit: int | None, truncation: Truncation, name_row: NameRow
) -> list[tuple[dict[str, Any], TokenSequence]]:
    """Tokens and images of each row's prompt; one of more than `limit` tokens is refused, cut or dropped. One with
    images is never cut: raises UnsupportedFragment."""
    rendered = []
    for row in rows:
        prompt = renderer.prompt_sequence(StringThread.from_json(str(row["thread"])))
        ids = prompt.token_ids
        if limit is not None and len(ids) > limit:
            if truncation == "drop":
                continue
            if truncation == "error":
                raise SampleTooLong(
                    f"prompt {row['id']} ({name_row(row['index'])}) has {len(ids)} tokens, at most {limit} are "
                    "allowed (max_prompt_tokens, or the model's context or max_batch_size less max_new_tokens); set "
                    "truncation to left, right or drop, or raise the limit"
                )
            if prompt.images:
                raise UnsupportedFragment(
                    f"prompt {row['id']} ({name_row(row['index'])}) has {len(ids)} tokens, at most {limit} are "
                    "allowed, and it holds images, which cannot be cut; set truncation to drop or error, or raise "
                    "max_prompt_tokens"
                )
            ids = ids[-limit:] if truncation == "left" else ids[:limit]
            prompt = replace(prompt, token_ids=ids, weights=[0.0] * len(ids))
        rendered.append((row, prompt))
    return rendered


def rollout_table(
    renderer: Renderer,
    policy: PolicyRef,
    jobs: list[tuple[dict[str, Any], TokenSequence, int]],
    seeds: list[int],
    completions: list[Completion],
) -> pa.Table:
    """One row per completion, readable as it is: the text stands beside the tokens. Of a model that takes images, the
    prompt's stand there too; null where it has none."""
    rows = [
        {
            "prompt_index": row["index"],
            "prompt_id": row["id"],
            "completion": number,
            "seed": seed,
            "prompt_ids": prompt.token_ids,
            "completion_ids": done.token_ids,
            "logprobs": done.logprobs,
            "stop_reason": done.stop_reason,
            "text": renderer.decode_completion(done.token_ids),
            "thread": row["thread"],
            "policy_state": policy.state,
            **({"images": images_to_rows(prompt.images)} if renderer.tokenizer.images else {}),
        }
        for (row, prompt, number), seed, done in zip(jobs, seeds, completions, strict=True)
    ]
    columns = ["images"] if renderer.tokenizer.images else []
    return pa.Table.from_pylist(rows, schema=table_schema("rollouts", columns))


def answered_thread(row: dict[str, object]) -> StringThread:
    """The conversation a grader sees: the prompt's thread and the completion as the assistant's turn."""
    return StringThread.from_json(str(row["thread"])).assistant(str(row["text"]))
