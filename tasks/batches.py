"""Plain code behind the batch tasks: from graded rollouts, or from completions, to trainable rows."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Literal

import pyarrow as pa

from engine.errors import BadSpec
from engine.protocol import LogprobsRequest, TokenSequence
from engine.text.threads import StringThread
from engine.text.tokenizers import renderer_of
from engine.workspace import Workspace
from storage import keys
from storage.artifacts import ArtifactRef, find_artifact, made_from
from storage.chain import OldLogprobs, PolicyRef
from storage.models import Frozen
from storage.objects import ObjectStore
from storage.tables import SCHEMAS, RowReader, commit_table, read_table
from tasks.advantages import ESTIMATORS
from tasks.clock import timed

AdvantageEstimator = Literal["group", "group_sample_std", "centred", "leave_one_out"]


class BatchPlan(Frozen):
    """What a row of an RL batch carries."""

    reference: PolicyRef | None
    """Whose logprobs the KL term compares with; None when its coefficient is 0."""
    advantage_estimator: AdvantageEstimator = "group"
    old_logprobs: OldLogprobs = "trainer"
    temperature: float = 1.0


async def rollout_batch(
    workspace: Workspace,
    policy: PolicyRef,
    rollouts: list[ArtifactRef],
    graded: list[ArtifactRef],
    plan: BatchPlan,
    *,
    step: int,
) -> ArtifactRef:
    """The committed batch of an RL step, prepared now if nobody did before."""
    store = workspace.open_store()
    key = keys.step_artifact(policy.run, policy.stage, step, "batch", 0)
    with timed("storage"):
        found = find_artifact(store, key)
        if found is not None:
            return made_from(found, policy.uri)
        rows = _joined(store, rollouts, graded)
    kept = [row for row in with_advantages(rows, plan.advantage_estimator) if row["completion_ids"]]
    if not kept:
        raise BadSpec(
            f"step {step} has no gradable completion: {len(rows)} were sampled and every one was empty, masked or "
            "ignored; look at the reasons in its graded table"
        )
    table = await _batch_table(workspace, policy, kept, plan)
    with timed("storage"):
        committed = commit_table(
            store,
            key,
            table,
            kind="batch",
            parents=(policy.uri, *(ref.uri for ref in (*rollouts, *graded))),
            provenance=workspace.provenance,
        )
    return made_from(committed, policy.uri)


async def _batch_table(
    workspace: Workspace, policy: PolicyRef, kept: list[dict[str, Any]], plan: BatchPlan
) -> pa.Table:
    """The rows of a batch: tokens, advantages, and the logprobs that its loss compares with."""
    sequences = [
        TokenSequence(
            row["prompt_ids"] + row["completion_ids"],
            [0.0] * len(row["prompt_ids"]) + [1.0] * len(row["completion_ids"]),
            group=row["prompt_id"],
        )
        for row in kept
    ]
    old = await _logprobs(workspace, policy, sequences, plan.temperature) if plan.old_logprobs == "trainer" else None
    reference = await _logprobs(workspace, plan.reference, sequences, plan.temperature) if plan.reference else None
    rows = [
        {
            "group": row["prompt_id"],
            "completion": row["completion"],
            "token_ids": sequence.token_ids,
            "weights": sequence.weights,
            "advantages": [row["advantage"]] * len(row["completion_ids"]),
            "old_logprobs": old[i] if old else None,
            "reference_logprobs": reference[i] if reference else None,
            "sampler_logprobs": row["logprobs"],
            "reward": row["reward"],
        }
        for i, (row, sequence) in enumerate(zip(kept, sequences, strict=True))
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMAS["batch"])


async def _logprobs(
    workspace: Workspace, policy: PolicyRef, sequences: list[TokenSequence], temperature: float
) -> list[list[float]]:
    with timed("train"):
        request = LogprobsRequest(policy, sequences, temperature=temperature)
        return await workspace.connect().logprobs(request, epoch=workspace.epoch)


def _joined(store: ObjectStore, rollouts: list[ArtifactRef], graded: list[ArtifactRef]) -> list[dict[str, Any]]:
    """Rollouts with their grades, in the order of the shards."""
    rows = []
    for rollout_ref, graded_ref in zip(rollouts, graded, strict=True):
        sampled = read_table(store, rollout_ref).to_pylist()
        grades = read_table(store, graded_ref, columns=["prompt_id", "completion", "reward", "status"]).to_pylist()
        for row, grade in zip(sampled, grades, strict=True):
            if (row["prompt_id"], row["completion"]) != (grade["prompt_id"], grade["completion"]):
                raise BadSpec(f"{graded_ref.key} does not grade the rows of {rollout_ref.key} in their order")
            rows.append(row | {"reward": grade["reward"], "status": grade["status"]})
    return rows


def with_advantages(rows: list[dict[str, Any]], estimator: AdvantageEstimator) -> list[dict[str, Any]]:
    """The rows that have a valid grade, each with its advantage over its prompt's group. One bad sample never drops
    its group: a masked row leaves only itself out."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["prompt_id"]].append(row)
    for members in groups.values():
        rewards = [row["reward"] if row["status"] == "ok" else None for row in members]
        for row, advantage in zip(members, ESTIMATORS[estimator](rewards), strict=True):
            row["advantage"] = advantage
    return [row for row in rows if row["advantage"] is not None]


async def completion_batch(
    workspace: Workspace, policy: PolicyRef, base: ArtifactRef, dataset: ArtifactRef, rows: list[int], *, step: int
) -> ArtifactRef:
    """The committed batch of an SFT step."""
    store = workspace.open_store()
    key = keys.step_artifact(policy.run, policy.stage, step, "batch", 0)
    with timed("storage"):
        found = find_artifact(store, key)
        if found is not None:
            return made_from(found, policy.uri)
        records = RowReader(store, dataset).rows(rows)
    renderer = renderer_of(store, base)
    empty: dict[str, Any] = {name: None for name in SCHEMAS["batch"].names}
    table_rows = []
    for record in records:
        tokens, weights = renderer.serialize(renderer.tokenize(StringThread.from_json(record["thread"])))
        table_rows.append(
            empty | {"group": record["id"], "completion": 0, "token_ids": tokens, "weights": weights}
        )
    if not any(weight > 0 for row in table_rows for weight in row["weights"]):
        raise BadSpec(
            f"step {step}: none of the rows {rows[:5]}… has an assistant turn to learn; SFT needs completions"
        )
    with timed("storage"):
        committed = commit_table(
            store,
            key,
            pa.Table.from_pylist(table_rows, schema=SCHEMAS["batch"]),
            kind="batch",
            parents=(policy.uri, dataset.uri),
            provenance=workspace.provenance,
        )
    return made_from(committed, policy.uri)
