"""Plain code behind the batch of a step in environments: from graded turns to trainable rows.

Axes: K trajectory of one prompt · N row, a segment of a trajectory
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import pyarrow as pa

from engine.errors import BadSpec
from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.store import keys
from storage.store.artifacts import ArtifactRef, find_artifact, require_parent
from storage.store.objects import ObjectStore
from storage.store.tables import SCHEMAS, TableWriter
from tasks.batches.columns import gap_of
from tasks.batches.rl import CHUNK_TOKENS, BatchPlan, scored
from tasks.credit.advantages import ESTIMATORS
from tasks.reports.clock import timed
from tasks.sampling.shards import read_tables
from tasks.sampling.trajectories import Trajectory, read_trajectories

_COLUMNS = ("group", "completion", "token_ids", "weights", "advantages", "sampler_logprobs", "reward")


class NotOneGrade(BadSpec):
    """A loss over whole sequences needs exactly one grade per trajectory."""


async def trajectory_batch(
    workspace: Workspace,
    policy: PolicyRef,
    trajectories: list[ArtifactRef],
    plan: BatchPlan,
    *,
    per_trajectory: bool = False,
    step: int,
) -> ArtifactRef:
    """The committed batch of a step, prepared now if nobody did before. `per_trajectory`: every token of a trajectory
    has the advantage of its one grade (NotOneGrade); otherwise each turn has its own."""
    store = workspace.open_store()
    key = keys.step_artifact(policy.run, policy.stage, step, "batch", 0)
    with timed("storage"):
        found = find_artifact(store, key)
        if found is not None:
            return require_parent(found, policy.uri)
        played = read_trajectories(store, trajectories)
    advantages = step_advantages(played.values(), plan.advantage_estimator, per_trajectory=per_trajectory)
    prompts: set[str] = set()
    with TableWriter("batch") as writer:
        gap, gap_tokens = 0.0, 0
        for columns in graded_chunks(store, trajectories, played, advantages):
            prompts.update(columns["group"].to_pylist())
            table = await scored(workspace, policy, [columns], plan)
            total, tokens = gap_of(table)
            gap, gap_tokens = gap + total, gap_tokens + tokens
            with timed("storage"):
                writer.write(table)
        check_graded(bool(writer.rows), len(played), step)
        with timed("storage"):
            committed = writer.commit(
                store,
                key,
                parents=(policy.uri, *(ref.uri for ref in trajectories)),
                provenance=workspace.provenance,
                extra={"prompts": len(prompts), "logprob_gap": gap / gap_tokens if gap_tokens else None, **plan.rules},
            )
    return require_parent(committed, policy.uri)


def check_graded(any_graded: bool, played: int, step: int) -> None:
    """Raises BadSpec when nothing of a step is left to train."""
    if not any_graded:
        raise BadSpec(
            f"step {step} has no graded trajectory: of {played} that came to an end none has a grade; look at the "
            "reasons in its trajectories table, and grade episodes that a limit ends in Environment.on_limit"
        )


def step_advantages(
    played: Iterable[Trajectory], estimator: str, *, per_trajectory: bool
) -> dict[tuple[str, int], list[float]]:
    """(prompt, number) -> the advantage of each turn, for the trajectories with a grade. The group of a trajectory are
    those of its prompt, wherever in the step they are. Raises NotOneGrade."""
    found = {}
    by_prompt = sorted(played, key=lambda one: one.prompt)
    for _, members in groupby(by_prompt, key=lambda one: one.prompt):
        group_K = [one for one in members if one.grades or per_trajectory]
        if per_trajectory:
            for one in group_K:
                _check_one_grade(one)
        advantages_K = turn_advantages([one.grades for one in group_K], [one.turns for one in group_K], estimator)
        for one, advantages in zip(group_K, advantages_K, strict=True):
            # with one grade, turn 0 has its whole advantage, whenever it came
            found[one.prompt, one.number] = [advantages[0]] * one.turns if per_trajectory else advantages
    return found


def turn_advantages(
    grades_K: Sequence[Mapping[int, float]], turns_K: Sequence[int], estimator: str
) -> list[list[float]]:
    """The advantage of every turn of a group's trajectories: the grades of all their turns are normalised together, and
    a turn has the sum of its trajectory's normalised grades at and after it. float32; `grades_K`: turn -> grade."""
    flat = [grades[turn] for grades in grades_K for turn in sorted(grades)]
    normalised = iter(ESTIMATORS[estimator](flat))
    found = []
    for grades, turns in zip(grades_K, turns_K, strict=True):
        of_turn = [np.float32(0.0)] * turns
        for turn in sorted(grades):
            value = next(normalised)
            assert value is not None  # None stands for a masked grade, and none is here
            of_turn[turn] = np.float32(value)
        found.append([float(total) for total in reversed(list(accumulate(reversed(of_turn))))])
    return found


def _check_one_grade(one: Trajectory) -> None:
    if len(one.grades) == 1:
        return
    what = f"grades at the turns {sorted(one.grades)}" if one.grades else f"no grade (its ending: {one.ending})"
    raise NotOneGrade(
        f"{one.name} has {what}; a loss over whole sequences (GSPO) expects exactly one grade per trajectory: grade "
        "the last turn only, grade in on_limit what a limit ends, or train with ENVGRPO, which credits turns"
    )


def graded_chunks(
    store: ObjectStore,
    refs: list[ArtifactRef],
    played: Mapping[tuple[str, int], Trajectory],
    advantages: Mapping[tuple[str, int], list[float]],
) -> Iterator[dict[str, pa.Array]]:
    """Columns of the batch but the trainer's logprobs, of the trajectories that have advantages: whole shards in their
    order, about CHUNK_TOKENS at a time. The segments of a trajectory stand together, in order."""
    rows: list[dict[str, Any]] = []
    tokens = 0
    columns = ["prompt_id", "completion", "token_ids", "weights", "logprobs", "first_turn", "turn_tokens"]
    for table in read_tables(store, refs, columns):
        for row in table.to_pylist():
            name = row["prompt_id"], row["completion"]
            if name not in advantages or not row["turn_tokens"]:
                continue
            rows.append(_batch_row(row, advantages[name], played[name].reward))
            tokens += len(row["token_ids"])
        if tokens >= CHUNK_TOKENS:
            yield _arrays(rows)
            rows, tokens = [], 0
    if rows:
        yield _arrays(rows)


def _batch_row(row: Mapping[str, Any], advantages: Sequence[float], reward: float) -> dict[str, Any]:
    of_turns = advantages[row["first_turn"] :]
    return {
        "group": row["prompt_id"],
        "completion": row["completion"],
        "token_ids": row["token_ids"],
        "weights": row["weights"],
        "advantages": [
            value for value, count in zip(of_turns, row["turn_tokens"], strict=False) for _ in range(count)
        ],
        "sampler_logprobs": row["logprobs"],
        "reward": reward,
    }


def _arrays(rows: list[dict[str, Any]]) -> dict[str, pa.Array]:
    schema = SCHEMAS["batch"]
    return {name: pa.array([row[name] for row in rows], schema.field(name).type) for name in _COLUMNS}
