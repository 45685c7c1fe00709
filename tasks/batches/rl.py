"""Plain code behind the batch tasks: from graded rollouts, or from completions, to trainable rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import repeat
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import JsonValue

from engine.errors import BadSpec, PermanentEngineError
from engine.models.images import images_from_rows, images_to_rows
from engine.protocol import LogprobsRequest, TokenSequence
from engine.text.stored_models import renderer_of
from engine.text.threads import StringThread
from engine.workspace import Workspace
from storage.chain.records import OldLogprobs, PolicyRef
from storage.serialization import Frozen
from storage.store import keys
from storage.store.artifacts import ArtifactRef, find_artifact, require_parent
from storage.store.objects import ObjectStore
from storage.store.tables import TableWriter, commit_table, read_rows, table_schema
from tasks.batches.columns import Grades, batch_table, gap_of, policy_gap, trained_lengths, with_lists
from tasks.batches.truncation import ANY_LENGTH, LengthPlan, cut
from tasks.credit.rewards import (
    BATCH_ESTIMATORS,
    KL_OF_GAP,
    Overlong,
    RewardKL,
    less_group_mean,
    reinforce_plus_plus,
    whiten,
)
from tasks.datasets.naming import row_name
from tasks.reports.clock import timed
from tasks.sampling.shards import read_tables

AdvantageEstimator = Literal[
    "group", "group_sample_std", "centred", "leave_one_out", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
]
ROLLOUT_COLUMNS = ("prompt_id", "completion", "prompt_ids", "completion_ids", "logprobs", "images")
"""What a batch takes of its rollouts; images where the model takes them."""
CHUNK_TOKENS = 1 << 20
"""Tokens that are scored and written together: what a batch takes of the coordinator's memory, and of one call to the
engine, does not grow with the batch."""


class BatchPlan(Frozen):
    """What a row of an RL batch carries."""

    reference: PolicyRef | None
    """Whose logprobs the KL term compares with; None when its coefficient is 0."""
    advantage_estimator: AdvantageEstimator = "group"
    old_logprobs: OldLogprobs = "trainer"
    temperature: float = 1.0
    reward_kl: RewardKL | None = None
    """A KL penalty in the reward; it needs `reference`."""
    overlong: Overlong | None = None
    mask_truncated: bool = False
    """Leave answers that were cut at their longest out of the loss; their rewards count in their groups."""
    drop_equal_groups: bool = False
    max_staleness: int = 0
    """Of the policy that sampled, in steps."""

    @property
    def rules(self) -> dict[str, JsonValue]:
        """What a batch's manifest says of the completions that it may lack, and of the policy that sampled them."""
        given = self.model_dump(include={"mask_truncated", "drop_equal_groups", "max_staleness"}, exclude_defaults=True)
        return {"rules": given} if given else {}

    @property
    def whole(self) -> bool:
        """Whether the advantages depend on logprobs, or on the whole batch: it is then held in memory."""
        return self.reward_kl is not None or self.advantage_estimator in BATCH_ESTIMATORS


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
            return require_parent(found, policy.uri)
        columns = ["prompt_id", "completion", "reward", "status"]
        grades = Grades(pa.concat_tables(read_tables(store, graded, columns)))
        shape_rewards(store, rollouts, grades, plan)
        unknown_N = np.zeros(len(grades.rewards), np.float32)
    advantages_N = unknown_N if plan.whole else grades.advantages(plan.advantage_estimator)
    held: list[pa.Table] = []
    extra: dict[str, JsonValue] = {}
    with TableWriter("batch") as writer:
        gap, gap_tokens = 0.0, 0
        for shards in kept_chunks(store, rollouts, graded, grades, advantages_N):
            table = await scored(workspace, policy, shards, plan)
            total, tokens = gap_of(table)
            gap, gap_tokens = gap + total, gap_tokens + tokens
            if math.isnan(gap):
                raise PermanentEngineError(
                    f"step {step + 1}: {policy.uri} gives NaN for the logprobs of its own completions: an earlier "
                    "update made its weights overflow. Lower optimizer.lr, and fork the run from a step before that"
                )
            if plan.whole:
                held.append(table)
                continue
            with timed("storage"):
                writer.write(table)
        if held:
            table, extra = batch_level_advantages(pa.concat_tables(held), grades, plan)
            with timed("storage"):
                writer.write(table)
        check_gradable(bool(writer.rows), grades, step)
        with timed("storage"):
            committed = writer.commit(
                store,
                key,
                parents=(policy.uri, *(ref.uri for ref in (*rollouts, *graded))),
                provenance=workspace.provenance,
                extra={
                    "prompts": grades.prompts_kept(),
                    "logprob_gap": gap / gap_tokens if gap_tokens else None,
                    **plan.rules,
                    **extra,
                },
            )
    return require_parent(committed, policy.uri)


