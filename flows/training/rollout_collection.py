"""Collects the rollouts that a step of reinforcement learning trains on.

Prompts are taken from the dataset, completions are sampled and graded. With dynamic sampling, further prompts are drawn
for groups with equal rewards. With staleness, the rollouts of the next steps are collected while this one trains.

Committed grades and the dataset's cursor decide everything, so a resumed run collects what the first attempt would have
collected.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from engine.errors import PermanentEngineError
from engine.handles import TrainingModel
from flows.configs.reinforcement import RefillEnd
from flows.training.rollout_sources import RolloutSource
from storage.chain.records import PolicyRef
from storage.inspect.accounting import step_inputs
from storage.store.artifacts import ArtifactRef
from tasks.batches.columns import read_grades
from tasks.batches.iteration import async_map
from tasks.batches.rl import count_informative_prompts, has_grades
from tasks.datasets.load import LoadedDataset
from tasks.datasets.load_order import RunOrder
from tasks.datasets.order import DataCursor, repetitions
from tasks.datasets.pools import MeasuredPrompts, PoolOrder, ReadStep
from tasks.plans import DatasetAnswers, PromptShard, Truncation
from tasks.sampling.shards import SHARDS_AT_ONCE


class BatchNotFilled(PermanentEngineError):
    """Dynamic sampling did not fill a batch in the allowed number of draws, and refill_end is "fail"."""


class TooManySkipped(PermanentEngineError):
    """In more steps in a row than the run allows, no completion got a grade."""


@dataclass(frozen=True)
class CollectedRollouts:
    """The committed rollouts of one step and their grades, one artifact per shard."""

    rollouts: list[ArtifactRef]
    graded: list[ArtifactRef]
    cursor_in: DataCursor
    """The position in the dataset before the step."""
    cursor_out: DataCursor
    """The position in the dataset after the step."""


@dataclass(frozen=True)
class PromptShards:
    """How prompts of a dataset become shards."""

    model: TrainingModel
    data: LoadedDataset
    prompts_per_step: int
    completions_per_prompt: int
    prompts_per_shard: int
    order: RunOrder
    max_prompt_tokens: int | None
    truncation: Truncation
    segment_seconds: float | None = None
    """None: each completion is sampled from one policy."""
    on_policy: float = 1.0
    """Probability that the completions of a prompt are sampled. Otherwise its completion is the answer of its row.
    Below 1, every row ends with an answer."""

    def shards(
        self, rows: list[int], *, earlier_rows: list[int], first_index: int, step: int, resampled: bool = False
    ) -> list[PromptShard]:
        """The shards of `rows`. `earlier_rows` were taken by the same step before; the shards are numbered from
        `first_index`. `resampled`: they are all of `earlier_rows` once more."""
        # a prompt that occurs again in the step gets other random numbers
        repeated = repetitions([*earlier_rows, *rows])[len(earlier_rows) :]
        occurrences = list(zip(rows, repeated, strict=True))
        parts: dict[DatasetAnswers, list[tuple[int, int]]] = {"none": occurrences}
        if self.on_policy < 1:
            parts = {"replaced": [], "taken": []}
            for row, times in occurrences:
                answers: DatasetAnswers = "taken" if self._takes_answer(row, step=step) else "replaced"
                parts[answers].append((row, times))

        shards: list[PromptShard] = []
        for answers, of_part in parts.items():
            for start in range(0, len(of_part), self.prompts_per_shard):
                members = of_part[start : start + self.prompts_per_shard]
                shard = PromptShard(
                    base=self.model.base,
                    dataset=self.data.ref,
                    index=first_index + len(shards),
                    rows=tuple(row for row, _ in members),
                    completions=self.completions_per_prompt,
                    repetitions=tuple(times for _, times in members),
                    max_prompt_tokens=self.max_prompt_tokens,
                    truncation=self.truncation,
                    segment_seconds=None if answers == "taken" else self.segment_seconds,
                    dataset_answers=answers,
                    resampled=resampled,
                )
                shards.append(shard)
        return shards

    def _takes_answer(self, row: int, *, step: int) -> bool:
        """Whether a step takes the answer of a row. It depends on the run's seed, so that a resumed run and a fork
        decide the same."""
        return self.model.workspace.seed_for("on_policy", step, row) / (1 << 63) >= self.on_policy


@dataclass(frozen=True)
class Refill:
    """Dynamic sampling (DAPO, arXiv:2503.14476): draws further prompts until enough groups have different rewards.

    All groups are collected. The batch leaves out those with equal rewards.
    """

    max_extra_draws: int
    """The largest number of draws after the first."""
    on_shortfall: RefillEnd
    """What happens if the draws do not fill the batch: "short" trains on a smaller batch, "fail" ends the run."""


@dataclass(frozen=True)
class RolloutCollector:
    """Collects the rollouts of one step."""

    prompts: PromptShards
    source: RolloutSource
    refill: Refill | None = None
    shards_at_once: int = SHARDS_AT_ONCE
    staleness: int = 0
    """Steps that the sampling policy may be behind. Pools of prompts know no later grades than that policy."""

    async def collect(self, policy: PolicyRef, cursor: DataCursor, *, step: int) -> CollectedRollouts:
        """Collects the rollouts of 0-based `step`, sampled from `policy`. A committed shard is not sampled again.
        Raises BatchNotFilled."""
        rollouts: list[ArtifactRef] = []
        graded: list[ArtifactRef] = []
        rows: list[int] = []
        cursor_out = cursor
        missing = self.prompts.prompts_per_step
        order = self.prompts.order
        if isinstance(order, PoolOrder):
            await asyncio.to_thread(order.catch_up, step, self.staleness, self._reader(policy, order))
        draws = 1
        if self.refill is not None:
            draws += self.refill.max_extra_draws
        for _ in range(draws):
            new_rows, cursor_out = order.take(cursor_out, missing)
            shards = self.prompts.shards(new_rows, earlier_rows=rows, first_index=len(rollouts), step=step)
            new_rollouts, new_graded = await self.sample_and_grade(policy, shards, step=step)
            rows += new_rows
            rollouts += new_rollouts
            graded += new_graded
            if self.refill is None:
                break
            # a group with equal rewards has no gradient, so another prompt is drawn instead
            missing = self.prompts.prompts_per_step - await self._count_informative_prompts(graded)
            if missing <= 0:
                break
        # fail if the draws of dynamic sampling did not fill the batch
        if self.refill is not None and missing > 0 and self.refill.on_shortfall == "fail":
            raise BatchNotFilled(
                f"step {step + 1}: after {draws} draws of prompts, {missing} of {self.prompts.prompts_per_step} groups "
                "are still missing, because all rewards of the other groups are equal or missing. Raise "
                "max_refill_rounds, set refill_end='short', or give prompts that the model sometimes solves"
            )
        # without dynamic sampling: sample the same prompts once more if no completion got a grade
        if self.refill is None and self.source.samples_again and not await self._has_grades(graded):
            again = self.prompts.shards(
                rows, earlier_rows=rows, first_index=len(rollouts), step=step, resampled=True
            )
            new_rollouts, new_graded = await self.sample_and_grade(policy, again, step=step)
            rollouts += new_rollouts
            graded += new_graded
        return CollectedRollouts(rollouts, graded, cursor, cursor_out)

    def cursor_after(self, cursor: DataCursor) -> DataCursor | None:
        """The position after a step that begins at `cursor`. None if it is known only when the step is collected: it
        depends on the step's grades, or steps must draw in their order."""
        if self.refill is not None or isinstance(self.prompts.order, PoolOrder):
            return None
        return self.prompts.order.take(cursor, self.prompts.prompts_per_step)[1]

    async def sample_and_grade(
        self, policy: PolicyRef, shards: list[PromptShard], *, step: int
    ) -> tuple[list[ArtifactRef], list[ArtifactRef]]:
        """The rollouts of each shard, and their grades. A shard is graded as soon as it is sampled, while the engine
        samples other shards. At most `shards_at_once` are sampled or graded at a time. The first error cancels the work
        on the other shards and is raised."""
        model = self.prompts.model

        async def one_shard(shard: PromptShard) -> tuple[ArtifactRef, ArtifactRef]:
            return await self.source.sample_and_grade(model.workspace, policy, shard, model.sampling, step=step)

        of_shards = await async_map(one_shard, shards, at_once=self.shards_at_once)
        return [rollouts for rollouts, _ in of_shards], [graded for _, graded in of_shards]

    def _reader(self, policy: PolicyRef, order: PoolOrder) -> ReadStep:
        """Reads the prompts of a committed step of the policy's chain, with their pass rates."""
        chain, correct_from = self.prompts.model.chain_of(policy), order.settings.correct_from

        def read(step: int) -> MeasuredPrompts:
            inputs = step_inputs(chain.store, chain.committed_record(step + 1))
            # a fork may have other prompts than the steps that it shares
            if self.prompts.data.ref.sha256 not in {dataset.sha256 for dataset in inputs.datasets}:
                return MeasuredPrompts([], [])
            rates = read_grades(chain.store, list(inputs.graded or inputs.rollouts)).pass_rates(correct_from)
            return MeasuredPrompts(list(rates), list(rates.values()))

        return read

    async def _has_grades(self, graded: list[ArtifactRef]) -> bool:
        """Whether a completion got a grade."""
        return await asyncio.to_thread(has_grades, self.prompts.model.workspace.open_store(), graded)

    async def _count_informative_prompts(self, graded: list[ArtifactRef]) -> int:
        """The number of prompts whose completions have different rewards."""
        store = self.prompts.model.workspace.open_store()
        return await asyncio.to_thread(count_informative_prompts, store, graded)


