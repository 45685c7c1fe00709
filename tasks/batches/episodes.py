"""Builds the batch of a step in environments from graded turns.

Axes: K trajectory of one prompt · N row, a segment of a trajectory
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import pyarrow as pa

from engine.errors import BadSpec
from engine.models.samples import rows_of_lists
from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.store import keys
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore
from storage.store.tables import SCHEMAS, TableWriter
from tasks.batches.advantages import ESTIMATORS
from tasks.batches.columns import LogprobGap
from tasks.batches.rl import CHUNK_TOKENS, score_shards
from tasks.committed import commit_once
from tasks.plans import BatchPlan
from tasks.reports.clock import timed
from tasks.sampling.shards import read_tables
from tasks.sampling.trajectories import Trajectory, read_trajectories
from tasks.task_runs import durable_task

_COLUMNS = ("group", "completion", "token_ids", "loss_mask", "advantages", "sampler_logprobs", "reward")
_ROW_COLUMNS = ("prompt_id", "completion", "first_turn", "turn_tokens")
_TOKEN_COLUMNS = ("token_ids", "loss_mask", "logprobs")
"""Columns of trajectories that a batch needs: those with a value per row or turn, and those with one per token."""


class NotOneGrade(BadSpec):
    """A loss over whole sequences needs exactly one grade per trajectory."""


@durable_task("prepare", "batch-{step:06d}")
async def prepare_trajectories(
    workspace: Workspace,
    policy: PolicyRef,
    trajectories: list[ArtifactRef],
    plan: BatchPlan,
    *,
    step: int,
) -> ArtifactRef:
    """The committed `batch` table of an RL step in environments: one row per segment of a graded trajectory.

    Raises:
        NotOneGrade: `plan.per_trajectory`, and a trajectory has no grade or several.
    """
    key = keys.step_artifact(policy.run, policy.stage, step, "batch", 0)
    return await commit_once(
        workspace, key, lambda: _build_batch(workspace, policy, trajectories, plan, key, step), parent=policy.uri
    )


async def _build_batch(
    workspace: Workspace, policy: PolicyRef, trajectories: list[ArtifactRef], plan: BatchPlan, key: str, step: int
) -> ArtifactRef:
    """Builds the batch of an RL step from episodes and commits it."""
    store = workspace.open_store()

    # Advantages need the grades of the whole step, since a prompt's trajectories may be in several shards.
    with timed("storage"):
        finished = read_trajectories(store, trajectories)
    advantages = step_advantages(finished.values(), plan.advantage_estimator, per_trajectory=plan.per_trajectory)

    # Score and write the rows chunk by chunk.
    prompts: set[str] = set()
    with TableWriter("batch") as writer:
        gap = LogprobGap()
        for columns in graded_chunks(store, trajectories, finished, advantages):
            prompts.update(columns["group"].to_pylist())
            table = await score_shards(workspace, policy, [columns], plan, step=step)
            gap.add(table)
            with timed("storage"):
                writer.write(table)
        check_graded(bool(writer.rows), len(finished), step)

        with timed("storage"):
            return writer.commit(
                store,
                key,
                parents=(policy.uri, *(ref.uri for ref in trajectories)),
                provenance=workspace.provenance,
                extra={"prompts": len(prompts), "logprob_gap": gap.mean, **plan.rules},
            )


def check_graded(has_rows: bool, finished: int, step: int) -> None:
    """Raises BadSpec if no trajectory of a step is left to train."""
    if not has_rows:
        raise BadSpec(
            f"step {step + 1} has no graded trajectory: none of the {finished} finished trajectories has a grade; look "
            "at the reasons in the step's trajectories table, and grade episodes that a limit ends in "
            "Environment.on_limit"
        )


def step_advantages(
    finished: Iterable[Trajectory], estimator: str, *, per_trajectory: bool
) -> dict[tuple[str, int], list[float]]:
    """The advantage of each turn of the trajectories with a grade: (prompt, number) -> advantages. All trajectories
    of a prompt in the step form a group. Raises NotOneGrade."""
    advantages_of = {}
    by_prompt = sorted(finished, key=lambda trajectory: trajectory.prompt)
    for _, members in groupby(by_prompt, key=lambda trajectory: trajectory.prompt):
        group_K = [trajectory for trajectory in members if trajectory.grades or per_trajectory]
        if per_trajectory:
            for trajectory in group_K:
                _check_one_grade(trajectory)
        grades_K = [trajectory.grades for trajectory in group_K]
        turns_K = [trajectory.turns for trajectory in group_K]
        advantages_K = turn_advantages(grades_K, turns_K, estimator)
        for trajectory, advantages in zip(group_K, advantages_K, strict=True):
            if per_trajectory:
                # Turn 0 has the whole advantage of the only grade, whichever turn has that grade.
                advantages = [advantages[0]] * trajectory.turns
            advantages_of[trajectory.prompt, trajectory.number] = advantages
    return advantages_of


def turn_advantages(
    grades_K: Sequence[Mapping[int, float]], turns_K: Sequence[int], estimator: str
) -> list[list[float]]:
    """The advantage of every turn of a group's trajectories, in float32. The grades of all turns of the group are
    normalised together; the advantage of a turn is the sum of its trajectory's normalised grades at and after it.

    Args:
        grades_K: turn -> grade, of each trajectory.
        turns_K: number of turns of each trajectory.
    """
    # Normalise all grades of the group together, in the order of trajectories and turns.
    grades_of_group: list[float] = []
    for grades in grades_K:
        grades_of_group += [grades[turn] for turn in sorted(grades)]
    normalised = iter(ESTIMATORS[estimator](grades_of_group))

    # Read them back in the same order, and add them up from the last turn of each trajectory.
    advantages_K = []
    for grades, turns in zip(grades_K, turns_K, strict=True):
        normalised_of_turn = [np.float32(0.0)] * turns
        for turn in sorted(grades):
            value = next(normalised)
            assert value is not None  # None would be a masked grade; masked trajectories are not in the group
            normalised_of_turn[turn] = np.float32(value)
        sums_from_end = list(accumulate(reversed(normalised_of_turn)))
        advantages_K.append([float(total) for total in reversed(sums_from_end)])
    return advantages_K


def _check_one_grade(trajectory: Trajectory) -> None:
    if len(trajectory.grades) == 1:
        return
    if trajectory.grades:
        grades = f"grades at the turns {sorted(trajectory.grades)}"
    else:
        grades = f"no grade (its ending: {trajectory.ending})"
    raise NotOneGrade(
        f"{trajectory.name} has {grades}; a loss over whole sequences (GSPO) expects exactly one grade per trajectory: "
        "grade only the last turn, grade episodes that a limit ends in on_limit, or train with ENVGRPO, which has an "
        "advantage per turn"
    )


def graded_chunks(
    store: ObjectStore,
    refs: list[ArtifactRef],
    finished: Mapping[tuple[str, int], Trajectory],
    advantages: Mapping[tuple[str, int], list[float]],
) -> Iterator[dict[str, pa.Array]]:
    """Yields the batch's columns, except the trainer's logprobs, for the trajectories that have advantages: whole
    shards in order, about CHUNK_TOKENS at a time. The segments of a trajectory are adjacent and in order."""
    rows: list[dict[str, Any]] = []
    tokens = 0
    for table in read_tables(store, refs, (*_ROW_COLUMNS, *_TOKEN_COLUMNS)):
        # The columns with a value per token stay arrays.
        table_rows = table.select(_ROW_COLUMNS).to_pylist()
        for column in _TOKEN_COLUMNS:
            for row, values in zip(table_rows, rows_of_lists(table[column]), strict=True):
                row[column] = values
        for row in table_rows:
            # Leave out masked and ignored episodes, and segments without a sampled token.
            name = row["prompt_id"], row["completion"]
            if name not in advantages or not row["turn_tokens"]:
                continue
            rows.append(_batch_row(row, advantages[name], finished[name].reward))
            tokens += len(row["token_ids"])
        if tokens >= CHUNK_TOKENS:
            yield _arrays(rows)
            rows, tokens = [], 0
    if rows:
        yield _arrays(rows)


def _batch_row(row: Mapping[str, Any], advantages: Sequence[float], reward: float) -> dict[str, Any]:
    """The batch row of a segment. The trained tokens of a turn have the advantage of the turn."""
    # The segment has the turns from `first_turn` on, one per entry of `turn_tokens`.
    turns = len(row["turn_tokens"])
    turn_advantages = advantages[row["first_turn"] :][:turns]
    return {
        "group": row["prompt_id"],
        "completion": row["completion"],
        "token_ids": row["token_ids"],
        "loss_mask": row["loss_mask"],
        "advantages": np.repeat(np.array(turn_advantages), row["turn_tokens"]),
        "sampler_logprobs": row["logprobs"],
        "reward": reward,
    }


def _arrays(rows: list[dict[str, Any]]) -> dict[str, pa.Array]:
    schema = SCHEMAS["batch"]
    arrays = {}
    for name in _COLUMNS:
        arrays[name] = pa.array([row[name] for row in rows], schema.field(name).type)
    return arrays
