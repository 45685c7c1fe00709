"""Builds PPO's batch in environments: an advantage and a return for every token that the policy sampled.

GAE runs over the trained tokens of an episode in order, across its turns and segments. The environment's tokens are
skipped: V_{t+1} is the value before the next trained token, in the context in which that token was sampled, and 0 after
the last trained token of the episode. Therefore a grade affects every turn at and before it, and `gamma` discounts per
trained token.

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
from storage.store.artifacts import ArtifactRef
from tasks.batches.columns import trained_lengths
from tasks.batches.episodes import check_graded, graded_chunks
from tasks.batches.ppo import commit_credited, penalties, values_before, with_credit
from tasks.batches.rl import score_shards
from tasks.committed import commit_once
from tasks.plans import BatchPlan, ValuePlan
from tasks.reports.clock import timed
from tasks.sampling.trajectories import Trajectory, read_trajectories
from tasks.task_runs import durable_task

Trajectories = Mapping[tuple[str, int], Trajectory]
"""Trajectories by prompt id and number."""


@durable_task("prepare", "batch-{step:06d}")
async def prepare_ppo_episode_batch(
    workspace: Workspace,
    policy: PolicyRef,
    trajectories: list[ArtifactRef],
    plan: BatchPlan,
    values: ValuePlan,
    *,
    step: int,
) -> ArtifactRef:
    """The committed `batch` table of a PPO step in environments. It has a row per segment of a trajectory with a grade.
    The reward of a token is minus its KL penalty (`plan.reward_kl`), plus the turn's grade on the last token of the
    turn."""
    key = keys.step_artifact(policy.run, policy.stage, step, "batch", 0)
    return await commit_once(
        workspace, key, lambda: _build_batch(workspace, policy, trajectories, plan, values, key, step),
        parent=policy.uri,
    )  # fmt: skip


async def _build_batch(
    workspace: Workspace,
    policy: PolicyRef,
    trajectories: list[ArtifactRef],
    plan: BatchPlan,
    values: ValuePlan,
    key: str,
    step: int,
) -> ArtifactRef:
    """Builds the batch of a PPO step from episodes and commits it."""
    store = workspace.open_store()
    with timed("storage"):
        finished = read_trajectories(store, trajectories)

    # The rows start with zeros as advantages. GAE replaces them, for it needs the values of all tokens of an episode.
    graded = {name: trajectory for name, trajectory in finished.items() if trajectory.grades}
    no_advantages = {name: [0.0] * trajectory.turns for name, trajectory in graded.items()}
    tables = []
    prompts: set[str] = set()
    for columns in graded_chunks(store, trajectories, graded, no_advantages):
        table = await score_shards(workspace, policy, [columns], plan, step=step)
        values_T = await values_before(workspace, values.value, table)
        tables.append(credited_episodes(table, graded, values_T, plan, values))
        prompts.update(table["group"].to_pylist())
    check_graded(bool(tables), len(finished), step)

    # Commit all rows as one batch.
    parents = (policy.uri, values.value.uri, *(ref.uri for ref in trajectories))
    return commit_credited(workspace, policy, key, tables, plan, values, parents=parents, prompts=len(prompts))


def credited_episodes(
    table: pa.Table, trajectories: Trajectories, values_T: np.ndarray, plan: BatchPlan, values: ValuePlan
) -> pa.Table:
    """Adds advantages, returns and old values to the batch. Its rows are segments; all segments of an episode are
    adjacent and in order."""
    names_N = list(zip(table["group"].to_pylist(), table["completion"].to_pylist(), strict=True))
    lengths_N = trained_lengths(table)
    # GAE runs over an episode, which may be several rows: add up the trained tokens of its rows.
    names_E, lengths_E = [], []
    for name, members in groupby(range(len(names_N)), key=names_N.__getitem__):
        names_E.append(name)
        lengths_E.append(int(lengths_N[list(members)].sum()))
    grades = [grades_per_token(trajectories[name]) for name in names_E]
    rewards_T = np.concatenate(grades) - penalties(table, plan)
    return with_credit(table, rewards_T, values_T, np.array(lengths_E), values)


def grades_per_token(trajectory: Trajectory) -> np.ndarray:
    """float64, one number per trained token of the trajectory: the grade of a turn is on its last token."""
    turn_ends = np.cumsum(trajectory.turn_tokens)
    grades = np.zeros(int(turn_ends[-1]))
    for turn, grade in trajectory.grades.items():
        grades[turn_ends[turn] - 1] += grade
    return grades