def check_gradable(any_kept: bool, grades: Grades, step: int) -> None:
    """Raises BadSpec when nothing of a step is left to train."""
    if not any_kept:
        raise BadSpec(
            f"step {step} has no gradable completion: {len(grades.rewards)} were sampled and every one was empty, "
            "masked, ignored or left out by the rules of the batch; look at the reasons in its graded table"
        )


def shape_rewards(store: ObjectStore, rollouts: list[ArtifactRef], grades: Grades, plan: BatchPlan) -> None:
    """What is known of the answers' lengths and groups before any logprob."""
    if plan.drop_equal_groups:  # by the grades themselves, as informative_prompts counts them
        grades.mask_equal_groups()
    if plan.overlong or plan.mask_truncated:
        tables = list(read_tables(store, rollouts, ["completion_ids", "stop_reason"]))
        if plan.overlong:
            lengths = [pc.list_value_length(table["completion_ids"]).to_numpy() for table in tables]
            grades.shaped_N -= plan.overlong.of(np.concatenate(lengths))
        if plan.mask_truncated:
            grades.masked_N |= np.concatenate([pc.equal(t["stop_reason"], "length").to_numpy() for t in tables])


def batch_level_advantages(table: pa.Table, grades: Grades, plan: BatchPlan) -> tuple[pa.Table, dict[str, JsonValue]]:
    """The batch with advantages that need all of it, and what its manifest says of the KL in the reward: `reward_kl`,
    the mean over tokens, nats."""
    lengths_N, rows = trained_lengths(table), grades.kept_rows
    extra: dict[str, JsonValue] = {}
    penalties_T = np.zeros(int(lengths_N.sum()))
    if plan.reward_kl is not None:
        old = "old_logprobs" if plan.old_logprobs == "trainer" else "sampler_logprobs"
        kl_T = KL_OF_GAP[plan.reward_kl.estimator](policy_gap(table, old))
        penalties_T, extra = plan.reward_kl.beta * kl_T, {"reward_kl": float(kl_T.mean())}
    if plan.advantage_estimator == "reinforce_plus_plus":
        advantages_T = reinforce_plus_plus(grades.shaped_N[rows], penalties_T, lengths_N)
        return with_lists(table, "advantages", advantages_T), extra
    grades.shaped_N[rows] -= np.add.reduceat(penalties_T, np.cumsum(lengths_N) - lengths_N)
    if plan.advantage_estimator == "reinforce_plus_plus_baseline":
        valid = ~np.isnan(grades.shaped_N)
        prompts, shaped = grades.prompts_N, grades.shaped_N
        centred_N = np.full(len(shaped), np.nan)
        centred_N[valid] = less_group_mean(shaped[valid], prompts[valid])
        advantages_T = whiten(np.repeat(centred_N[rows], lengths_N))
    else:
        advantages_T = np.repeat(grades.advantages(plan.advantage_estimator)[rows], lengths_N)
    return with_lists(table, "advantages", advantages_T), extra


def informative_prompts(store: ObjectStore, graded: list[ArtifactRef]) -> int:
    """Prompts whose valid rewards differ: the others give no advantage."""
    table = pa.concat_tables(read_tables(store, graded, ["prompt_id", "reward", "status"]))
    valid = table.filter(pc.equal(table["status"], "ok")).group_by("prompt_id")
    found = valid.aggregate([("reward", "min"), ("reward", "max")])
    return pc.sum(pc.not_equal(found["reward_min"], found["reward_max"])).as_py() or 0


def kept_chunks(
    store: ObjectStore,
    rollouts: list[ArtifactRef],
    graded: list[ArtifactRef],
    grades: Grades,
    advantages_N: np.ndarray,
) -> Iterator[list[dict[str, pa.Array]]]:
    """The kept rows of whole shards, in their order, about CHUNK_TOKENS at a time."""
    tables = read_tables(store, rollouts, ROLLOUT_COLUMNS)
    start, chunk, tokens = 0, [], 0
    for ref, grade_ref in zip(rollouts, graded, strict=True):
        with timed("storage"):
            shard = next(tables)
        kept = grades.kept(shard, start, advantages_N)
        if kept is None or shard.num_rows != grade_ref.rows:
            raise BadSpec(f"{grade_ref.key} does not grade the rows of {ref.key} in their order")
        start += shard.num_rows
        chunk.append(kept)
        tokens += len(kept["token_ids"].flatten())
        if tokens >= CHUNK_TOKENS:
            yield chunk
            chunk, tokens = [], 0
    if chunk:
        yield chunk


