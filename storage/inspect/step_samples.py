"""The samples of one step with their grades, also of a step that has not been committed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import count
from typing import Literal

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
    """The reason of its grader, or of its environment. None if none was given."""
    thread: str
    """The conversation before the completion, or the whole one of an episode, as JSON."""
    text: str | None
    """The completion. None for an episode."""

    @property
    def length(self) -> int:
        """Characters of the completion, or of the conversation of an episode."""
        return len(self.thread if self.text is None else self.text)


SampleOrder = Literal["lowest reward", "highest reward", "longest", "shortest"]
_ORDERS: dict[SampleOrder, Callable[[GradedSample], float]] = {
    "lowest reward": lambda sample: math.inf if sample.reward is None else sample.reward,
    "highest reward": lambda sample: math.inf if sample.reward is None else -sample.reward,
    "longest": lambda sample: -sample.length,
    "shortest": lambda sample: sample.length,
}


class SampleFilter(Frozen):
    """Which samples of a step are shown, and in which order. None, or an empty text, filters nothing."""

    status: str = ""
    min_reward: float | None = None
    """This and the next leave out samples without a reward."""
    max_reward: float | None = None
    min_length: int = 0
    max_length: int | None = None
    order: SampleOrder | None = None
    """None: that of the step. Samples without a reward come last in an order by reward."""

    def apply(self, samples: Iterable[GradedSample]) -> list[GradedSample]:
        """Returns the samples that pass, in the order."""
        passing = [sample for sample in samples if self._passes(sample)]
        return sorted(passing, key=_ORDERS[self.order]) if self.order else passing

    def _passes(self, sample: GradedSample) -> bool:
        if self.min_reward is not None or self.max_reward is not None:
            low = -math.inf if self.min_reward is None else self.min_reward
            high = math.inf if self.max_reward is None else self.max_reward
            if sample.reward is None or not low <= sample.reward <= high:
                return False
        longest = math.inf if self.max_length is None else self.max_length
        return self.status in ("", sample.status) and self.min_length <= sample.length <= longest


def step_samples(store: ObjectStore, run: str, stage: str, step: int) -> Iterator[GradedSample]:
    """Yields the graded samples of a step (1-based), in their order. Raises ObjectNotFound if it has none."""
    for _, samples in _graded_shards(store, run, stage, step):
        yield from samples


def newest_sampled_step(store: ObjectStore, run: str, stage: str = "") -> tuple[str, int]:
    """Returns (stage, step) of the newest step with graded samples, of any stage or of the one that is given. The step
    after the last committed one counts if it has some. Raises ObjectNotFound if no step has."""
    chains = [chain for chain in run_chains(store, run) if stage in ("", chain.stage)]
    for chain in reversed(chains):
        head = max(chain.steps(), default=0)
        for step in (head + 1, head):
            with suppress(ObjectNotFound):
                if step and next(_graded_shards(store, run, chain.stage, step)):
                    return chain.stage, step
    of_stage = f" in stage {stage!r}" if stage else ""
    raise ObjectNotFound(
        f"the run {run!r} has no graded samples{of_stage} in {store.url}; 'ostinato runs ls' lists the runs and their "
        "stages"
    )


def missing_grade_hint(store: ObjectStore, run: str, stage: str, step: int) -> str:
    """Text for an error: the first reason why a sample of the step (1-based) has no grade, the table that has it, and
    the command that shows all."""
    reason, place = "none was given", ""
    for table, samples in _graded_shards(store, run, stage, step):
        place = place or table.key
        reasons = [sample.reason for sample in samples if sample.status != "ok" and sample.reason]
        if reasons:
            reason, place = reasons[0].rstrip("."), table.key
            break
    path = store.address(read_manifest(store, place).files[0].key)
    return (
        f"The first reason: {reason}. It is in {path}; to see all: ostinato runs samples {run} --stage {stage} "
        f"--step {step} --storage {store.url}"
    )


def _graded_shards(
    store: ObjectStore, run: str, stage: str, step: int
) -> Iterator[tuple[ArtifactRef, list[GradedSample]]]:
    """Yields the table with the grades and the samples of each graded shard. Raises ObjectNotFound if there is none."""
    has_grades = False
    for shard in count():
        rollouts, graded = (_find_shard(store, run, stage, step, kind, shard) for kind in ("rollouts", "graded"))
        if rollouts is None:
            break
        samples = _samples_of(store, rollouts, graded)
        if samples is not None:
            has_grades = True
            yield graded or rollouts, samples
    if not has_grades:
        raise ObjectNotFound(
            f"step {step} of {run}/{stage} has no graded completions in {store.url}; 'ostinato runs show {run}' lists "
            "the stages of the run and their steps"
        )


def _samples_of(store: ObjectStore, rollouts: ArtifactRef, graded: ArtifactRef | None) -> list[GradedSample] | None:
    """The samples of a shard. None if it has no grades yet."""
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
        return None
    samples = []
    for row in episodes.to_pylist():
        total = math.fsum(row.pop("grades"))
        reward = total if row["status"] == "ok" else None
        samples.append(GradedSample(prompt=row.pop("prompt_id"), reward=reward, text=None, **row))
    return samples


def _find_shard(store: ObjectStore, run: str, stage: str, step: int, kind: str, shard: int) -> ArtifactRef | None:
    return find_artifact(store, keys.step_artifact(run, stage, step - 1, kind, shard))
