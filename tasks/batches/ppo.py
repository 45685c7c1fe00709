"""Builds PPO's batch: graded rollouts with an advantage and a return for every token.

Axes: N completion · T trained token of all completions
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import pyarrow as pa

from engine.protocol import LogprobsRequest
from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.store import keys
from storage.store.artifacts import ArtifactRef
from storage.store.tables import TableWriter
from tasks.batches.advantages import advantages_and_returns, whiten
from tasks.batches.columns import Grades, LogprobGap, trained_lengths, with_token_column
from tasks.batches.rl import apply_rules, check_batch_rows, kl_per_token, score_shards, sequences_of, trained_chunks
from tasks.committed import commit_once
from tasks.plans import BatchPlan, ValuePlan
from tasks.reports.clock import timed
from tasks.sampling.shards import read_tables
from tasks.task_runs import durable_task


@durable_task("prepare", "batch-{step:06d}")
async def prepare_ppo_batch(
    workspace: Workspace,
    policy: PolicyRef,
    rollouts: list[ArtifactRef],
    graded: list[ArtifactRef],
    plan: BatchPlan,
    values: ValuePlan,
    *,
    step: int,
) -> ArtifactRef:
    """The committed `batch` table of a PPO step: one row per completion with a grade, with an advantage and a return at
    every token. The reward of a token is minus its KL penalty (`plan.reward_kl`), plus the completion's grade on its
    last token."""
    key = keys.step_artifact(policy.run, policy.stage, step, "batch", 0)
    return await commit_once(
        workspace, key, lambda: _build_batch(workspace, policy, rollouts, graded, plan, values, key, step),
        parent=policy.uri,
    )  # fmt: skip


async def _build_batch(
    workspace: Workspace,
    policy: PolicyRef,
    rollouts: list[ArtifactRef],
    graded: list[ArtifactRef],
    plan: BatchPlan,
    values: ValuePlan,
    key: str,
    step: int,
) -> ArtifactRef:
    """Builds the batch of a PPO step from graded completions and commits it."""
    store = workspace.open_store()
    with timed("storage"):
        grades = Grades(pa.concat_tables(read_tables(store, graded, ["prompt_id", "completion", "reward", "status"])))
        apply_rules(store, rollouts, grades, plan)

    # The rows start with zeros as advantages. GAE replaces them, for it needs the values of all tokens of a row.
    no_advantages_N = np.zeros(len(grades.rewards), np.float32)
    tables: list[pa.Table] = []
    first = 0
    for columns in trained_chunks(store, rollouts, graded, grades, no_advantages_N):
        table = await score_shards(workspace, policy, columns, plan, step=step)
        rows = grades.batch_rows[first : first + table.num_rows]
        first += table.num_rows
        old_values = await values_before(workspace, values.value, table)
        tables.append(credited(table, grades.rewards_after_penalty_N[rows], old_values, plan, values))
    check_batch_rows(first, grades, step)

    # Commit all rows as one batch.
    parents = (policy.uri, values.value.uri, *(ref.uri for ref in (*rollouts, *graded)))
    prompts = grades.prompts_in_batch()
    return commit_credited(workspace, policy, key, tables, plan, values, parents=parents, prompts=prompts)


def commit_credited(
    workspace: Workspace,
    policy: PolicyRef,
    key: str,
    tables: list[pa.Table],
    plan: BatchPlan,
    values: ValuePlan,
    *,
    parents: tuple[str, ...],
    prompts: int,
) -> ArtifactRef:
    """Commits these rows as one batch under `key`, with whitened advantages if `values` asks for them."""
    # Whitening needs the advantages of the whole batch, so it cannot be done per chunk.
    batch = pa.concat_tables(tables)
    if values.whiten_advantages:
        advantages_T = batch["advantages"].combine_chunks().flatten().to_numpy()
        batch = with_token_column(batch, "advantages", whiten(advantages_T))
    gap = LogprobGap()
    gap.add(batch)
    with TableWriter("batch") as writer, timed("storage"):
        writer.write(batch)
        return writer.commit(
            workspace.open_store(),
            key,
            parents=parents,
            provenance=workspace.provenance,
            extra={"prompts": prompts, "logprob_gap": gap.mean, **plan.rules},
        )


def credited(
    table: pa.Table, rewards_N: np.ndarray, values_T: np.ndarray, plan: BatchPlan, values: ValuePlan
) -> pa.Table:
    """Adds advantages, returns and old values to the batch. The reward of a row is on its last trained token."""
    lengths_N = trained_lengths(table)
    rewards_T = -penalties(table, plan)
    # The cumulative sums of the lengths, minus 1, are the indices of the last tokens.
    rewards_T[np.cumsum(lengths_N) - 1] += rewards_N
    return with_credit(table, rewards_T, values_T, lengths_N, values)


def penalties(table: pa.Table, plan: BatchPlan) -> np.ndarray:
    """(T,) float64: the KL penalty of each trained token; zeros without a KL penalty in the reward."""
    if plan.reward_kl is None:
        return np.zeros(int(trained_lengths(table).sum()))
    return plan.reward_kl.beta * kl_per_token(table, plan.reward_kl, plan.old_logprobs)


def with_credit(
    table: pa.Table, rewards_T: np.ndarray, values_T: np.ndarray, lengths_N: np.ndarray, values: ValuePlan
) -> pa.Table:
    """Adds advantages, returns and old values to the batch, from the reward of each trained token. `lengths_N` are the
    trained tokens of each sequence over which GAE runs; such a sequence may be several rows."""
    advantages_T, returns_T = advantages_and_returns(
        rewards_T, values_T, lengths_N, gamma=values.gamma, lam=values.lam
    )
    if values.returns == "advantages":
        returns_T = advantages_T + values_T
    for name, column_T in (("advantages", advantages_T), ("returns", returns_T), ("old_values", values_T)):
        table = with_token_column(table, name, column_T)
    return table


async def values_before(workspace: Workspace, value: PolicyRef, table: pa.Table) -> np.ndarray:
    """(T,) float64: the value before each trained token."""
    sequences = sequences_of(table)
    with timed("train"):
        request = LogprobsRequest(value, sequences, max_tokens=workspace.max_tokens)
        values_N = await workspace.connect().values(request, epoch=workspace.epoch)
    return np.array(list(chain.from_iterable(values_N)), dtype=np.float64)