async def scored(
    workspace: Workspace, policy: PolicyRef, shards: list[dict[str, pa.Array]], plan: BatchPlan
) -> pa.Table:
    """Some shards' rows as one table, with the logprobs that the loss compares with."""
    columns = {name: pa.concat_arrays([shard[name] for shard in shards]) for name in shards[0]}
    policies = (policy if plan.old_logprobs == "trainer" else None, plan.reference)
    sequences = []
    if any(policies) and len(columns["group"]):
        sequences = sequences_of(columns)
    old, reference = [
        None if one is None else (await _logprobs(workspace, one, sequences, plan.temperature) if sequences else [])
        for one in policies
    ]
    return batch_table(columns, old, reference)


def sequences_of(table: pa.Table | Mapping[str, pa.Array]) -> list[TokenSequence]:
    """Rows of a batch, as the engine scores them."""
    names = table.column_names if isinstance(table, pa.Table) else table
    lists = [table[name].to_pylist() for name in ("token_ids", "weights", "group")]
    images = map(images_from_rows, table["images"].to_pylist() if "images" in names else repeat(None, len(lists[0])))
    return [TokenSequence(*row) for row in zip(*lists, images, strict=True)]


async def _logprobs(
    workspace: Workspace, policy: PolicyRef, sequences: list[TokenSequence], temperature: float
) -> list[list[float]]:
    with timed("train"):
        request = LogprobsRequest(policy, sequences, temperature=temperature, max_tokens=workspace.max_tokens)
        return await workspace.connect().logprobs(request, epoch=workspace.epoch)


async def completion_batch(
    workspace: Workspace,
    policy: PolicyRef,
    base: ArtifactRef,
    dataset: ArtifactRef,
    rows: list[int],
    *,
    lengths: LengthPlan = ANY_LENGTH,
    step: int,
) -> ArtifactRef:
    """The committed batch of an SFT step; its manifest counts the conversations that were cut or dropped. Raises
    SampleTooLong, and BadSpec where there is nothing to learn."""
    store = workspace.open_store()
    key = keys.step_artifact(policy.run, policy.stage, step, "batch", 0)
    with timed("storage"):
        found = find_artifact(store, key)
        if found is not None:
            return require_parent(found, policy.uri)
        records = read_rows(store, dataset, rows)
    renderer = renderer_of(store, base)
    schema = table_schema("batch", ["images"] if renderer.tokenizer.images else [])
    empty: dict[str, Any] = {name: None for name in schema.names}
    limit = lengths.limit(workspace, base)
    table_rows, cuts, dropped = [], 0, 0
    for record in records:
        whole = renderer.sequence(renderer.tokenize(StringThread.from_json(record["thread"])))
        kept = cut(whole, lengths, limit, name=partial(row_name, store, dataset, record["index"]))
        if kept is None:
            dropped += 1
            continue
        cuts += kept is not whole
        row = {"group": record["id"], "completion": 0, "token_ids": kept.token_ids, "weights": kept.weights}
        table_rows.append(empty | row | ({"images": images_to_rows(kept.images)} if "images" in schema.names else {}))
    if not any(weight > 0 for row in table_rows for weight in row["weights"]):
        raise BadSpec(
            f"step {step + 1}: none of its {len(rows)} rows, such as {row_name(store, dataset, rows[0])}, has an "
            "assistant turn to learn" + _why_nothing(cuts, dropped)
        )
    with timed("storage"):
        committed = commit_table(
            store,
            key,
            pa.Table.from_pylist(table_rows, schema=schema),
            kind="batch",
            parents=(policy.uri, dataset.uri),
            provenance=workspace.provenance,
            extra={"prompts": len({row["group"] for row in table_rows}), "logprob_gap": None}
            | {name: count for name, count in (("cut", cuts), ("dropped", dropped)) if count},
        )
    return require_parent(committed, policy.uri)


def _why_nothing(cuts: int, dropped: int) -> str:
    """What to do about a batch without anything to learn."""
    if not cuts and not dropped:
        return "; SFT needs completions"
    return f", and {cuts} of them were cut, {dropped} dropped; raise algorithm.max_tokens (max_batch_size)"
