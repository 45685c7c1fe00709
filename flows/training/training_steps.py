"""The steps of a training loop, with what every loop does around its algorithm.

    async with training_steps(self, total_steps) as steps:
        async for step in steps:
            batch = await prepare_batch(...)
            policy = await take_gradient_step(workspace, request, step=step.index)
            step.complete(policy)

A resumed loop begins after the last committed step. After each step, its metrics are stored and shown, the callbacks
that are due are called, and a checkpoint is written if one is due. When the loop raises, leaving the block waits for a
checkpoint that is being written and closes the display; an async generator alone would not notice the exception.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count

from engine.handles import TrainingModel
from engine.losses.spec import LossSpec
from flows.display.load_progress import format_duration
from flows.training.checkpointing import CheckpointWriter, Due
from flows.training.endings import Ending, Patience, UseMeter, budget_ending, read_history, use_after
from flows.training.idle_steps import IdleSteps
from flows.training.rollout_collection import CollectedRollouts
from flows.training.step_reporter import StepReporter, TimeLeft, kind_of_work
from flows.training.training_loop import TrainingLoop
from storage.chain.records import CommitRecord, PolicyRef, RunUse
from tasks.datasets.load import LoadedDataset
from tasks.datasets.order import DataCursor

CHECKPOINT = "checkpoint"
"""The kind of work under which the beginning of a checkpoint is measured, for which the loop waits."""
LAST_CHECKPOINT = "last checkpoint"
"""The kind of work under which complete checkpoints are measured. The loop waits for the last one only."""


class TrainingStep:
    """One step of a loop, with the policies that it starts from. A complete step also has the new policies."""

    def __init__(self, index: int, policies: Sequence[PolicyRef]) -> None:
        self.index = index
        """0-based."""
        self.policies = tuple(policies)
        """The last policy of each model, in the order of the models."""
        self.results: tuple[PolicyRef, ...] = ()
        self.collected: CollectedRollouts | None = None

    @property
    def policy(self) -> PolicyRef:
        """The policy that the step starts from; with several models, that of the first."""
        return self.policies[0]

    def complete(self, *results: PolicyRef, collected: CollectedRollouts | None = None) -> None:
        """Ends the step. `results` are its committed policies, `collected` are the rollouts that it trained on."""
        self.results, self.collected = results, collected


class TrainingSteps:
    """The remaining steps of a stage. Created by `training_steps`."""

    def __init__(
        self,
        loop: TrainingLoop,
        models: Sequence[TrainingModel],
        policies: Sequence[PolicyRef],
        total_steps: int | None,
        checkpoints: CheckpointWriter,
        reporter: StepReporter,
        patience: Patience,
    ) -> None:
        self.policies = tuple(policies)
        """The policy of each model after the last committed step."""
        self.total_steps = total_steps
        self._loop, self._models = loop, models
        self._checkpoints, self._reporter = checkpoints, reporter
        self._patience = patience
        self._idle = IdleSteps(
            reporter.chain, last_step=self.policy.step, limit=loop.rules.max_idle_steps, note=loop.logger.note
        )

    @property
    def policy(self) -> PolicyRef:
        """The policy after the last committed step; with several models, that of the first."""
        return self.policies[0]

    @property
    def last_record(self) -> CommitRecord | None:
        """The record of the last committed step of the stage; None before the first."""
        return self._reporter.last_record

    @property
    def cursor(self) -> DataCursor:
        """The position in the dataset after the last committed step."""
        return self._reporter.cursor()

    async def begin(self) -> None:
        """Writes the checkpoint and calls the callbacks of the last committed step, in case a crash prevented them.
        Raises NothingLearned if an earlier attempt ended with that."""
        self._idle.check(self.policy.step)
        budget = None
        if self.last_record is not None:
            used = await asyncio.to_thread(use_after, self._reporter.store, self.policy)
            budget = budget_ending(self._loop.rules, used, self.policy.step)
        due = self._loop.checkpoints.missed(self.policy.step, self.total_steps, model=self._loop.model.name)
        if due is not None:
            await self._write_checkpoint(self.policies[:1], due)
        await self._measure_and_end(budget)

    async def __aiter__(self) -> AsyncIterator[TrainingStep]:
        for index in _indices(self.policy.step, self.total_steps):
            if self._loop.ending is not None:
                return
            step = TrainingStep(index, self.policies)
            yield step
            await self._finish(step)

    async def save(self) -> None:
        """Begins to save the last weights of every model."""
        with self._reporter.time_left.measure(CHECKPOINT):
            await self._checkpoints.write_last(self.policies)

    async def _measure_and_end(self, budget: Ending | None, collected: CollectedRollouts | None = None) -> None:
        """Calls the callbacks that are due, and decides whether the run ends here. `budget`: the ending by a budget."""
        step, reporter = self.policy.step, self._reporter
        is_last = step == self.total_steps
        # the last step of a run with a budget is only known now
        total_steps = step if budget is not None else self.total_steps
        self._patience.add(await reporter.call(self._loop.callbacks, collected, total_steps=total_steps))
        ending = budget or self._patience.ending(step)
        if ending is None or is_last:
            return
        self._loop.ending = ending
        of_total = "" if self.total_steps is None else f" of {self.total_steps}"
        self._loop.logger.note(f"the run ends after step {step}{of_total}: {ending.reason}")

    async def _write_checkpoint(self, policies: Sequence[PolicyRef], due: Due) -> None:
        """Begins to save the checkpoint that is due of each model."""
        with self._reporter.time_left.measure(CHECKPOINT):
            await self._checkpoints.write(policies, due)

    async def _finish(self, step: TrainingStep) -> None:
        """Records a complete step, shows it, calls what is due and saves what is due. Raises NothingLearned."""
        if len(step.results) != len(self._models):
            raise RuntimeError(f"step {step.index + 1} ended without step.complete(...) with the policy of each model")
        self.policies = step.results
        # the models now sample and train from the new policies
        for model, policy in zip(self._models, self.policies, strict=True):
            model.set_policy(policy)
        # report the step, then call and save what is due
        record = await self._reporter.record(self.policy, step.collected)
        self._idle.add(record)
        # the budgets see what the record says, so that a resumed run ends after the same step
        tokens = self._reporter.tokens_sampled
        self._loop.use.add_tokens(tokens)
        used = record.request.used or RunUse()
        used = used.model_copy(update={"tokens_sampled": used.tokens_sampled + tokens})
        await self._measure_and_end(budget_ending(self._loop.rules, used, self.policy.step), step.collected)
        due = self._loop.checkpoints.due(step.index, self.total_steps, model=self._loop.model.name)
        if due is not None:
            await self._write_checkpoint(self.policies, due)
        self._idle.check(self.policy.step)


@asynccontextmanager
async def training_steps(
    loop: TrainingLoop,
    total_steps: int | None,
    *,
    further_models: Sequence[TrainingModel] = (),
    loss: LossSpec | None = None,
    reference: PolicyRef | None = None,
    data: LoadedDataset | None = None,
) -> AsyncIterator[TrainingSteps]:
    """The steps of an open stage, from the last committed one to `total_steps` (None: without an end).

    Args:
        loop: the training class, with its stage open.
        further_models: models that are trained together with `loop.model`. A step is complete when all have taken it.
        loss: what a validation loss measures, for a loop that trains on a dataset.
        reference: the policy that `loss` compares with.
        data: the dataset that the cursor is in. The metrics of a mixture say what a step took from each part.
    """
    # resume after the last step that all models have committed
    models = (loop.model, *further_models)
    policies = await _last_common_policies(models)
    if loop.rules.patience is not None and not loop.callbacks:
        raise ValueError(
            f"patience={loop.rules.patience} counts measurements on held-out rows, and there are none; give callbacks, "
            "such as ValidationLoss or GraderEvaluation, or leave patience out"
        )
    store, info = loop.model.workspace.open_store(), await loop.model.workspace.connect().info()
    loop.ending = None
    used = await asyncio.to_thread(use_after, store, policies[0])
    if loop.earlier_use is not None and policies[0].step == 0:
        used = loop.earlier_use
    loop.use = UseMeter(used, info)
    history = []
    if loop.rules.patience is not None:
        history = await asyncio.to_thread(read_history, store, policies[0])
    patience = Patience(loop.rules.patience, history)
    time_left = time_left_of(loop, policies[0].step, total_steps)
    # both are closed when the loop ends, also by an exception
    async with (
        CheckpointWriter(
            loop.model.workspace, loop.checkpoints, on_saved=partial(_checkpoint_saved, loop, time_left, total_steps)
        ) as checkpoints,
        StepReporter(
            loop.model,
            policies[0],
            loop.logger,
            total_steps=total_steps,
            loss=loss,
            reference=reference,
            notifier=loop.notifier,
            time_left=time_left,
        ) as reporter,
    ):
        reporter.parts = data.parts if data else ()
        steps = TrainingSteps(loop, models, policies, total_steps, checkpoints, reporter, patience)
        await steps.begin()
        yield steps
        await steps.save()


def time_left_of(loop: TrainingLoop, first_step: int, total_steps: int | None) -> TimeLeft:
    """The estimate of the remaining time, with everything that is due besides the steps."""
    if total_steps is None:
        return TimeLeft(None, {})
    model, steps_done = loop.model.name, range(first_step + 1, total_steps + 1)
    # the loop waits until a checkpoint has begun; the last one it waits for completely
    checkpoints = [done for done in steps_done if loop.checkpoints.planned(done - 1, total_steps, model=model)]
    planned = {CHECKPOINT: [*checkpoints, total_steps], LAST_CHECKPOINT: [total_steps]}
    for number, callback in enumerate(loop.callbacks):
        due = [done for done in steps_done if callback.cadence.due(done, total_steps)]
        planned.setdefault(kind_of_work(number, callback), []).extend(due)
    return TimeLeft(total_steps, {kind: sorted(due) for kind, due in planned.items()})


def _checkpoint_saved(
    loop: TrainingLoop, time_left: TimeLeft, total_steps: int | None, policy: PolicyRef, seconds: float
) -> None:
    """Records how long a checkpoint took, and says what a kill would cost from now on. After the last step it costs
    nothing."""
    time_left.record(LAST_CHECKPOINT, seconds)
    line = f"checkpoint of step {policy.step} of {policy.model} saved in {format_duration(seconds)}"
    if policy.step != total_steps and loop.ending is None:
        redo = format_duration(loop.checkpoints.longest_redo)
        line += f"; until the next one, a kill repeats up to about {redo} of training"
    loop.logger.note(line)


async def _last_common_policies(models: Sequence[TrainingModel]) -> list[PolicyRef]:
    """The policy of each model after the last step that all of them have committed."""
    policies = [await model.policy() for model in models]
    steps_done = min(policy.step for policy in policies)
    for number, model in enumerate(models):
        if policies[number].step > steps_done:
            policies[number] = model.chain_of(policies[number]).policy(steps_done)
    return policies


def _indices(first: int, total_steps: int | None) -> Iterator[int]:
    """first, first + 1, …, total_steps - 1. Endless if `total_steps` is None."""
    if total_steps is None:
        return iter(count(first))
    return iter(range(first, total_steps))