@dataclass
class RolloutLookahead:
    """Collects the rollouts of step after step, `staleness` steps ahead of training.

    The rollouts of the 0-based step k are always sampled from policy max(0, k - staleness), even if a later policy is
    ready, so that the result does not depend on the timing. If weights are updated in flight, that is the oldest policy
    that may sample them, and their tasks take the newest one (tasks.sampling.segments).
    """

    collector: RolloutCollector
    cursor: DataCursor
    """The position in the dataset before the first step that is collected."""
    total_steps: int | None
    staleness: int = 0
    in_flight: bool = False
    """Whether completions that are being sampled get newer weights."""
    _tasks: dict[int, asyncio.Task[CollectedRollouts]] = field(default_factory=dict, init=False)
    """The collections that have been started, by step."""
    _cursors: dict[int, DataCursor] = field(default_factory=dict, init=False)
    """The positions in the dataset before later steps, where they do not depend on grades."""

    def samples_later_from(self, step: int) -> bool:
        """Whether rollouts of a later step come from the policy before the 0-based `step`, which may still be sampled
        when that step is taken."""
        is_needed = self.total_steps is None or step + self.staleness < self.total_steps
        return self.staleness > 0 and is_needed

    def samples_next_from(self, step: int) -> bool:
        """Whether rollouts of a later step may come from the policy after the 0-based `step` once it is taken."""
        if not self.in_flight:
            return False
        all_started = self.total_steps is not None and self.total_steps - 1 in self._tasks
        return not all_started or any(not task.done() for later, task in self._tasks.items() if later > step)

    async def rollouts_for(self, policy: PolicyRef) -> CollectedRollouts:
        """Returns the rollouts that train `policy`. Also starts to collect up to `staleness` later steps."""
        step = policy.step
        last = step + self.staleness
        if self.total_steps is not None:
            last = min(last, self.total_steps - 1)
        for collected_step in range(step, last + 1):
            if collected_step not in self._tasks:
                collection = self._collect(policy, collected_step, self._position_before(collected_step))
                self._tasks[collected_step] = asyncio.create_task(collection)
        collected = await self._tasks[step]
        self._tasks.pop(step - 1, None)
        return collected

    def _position_before(self, step: int) -> DataCursor | asyncio.Task[CollectedRollouts]:
        """The cursor of a step, or the collection that gives it.

        In flight, all completions come from the newest policy, so a step need not wait for late completions of the step
        before. Otherwise its policy is another one, and samplers would load weights back and forth."""
        before = self._tasks.get(step - 1)
        cursor = self.cursor if before is None else self._cursors.pop(step, None)
        if cursor is not None and self.in_flight:
            after = self.collector.cursor_after(cursor)
            if after is not None:
                self._cursors[step + 1] = after
        if cursor is not None:
            return cursor
        assert before is not None
        return before

    async def _collect(
        self, policy: PolicyRef, step: int, position: DataCursor | asyncio.Task[CollectedRollouts]
    ) -> CollectedRollouts:
        cursor = (await position).cursor_out if isinstance(position, asyncio.Task) else position
        # the policy is fixed by the step, and not by which policy is ready first
        sampling_step = max(0, step - self.staleness)
        sampling_policy = policy
        if sampling_step != policy.step:
            chain = self.collector.prompts.model.chain_of(policy)
            sampling_policy = await asyncio.to_thread(chain.policy, sampling_step)
        return await self.collector.collect(sampling_policy, cursor, step=step)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # stop collecting for steps that this process will not take
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
