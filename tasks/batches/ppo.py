"""Plain code behind PPO's batch: graded rollouts with an advantage and a return at every token.

Axes: N completion · T trained token of all completions
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from engine.protocol import LogprobsRequest
from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.serialization import Frozen
from storage.store import keys
from storage.store.artifacts import ArtifactRef, find_artifact, require_parent
from storage.store.tables import TableWriter
from tasks.batches.columns import Grades, gap_of, policy_gap, trained_lengths, with_lists
from tasks.batches.rl import BatchPlan, check_gradable, kept_chunks, scored, sequences_of, shape_rewards
from tasks.credit.gae import advantages_and_returns
from tasks.credit.rewards import KL_OF_GAP, whiten
from tasks.reports.clock import timed
from tasks.sampling.shards import read_tables

Returns = Literal["rewards", "advantages"]


class ValuePlan(Frozen):
    """How the tokens of a batch are credited."""

    value: PolicyRef
    """Whose values are the baseline."""
    gamma: float = Field(1.0, gt=0, le=1)
    lam: float = Field(0.95, ge=0, le=1)
    returns: Returns = "rewards"
    """What a value should be: the discounted sum of the rewards, or the advantage plus the value."""
    whiten_advantages: bool = False
    """Over all tokens of the batch, which is then held in memory."""


async def value_batch(
    workspace: Workspace,
    policy: PolicyRef,
    rollouts: list[ArtifactRef],
    graded: list[ArtifactRef],
    plan: BatchPlan,
    values: ValuePlan,
    *,
    step: int,
) -> ArtifactRef:
    """The committed batch of a PPO step, prepared now if nobody did before. A token's reward is the KL penalty of
    `plan.reward_kl` off it, and the completion's grade on the last one."""
    store = workspace.open_store()
    key = keys.step_artifact(policy.run, policy.stage, step, "batch", 0)
    with timed("storage"):
        found = find_artifact(store, key)
        if found is not None:
            return require_parent(found, policy.uri)
        grades = Grades(pa.concat_tables(read_tables(store, graded, ["prompt_id", "completion", "reward", "status"])))
        shape_rewards(store, rollouts, grades, plan)
    nothing_N = np.zeros(len(grades.rewards), np.float32)
    tables: list[pa.Table] = []
    taken = 0
    for columns in kept_chunks(store, rollouts, graded, grades, nothing_N):
        table = await scored(workspace, policy, columns, plan)
        rows = grades.kept_rows[taken : taken + table.num_rows]
        taken += table.num_rows
        old_values = await values_before(workspace, values.value, table)
        tables.append(credited(table, grades.shaped_N[rows], old_values, plan, values))
    check_gradable(bool(tables), grades, step)
    parents = (policy.uri, values.value.uri, *(ref.uri for ref in (*rollouts, *graded)))
    prompts = grades.prompts_kept()
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
    """The batch of these credited rows, whitened if that was asked for, under `key`."""
    whole = pa.concat_tables(tables)
    if values.whiten_advantages:
        whole = with_lists(whole, "advantages", whiten(whole["advantages"].combine_chunks().flatten().to_numpy()))
    gap, tokens = gap_of(whole)
    with TableWriter("batch") as writer, timed("storage"):
        writer.write(whole)
        committed = writer.commit(
            workspace.open_store(),
            key,
            parents=parents,
            provenance=workspace.provenance,
            extra={"prompts": prompts, "logprob_gap": gap / tokens if tokens else None, **plan.rules},
        )
    return require_parent(committed, policy.uri)


def credited(
    table: pa.Table, rewards_N: np.ndarray, values_T: np.ndarray, plan: BatchPlan, values: ValuePlan
) -> pa.Table:
    """The batch with advantages, returns and old values; a row's reward is on its last trained token."""
    lengths_N = trained_lengths(table)
    rewards_T = -penalties(table, plan)
    rewards_T[np.cumsum(lengths_N) - 1] += rewards_N
    return with_credit(table, rewards_T, values_T, lengths_N, values)


def penalties(table: pa.Table, plan: BatchPlan) -> np.ndarray:
    """(T,) float64: what the KL in the reward takes off each trained token's; zeros without one."""
    if plan.reward_kl is None:
        return np.zeros(int(trained_lengths(table).sum()))
    old = "old_logprobs" if plan.old_logprobs == "trainer" else "sampler_logprobs"
    kl_T: np.ndarray = KL_OF_GAP[plan.reward_kl.estimator](policy_gap(table, old))
    return plan.reward_kl.beta * kl_T


def with_credit(
    table: pa.Table, rewards_T: np.ndarray, values_T: np.ndarray, lengths_N: np.ndarray, values: ValuePlan
) -> pa.Table:
    """The batch with advantages, returns and old values, from the reward of each trained token. `lengths_N`: trained
    tokens of each sequence over which credit flows, which may be several rows."""
    advantages_T, returns_T = advantages_and_returns(
        rewards_T, values_T, lengths_N, gamma=values.gamma, lam=values.lam
    )
    if values.returns == "advantages":
        returns_T = advantages_T + values_T
    for name, column_T in (("advantages", advantages_T), ("returns", returns_T), ("old_values", values_T)):
        table = with_lists(table, name, column_T)
    return table


async def values_before(workspace: Workspace, value: PolicyRef, table: pa.Table) -> np.ndarray:
    """(T,) float64: the value before each trained token."""
    sequences = sequences_of(table)
    with timed("train"):
        request = LogprobsRequest(value, sequences, max_tokens=workspace.max_tokens)
        found = await workspace.connect().values(request, epoch=workspace.epoch)
    return np.array([one for values in found for one in values], dtype=np.float64)
