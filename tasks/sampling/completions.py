"""Samples the completions of a shard of prompts and commits them as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import JsonValue

from engine.errors import BadSpec, SampleTooLong, UnsupportedFragment
from engine.models.images import images_or_none, images_to_rows
from engine.protocol import Completion, GenerateRequest, SamplingParams, TokenSequence
from engine.text.rendering import Renderer
from engine.text.stored_models import context_length_of, renderer_of
from engine.text.threads import StringThread
from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.failpoints import failpoint
from storage.store import keys
from storage.store.artifacts import ArtifactRef
from storage.store.tables import commit_table, read_rows, table_schema
from storage.worklog import log_work
from tasks.batches.truncation import shortest
from tasks.committed import commit_once
from tasks.datasets.naming import NameRow, row_name
from tasks.plans import PromptShard, Truncation
from tasks.reports.clock import timed
from tasks.sampling.segments import SegmentedCompletion, ShardSegments
from tasks.task_runs import durable_task


@durable_task("rollout", "rollout-{step:06d}/{shard.index:02d}")
async def generate_rollouts(
    workspace: Workspace, policy: PolicyRef, shard: PromptShard, sampling: SamplingParams, *, step: int
) -> ArtifactRef:
    """Completions of the shard's prompts by `policy`, as a committed `rollouts` table.

    A second call, even at the same time, returns the same table: a committed shard is not sampled again, and the seeds
    depend on the run's seed, the stage, the step, the prompt and the completion only.
    """
    key = keys.step_artifact(policy.run, policy.stage, step, "rollouts", shard.index)
    return await commit_once(
        workspace, key, lambda: _sample(workspace, policy, shard, sampling, key, step), parent=policy.uri
    )


async def _sample(
    workspace: Workspace, policy: PolicyRef, shard: PromptShard, sampling: SamplingParams, key: str, step: int
) -> ArtifactRef:
    """Samples the rollouts of a shard and commits them."""
    store = workspace.open_store()
    with timed("storage"):
        rows = read_rows(store, shard.dataset, shard.rows)
    if shard.dataset_answers == "taken":
        return _take_answers(workspace, policy, shard, rows, key, step)
    if shard.dataset_answers == "replaced":
        rows = [row | {"thread": without_answer(row["thread"]).to_json()} for row in rows]

    # Render the prompts. Rows that occurred earlier in the step continue the numbers of their completions.
    renderer = renderer_of(store, shard.base)
    repetitions = shard.repetitions or (0,) * len(rows)
    rows = [row | {"first": times * shard.completions} for row, times in zip(rows, repetitions, strict=True)]
    limit = prompt_limit(workspace, shard.base, shard.max_prompt_tokens, sampling)
    name_row = partial(row_name, store, shard.dataset)
    prompts = render_prompts(renderer, rows, limit, shard.truncation, name_row)

    # Sample each completion with its own seed, so that its randomness does not depend on its place in the shard.
    jobs = []
    for row, prompt in prompts:
        for number in range(row["first"], row["first"] + shard.completions):
            jobs.append((row, prompt, number))
    seeds = [workspace.seed_for(policy.stage, step, row["id"], number) for row, _, number in jobs]
    failpoint("rollout.sampling")
    request = generate_request(policy, [prompt for _, prompt, _ in jobs], seeds, sampling)
    segmented: list[SegmentedCompletion] | None = None
    tokens_by_policy: dict[str, int] | None = None
    parents = [policy.uri, shard.dataset.uri]
    if shard.segment_seconds is None:
        with timed("rollout"):
            completions = await workspace.connect().generate(request, epoch=workspace.epoch)
    else:
        segments = ShardSegments(workspace, policy, shard, step=step)
        segmented = await segments.sample(request)
        tokens_by_policy = segments.tokens_by_policy
        samplers = [uri for uri in tokens_by_policy if uri != policy.uri]
        parents += [*samplers, *(ref.uri for ref in segments.committed)]
        completions = [completion.completion() for completion in segmented]

    # Commit them, with the counts that the metrics of the step read.
    table = rollout_table(renderer, policy, jobs, seeds, completions, segmented)
    log_work("shard", stage=policy.stage, step=step, shard=shard.index)
    with timed("storage"):
        return commit_table(
            store,
            key,
            table,
            kind="rollouts",
            parents=parents,
            provenance=workspace.provenance,
            extra=_counts(shard, len(rows) - len(prompts), completions, tokens_by_policy, sampling),
        )


def _take_answers(
    workspace: Workspace, policy: PolicyRef, shard: PromptShard, rows: list[dict[str, Any]], key: str, step: int
) -> ArtifactRef:
    """Commits the answers of the dataset's rows as completions that no policy sampled: their logprobs are 0, and they
    have no seed.

    Raises BadSpec for an answer without tokens, SampleTooLong for a prompt of more than max_prompt_tokens, and for a
    row that the model, or the limit of a forward pass, cannot hold."""
    store = workspace.open_store()
    renderer = renderer_of(store, shard.base)
    limit = shortest(context_length_of(store, shard.base), workspace.max_tokens)
    jobs: list[tuple[dict[str, Any], TokenSequence, int]] = []
    answers: list[Completion] = []
    for row, times in zip(rows, shard.repetitions or (0,) * len(rows), strict=True):
        # Only the last turn is trained; its tokens end with that of the end of a turn.
        thread = StringThread.from_json(str(row["thread"]))
        last = len(thread.turns) - 1
        whole = renderer.sequence(renderer.tokenize(thread.with_weight_assistant_turns_from_index(last)))
        places = np.flatnonzero(whole.loss_mask)
        name = f"prompt {row['id']} ({row_name(store, shard.dataset, row['index'])})"
        if not len(places):
            raise BadSpec(f"the answer of {name} has no tokens; give answers, or leave the row out")
        start, end = int(places[0]), int(places[-1]) + 1
        if shard.max_prompt_tokens is not None and start > shard.max_prompt_tokens:
            raise SampleTooLong(
                f"{name} has {start} tokens, at most {shard.max_prompt_tokens} are allowed (max_prompt_tokens); set "
                "truncation to drop, or raise the limit"
            )
        if limit is not None and end > limit:
            raise SampleTooLong(
                f"the answer of {name} ends at token {end}, at most {limit} are allowed (the model's context, or "
                "max_batch_size); shorten it, or leave the row out"
            )
        answer = whole.token_ids[start:end].tolist()
        prompt = TokenSequence(whole.token_ids[:start], np.zeros(start, bool), images=whole.images)
        thread_json = without_answer(row["thread"]).to_json()
        jobs.append((row | {"thread": thread_json}, prompt, times))
        answers.append(Completion(answer, [0.0] * len(answer), "eos"))
    table = rollout_table(renderer, policy, jobs, None, answers)
    log_work("shard", stage=policy.stage, step=step, shard=shard.index)
    counts: dict[str, JsonValue] = {"prompts": len(rows), "dataset_answers": True}
    counts |= {"dropped": 0, "completion_tokens": 0, "truncated": 0, "logprob_sum": 0.0}
    with timed("storage"):
        return commit_table(
            store, key, table, kind="rollouts", parents=[policy.uri, shard.dataset.uri],
            provenance=workspace.provenance, extra=counts,
        )  # fmt: skip


def without_answer(thread_json: str) -> StringThread:
    """The thread of a row without the answer at its end. Raises BadSpec if it does not end with one."""
    thread = StringThread.from_json(thread_json)
    if thread.completion() is None or len(thread.turns) < 2:
        raise BadSpec(
            f"a row of the dataset has the turns {[turn.role for turn in thread.turns]}, and with on_policy below 1 "
            "each row needs a prompt and an answer at its end: give prompts with completions, or on_policy=1"
        )
    return type(thread)(thread.turns[:-1], thread.metadata)


def _counts(
    shard: PromptShard,
    dropped: int,
    completions: list[Completion],
    tokens_by_policy: dict[str, int] | None,
    sampling: SamplingParams,
) -> dict[str, JsonValue]:
    """What the manifest of a shard says of its rows. `dropped`: the number of prompts that were dropped."""
    counts: dict[str, JsonValue] = {
        "prompts": len(shard.rows),
        "dropped": dropped,
        "completion_tokens": sum(len(completion.token_ids) for completion in completions),
        "truncated": sum(completion.stop_reason == "length" for completion in completions),
        "logprob_sum": math.fsum(chain.from_iterable(completion.logprobs for completion in completions)),
        "sampling": sampling.model_dump(mode="json", exclude_defaults=True),
    }
    if shard.resampled:
        counts["resampled"] = True
    if tokens_by_policy is not None:
        counts["policies"] = dict(tokens_by_policy)
    return counts


def generate_request(
    policy: PolicyRef, prompts: list[TokenSequence], seeds: list[int], sampling: SamplingParams
) -> GenerateRequest:
    """The request for one completion of each prompt."""
    # Each completion of a prompt has the same object as its prompt, which is converted once.
    lists = {id(prompt): prompt.token_ids.tolist() for prompt in prompts}
    prompt_ids = [lists[id(prompt)] for prompt in prompts]
    images = images_or_none(prompt.images for prompt in prompts)
    return GenerateRequest(policy, prompt_ids, seeds, sampling, images=images)


def prompt_limit(
    workspace: Workspace, base: ArtifactRef, max_prompt_tokens: int | None, sampling: SamplingParams
) -> int | None:
    """The largest number of tokens in a prompt: as configured, and such that prompt and completion fit the model's
    context and the max_batch_size that the model was spawned with. None: no limit."""
    context = context_length_of(workspace.open_store(), base)
    longest = shortest(context, workspace.max_tokens)
    if longest is None:
        return max_prompt_tokens
    # Every completion may take all of max_new_tokens, so the prompt gets the rest.
    room = longest - sampling.max_new_tokens
    if room < 1:
        limit_name = "context" if longest == context else "max_batch_size"
        raise BadSpec(
            f"max_new_tokens={sampling.max_new_tokens} leaves no room for a prompt in the model's {limit_name} of "
            f"{longest} tokens; lower it (model.max_gen_len)"
        )
    return shortest(room, max_prompt_tokens)


def render_prompts(
    renderer: Renderer, rows: list[dict[str, Any]], limit: int | None, truncation: Truncation, name_row: NameRow
) -> list[tuple[dict[str, Any], TokenSequence]]:
    """Each row with the tokens and images of its prompt. A prompt of more than `limit` tokens is refused, truncated or
    dropped.

    Raises:
        SampleTooLong: a prompt is too long and `truncation` is error.
        UnsupportedFragment: a prompt that would be truncated has images.
    """
    rendered = []
    for row in rows:
        prompt = renderer.prompt_sequence(StringThread.from_json(str(row["thread"])))
        if limit is None or len(prompt.token_ids) <= limit:
            rendered.append((row, prompt))
            continue
        if truncation == "drop":
            continue
        problem = (
            f"prompt {row['id']} ({name_row(row['index'])}) has {len(prompt.token_ids)} tokens, at most {limit} are "
            "allowed"
        )
        if truncation == "error":
            raise SampleTooLong(
                f"{problem} (max_prompt_tokens, or the model's context or max_batch_size less max_new_tokens); set "
                "truncation to left, right or drop, or raise the limit"
            )
        if prompt.images:
            raise UnsupportedFragment(
                f"{problem}, and it has images, which cannot be truncated; set truncation to drop or error, or raise "
                "max_prompt_tokens"
            )
        # left keeps the last tokens, right keeps the first ones
        ids = prompt.token_ids[-limit:] if truncation == "left" else prompt.token_ids[:limit]
        rendered.append((row, replace(prompt, token_ids=ids, loss_mask=np.zeros(len(ids), bool))))
    return rendered


def rollout_table(
    renderer: Renderer,
    policy: PolicyRef,
    jobs: list[tuple[dict[str, Any], TokenSequence, int]],
    seeds: list[int] | None,
    completions: list[Completion],
    segmented: list[SegmentedCompletion] | None = None,
) -> pa.Table:
    """The rollouts table: a row per completion, with its tokens and its text. If the model takes images, the rows also
    have the prompt's images.

    Args:
        jobs: (dataset row, prompt, number of the completion) of each completion.
        seeds: None: the completions were not sampled.
        segmented: which policy sampled which tokens. None: `policy` sampled all of them.
    """
    prompts = [prompt for _, prompt, _ in jobs]
    answers = [completion.token_ids for completion in completions]
    # The tokens of prompt and completion, one row after the other, and their numbers in the same order.
    tokens: list[Any] = [np.zeros(0, np.int32)]
    lengths: list[int] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens += (prompt.token_ids, np.asarray(answer, np.int32))
        lengths += (len(prompt.token_ids), len(answer))
    offsets = pa.array(np.cumsum([0, *lengths])[::2], pa.int32())
    is_sampled = np.repeat(np.tile([False, True], len(jobs)), lengths)
    columns: dict[str, Any] = {
        "prompt_index": [row["index"] for row, _, _ in jobs],
        "prompt_id": [row["id"] for row, _, _ in jobs],
        "completion": [number for _, _, number in jobs],
        "segment": np.zeros(len(jobs), np.int32),
        "first_turn": np.zeros(len(jobs), np.int32),
        "token_ids": pa.ListArray.from_arrays(offsets, np.concatenate(tokens)),
        "loss_mask": pa.ListArray.from_arrays(offsets, is_sampled),
        "logprobs": [completion.logprobs for completion in completions],
        "turn_tokens": [[len(answer)] for answer in answers],
        "stop_reasons": [[completion.stop_reason] for completion in completions],
        "thread": [row["thread"] for row, _, _ in jobs],
        "policy_state": [policy.state] * len(jobs),
        "seed": [None] * len(jobs) if seeds is None else seeds,
        "text": [renderer.decode_completion(answer) for answer in answers],
    }
    # Only tables of such models have the column `images`, so that other tables need not store empty lists.
    if renderer.tokenizer.images:
        columns["images"] = [images_to_rows(prompt.images) for prompt in prompts]
    if segmented is not None:
        columns["policy_states"] = [[policy.state for policy in completion.policies] for completion in segmented]
        columns["policy_tokens"] = [completion.lengths for completion in segmented]
        columns["policy_state"] = [states[0] for states in columns["policy_states"]]  # the oldest one
    schema = table_schema("rollouts", columns)
    return pa.table([pa.array(columns[field.name], field.type) for field in schema], schema=schema)


def answered_threads(rows: Sequence[Mapping[str, object]]) -> list[StringThread]:
    """The conversations that a grader sees: the prompt, and the completion as the assistant's turn."""
    # The completions of a prompt have the same thread, which is parsed once.
    prompts: dict[str, StringThread] = {}
    threads = []
    for row in rows:
        prompt_json = str(row["thread"])
        if prompt_json not in prompts:
            prompts[prompt_json] = StringThread.from_json(prompt_json)
        threads.append(prompts[prompt_json].assistant(str(row["text"])))
    return threads
