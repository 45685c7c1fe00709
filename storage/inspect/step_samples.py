"""The samples of one step with their grades, also of a step that has not been committed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count

from storage.chain.listing import run_chains
from storage.errors import ObjectNotFound
from storage.serialization import Frozen
from storage.store import keys
from storage.store.artifacts import ArtifactRef, find_artifact, read_manifest
from storage.store.objects import ObjectStore
from storage.store.tables import read_table

GRADE_COLUMNS = ["prompt_id", "completion", "status", "reward", "reason"]
EPISODE_COLUMNS = ["prompt_id", "completion", "status", "grades", "reason", "thread"]


class GradedSample(Frozen):
    """A completion, or a segment of an episode, and its grade."""

    prompt: str
    """Id of the prompt."""
    completion: int
    """Its number among those of the prompt."""
    status: str
    """ok, masked or ignored."""
    reward: float | None
    """The sum of the grades of an episode's turns."""
    reason: str | None
    """Why it has this reward, or none."""
    thread: str
    """The conversation before the completion, or the whole one of an episode, as JSON."""
    text: str | None
    """The completion. None for an episode."""


def step_samples(store: ObjectStore, run: str, stage: str, step: int) -> Iterator[GradedSample]:
    """Yields the graded samples of a step (1-based), in their order. Raises ObjectNotFound if it has none."""
    for shard in count():
        rollouts = _shard_table(store, run, stage, step, "rollouts", shard)
        samples = _samples_of(store, rollouts, _shard_table(store, run, stage, step, "graded", shard))
        if not samples and shard == 0:
            raise ObjectNotFound(
                f"step {step} of {run}/{stage} has no graded completions in {store.url}; 'ostinato runs show "
                f"{run}' lists the stages of the run and their steps"
            )
        if not samples:
            return
        yield from samples


def newest_sampled_step(store: ObjectStore, run: str, stage: str = "") -> tuple[str, int]:
    """Returns (stage, step) of the newest step with samples, of any stage or of the one that is given. The step after
    the last committed one counts if its samples are there. Raises ObjectNotFound if no step has samples."""
    chains = [chain for chain in run_chains(store, run) if stage in ("", chain.stage)]
    for chain in reversed(chains):
        head = max(chain.steps(), default=0)
        for step in (head + 1, head):
            if step and _shard_table(store, run, chain.stage, step, "rollouts", 0) is not None:
                return chain.stage, step
    of_stage = f" in stage {stage!r}" if stage else ""
    raise ObjectNotFound(
        f"the run {run!r} has no samples{of_stage} in {store.url}; 'ostinato runs ls' lists the runs and their stages"
    )


def hint_about_missing_grades(store: ObjectStore, run: str, stage: str, step: int) -> str:
    """Text for an error: the first reason why a completion of the step (1-based) has no grade, the first table with
    reasons, and the command that shows all."""
    samples = step_samples(store, run, stage, step)
    first = next((sample.reason for sample in samples if sample.status != "ok" and sample.reason), "none was given")
    graded = _shard_table(store, run, stage, step, "graded", 0)
    assert graded is not None  # it was read above
    path = store.address(read_manifest(store, graded.key).files[0].key)
    return (
        f"The first reason: {first.rstrip('.')}. It is in {path}; to see all: ostinato runs samples {run} --stage "
        f"{stage} --step {step} --storage {store.url}"
    )


def _samples_of(store: ObjectStore, rollouts: ArtifactRef | None, graded: ArtifactRef | None) -> list[GradedSample]:
    """The samples of a shard. Empty if it has no grades yet."""
    if rollouts is None:
        return []
    if graded is not None:
        sampled = read_table(store, rollouts, ["thread", "text"]).to_pylist()
        grades = read_table(store, graded, GRADE_COLUMNS).to_pylist()
        return [
            GradedSample(prompt=grade.pop("prompt_id"), **grade, **completion)
            for grade, completion in zip(grades, sampled, strict=True)
        ]
    # an environment grades its episodes itself
    episodes = read_table(store, rollouts, EPISODE_COLUMNS)
    if "grades" not in episodes.column_names:
        return []
    samples = []
    for row in episodes.to_pylist():
        total = math.fsum(row.pop("grades"))
        reward = total if row["status"] == "ok" else None
        samples.append(GradedSample(prompt=row.pop("prompt_id"), reward=reward, text=None, **row))
    return samples


def _shard_table(store: ObjectStore, run: str, stage: str, step: int, kind: str, shard: int) -> ArtifactRef | None:
    return find_artifact(store, keys.step_artifact(run, stage, step - 1, kind, shard))
