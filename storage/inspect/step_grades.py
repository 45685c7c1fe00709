"""The grades of one step with their reasons, also of a step that has not been committed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from storage.errors import ObjectNotFound
from storage.serialization import Frozen
from storage.store import keys
from storage.store.artifacts import ArtifactRef, find_artifact, read_manifest
from storage.store.objects import ObjectStore
from storage.store.tables import read_table


class CompletionGrade(Frozen):
    """The grade of one completion."""

    prompt: str
    """Id of the prompt."""
    completion: int
    status: str
    """ok, masked or ignored."""
    reward: float | None
    reason: str | None
    """Why the completion has this reward, or none."""
    text: str


def step_grades(store: ObjectStore, run: str, stage: str, step: int) -> Iterator[CompletionGrade]:
    """Yields the grades of a step (1-based), in the order of its completions. Raises ObjectNotFound if it has none."""
    for shard in count():
        graded, rollouts = (_shard_table(store, run, stage, step, kind, shard) for kind in ("graded", "rollouts"))
        if graded is None or rollouts is None:
            if shard == 0:
                raise ObjectNotFound(
                    f"step {step} of {run}/{stage} has no graded completions in {store.url}; 'ostinato runs show "
                    f"{run}' lists the stages of the run and their steps"
                )
            return
        texts = read_table(store, rollouts, ["text"])["text"].to_pylist()
        columns = ["prompt_id", "completion", "status", "reward", "reason"]
        for row, text in zip(read_table(store, graded, columns).to_pylist(), texts, strict=True):
            yield CompletionGrade(prompt=row.pop("prompt_id"), text=text, **row)


def hint_about_missing_grades(store: ObjectStore, run: str, stage: str, step: int) -> str:
    """Text for an error: the first reason why a completion of the step (1-based) has no grade, the first table with
    reasons, and the command that shows all."""
    reasons = (grade.reason for grade in step_grades(store, run, stage, step) if grade.status != "ok" and grade.reason)
    first = next(reasons, "none was given")
    graded = _shard_table(store, run, stage, step, "graded", 0)
    assert graded is not None  # it was read above
    path = store.address(read_manifest(store, graded.key).files[0].key)
    return (
        f"The first reason: {first.rstrip('.')}. It is in {path}; to see all: ostinato runs grades {run} {stage} "
        f"{step} --storage {store.url}"
    )


def _shard_table(store: ObjectStore, run: str, stage: str, step: int, kind: str, shard: int) -> ArtifactRef | None:
    return find_artifact(store, keys.step_artifact(run, stage, step - 1, kind, shard))
