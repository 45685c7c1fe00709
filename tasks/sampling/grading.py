"""Grades the completions of a shard and commits one grade per completion, also for those that could not be graded."""

from __future__ import annotations

from contextlib import nullcontext

import pyarrow as pa

from engine.workspace import Workspace
from storage.store import keys
from storage.store.artifacts import ArtifactRef
from storage.store.tables import commit_table, read_step_table, table_schema
from storage.worklog import log_work
from tasks.committed import commit_once
from tasks.evaluation.validation_curve import sums_by_source
from tasks.graders.running.grade_threads import GradeOutcome, grade_threads
from tasks.graders.running.shared_graders import note_grading, shared_grader
from tasks.plans import Grading, TooManyMasked
from tasks.reports.clock import timed
from tasks.sampling.completions import answered_threads
from tasks.task_runs import durable_task

GRADED_COLUMNS = ("prompt_index", "prompt_id", "completion", "text", "thread")
"""The columns of rollouts that grading reads."""


@durable_task("grade", "grade-{step:06d}/{shard:02d}")
async def grade_rollouts(
    workspace: Workspace, rollouts: ArtifactRef, grading: Grading, *, stage: str, step: int, shard: int
) -> ArtifactRef:
    """The committed `graded` table of a shard. It has a row per completion: with a reward, or masked or ignored.

    Raises:
        TooManyMasked: more than `grading.max_masked_fraction` of the shard could not be graded.
    """
    key = keys.step_artifact(workspace.run, stage, step, "graded", shard)
    return await commit_once(
        workspace, key, lambda: _grade(workspace, rollouts, grading, key, stage, step, shard), parent=rollouts.uri
    )


async def _grade(
    workspace: Workspace, rollouts: ArtifactRef, grading: Grading, key: str, stage: str, step: int, shard: int
) -> ArtifactRef:
    """Grades a shard and commits the grades."""
    store = workspace.open_store()
    with timed("storage"):
        rows = read_step_table(store, rollouts, GRADED_COLUMNS).to_pylist()

    # Grade them. A shard in which too many grades failed is not committed, so that it is graded again after a resume.
    with timed("grade"):
        outcomes = await grade_texts(rows, grading, workspace)
    check_masked(outcomes, grading, where=f"shard {shard}")
    log_work("grade", stage=stage, step=step, shard=shard)

    # Commit the grades, with the sums that the metrics of the step read.
    table = graded_table(rows, outcomes, with_answers=grading.keep_answers)
    extra = {"by_source": sums_by_source([row["thread"] for row in rows], [outcome.reward for outcome in outcomes])}
    by_part = sums_by_part(outcomes)
    if by_part:
        extra["reward_parts"] = by_part
    with timed("storage"):
        return commit_table(
            store,
            key,
            table,
            kind="graded",
            parents=(rollouts.uri,),
            provenance=workspace.provenance,
            extra=extra,  # type: ignore[arg-type]
        )


async def grade_texts(rows: list[dict[str, object]], grading: Grading, workspace: Workspace) -> list[GradeOutcome]:
    """One outcome per row of a rollouts table, in order. Judges that the grader names run in the engine of
    `workspace`."""
    spec = grading.grader
    threads = answered_threads(rows)
    # A crash of a grader in this process ends the run without a message. The note tells the next process about it.
    with note_grading(spec.path, workspace) if spec.workers == "none" else nullcontext():
        async with shared_grader(spec, workspace) as grader:
            return await grade_threads(
                grader,
                threads,
                concurrency=grading.concurrency,
                timeout_seconds=grading.timeout_seconds,
                retries=grading.retries,
            )


def check_masked(outcomes: list[GradeOutcome], grading: Grading, *, where: str) -> None:
    """Raises TooManyMasked if too many completions of `where` could not be graded."""
    masked = [outcome for outcome in outcomes if outcome.status == "masked"]
    if len(masked) > grading.max_masked_fraction * len(outcomes):
        raise TooManyMasked(
            f"{len(masked)} of {len(outcomes)} completions of {where} could not be graded, at most "
            f"{grading.max_masked_fraction:.0%} may fail; the first reason: {(masked[0].reason or '').rstrip('.')}. "
            "Correct the grader or the data and run the same command again, or raise max_masked_fraction"
        )


def graded_table(
    rows: list[dict[str, object]], outcomes: list[GradeOutcome], *, with_answers: bool = False
) -> pa.Table:
    """The graded table: a row per completion, in the order of the rollouts."""
    graded = []
    for row, outcome in zip(rows, outcomes, strict=True):
        grade = {name: row[name] for name in ("prompt_index", "prompt_id", "completion")}
        grade |= {"reward": outcome.reward, "status": outcome.status, "reason": outcome.reason}
        parts = [part.model_dump() for part in outcome.parts]
        graded.append(grade | {"answer": outcome.answer, "parts": parts or None})
    # columns that the schema lacks are left out
    optional = {"answer"} if with_answers else set()
    if any(outcome.parts for outcome in outcomes):
        optional.add("parts")
    return pa.Table.from_pylist(graded, schema=table_schema("graded", optional))


def sums_by_part(outcomes: list[GradeOutcome]) -> dict[str, list[float]]:
    """Name of a part of the rewards -> [sum of its values, number of values]."""
    sums: dict[str, list[float]] = {}
    for outcome in outcomes:
        for part in outcome.parts:
            total, count = sums.get(part.name, [0.0, 0])
            sums[part.name] = [total + part.value, count + 1]
    return sums
