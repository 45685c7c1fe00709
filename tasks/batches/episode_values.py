"""Plain code behind PPO's batch in environments: an advantage and a return at every token that the policy said.

An episode is one sequence of decisions: its trained tokens in order, over all turns, and over all segments where its
history was rewritten. What the environment says is no decision, and skipped: V_{t+1} is the value before the next
trained token, in the context that this one was sampled in; past the episode's last trained token it is 0. So a grade is
credited to every turn at and before it, and `gamma` discounts per trained token.

Axes: E episode · N row, a segment of an episode · T trained token of all rows
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

import numpy as np
import pyarrow as pa

from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.store import keys
from storage.store.artifacts import ArtifactRef, find_artifact, require_parent
from tasks.batches.columns import trained_lengths
from tasks.batches.episodes import check_graded, graded_chunks
from tasks.batches.ppo import ValuePlan, commit_credited, penalties, values_before, with_credit
from tasks.batches.rl import BatchPlan, scored
from tasks.reports.clock import timed
from tasks.sampling.trajectories import Trajectory, read_trajectories

Played = Mapping[tuple[str, int], Trajectory]


async def episode_value_batch(
    workspace: Workspace,
    policy: PolicyRef,
    trajectories: list[ArtifactRef],
    plan: BatchPlan,
    values: ValuePlan,
    *,
    step: int,
) -> ArtifactRef:
    """The committed batch of a PPO step in environments, prepared now if nobody did before: one row per segment of a
    trajectory with a grade. A token's reward is the KL penalty of `plan.reward_kl` off it, and a turn's grade on the
    turn's last token."""
    store = workspace.open_store()
    key = keys.step_artifact(policy.run, policy.stage, step, "batch", 0)
    with timed("storage"):
        found = find_artifact(store, key)
        if found is not None:
            return require_parent(found, policy.uri)
        played = read_trajectories(store, trajectories)
    graded = {name: one for name, one in played.items() if one.grades}
    unknown = {name: [0.0] * one.turns for name, one in graded.items()}
    tables = []
    for columns in graded_chunks(store, trajectories, graded, unknown):
        table = await scored(workspace, policy, [columns], plan)
        values_T = await values_before(workspace, values.value, table)
        tables.append(credited_episodes(table, graded, values_T, plan, values))
    check_graded(bool(tables), len(played), step)
    prompts = {prompt for table in tables for prompt in table["group"].to_pylist()}
    parents = (policy.uri, values.value.uri, *(ref.uri for ref in trajectories))
    return commit_credited(workspace, policy, key, tables, plan, values, parents=parents, prompts=len(prompts))


def credited_episodes(
    table: pa.Table, played: Played, values_T: np.ndarray, plan: BatchPlan, values: ValuePlan
) -> pa.Table:
    """The batch with advantages, returns and old values. The rows are segments; those of an episode stand together, in
    order, and none is missing."""
    names_N = list(zip(table["group"].to_pylist(), table["completion"].to_pylist(), strict=True))
    lengths_N = trained_lengths(table)
    names_E, lengths_E = [], []
    for name, members in groupby(range(len(names_N)), key=names_N.__getitem__):
        names_E.append(name)
        lengths_E.append(int(lengths_N[list(members)].sum()))
    grades = [grades_per_token(played[name]) for name in names_E]
    rewards_T = np.concatenate(grades) - penalties(table, plan)
    return with_credit(table, rewards_T, values_T, np.array(lengths_E), values)


def grades_per_token(one: Trajectory) -> np.ndarray:
    """float64, one per trained token of the trajectory: the grade of a turn on the turn's last token."""
    ends = np.cumsum(one.turn_tokens)
    found = np.zeros(int(ends[-1]))
    for turn, grade in one.grades.items():
        found[ends[turn] - 1] += grade
    return found
