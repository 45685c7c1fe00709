"""When a training loop writes checkpoints, and how it continues while one is being written.

Named checkpoints follow the progress of the run. Recovery checkpoints follow the number of steps and the time, and
limit how much work a crash repeats. The loop waits until the engine has copied the weights, and never for the upload of
a recovery checkpoint: the next one begins when the last is committed and the interval has passed since. The interval
grows where copying would take more than MAX_COPY_SHARE of the time.

A checkpoint of a share of the run (`frequency`) is skipped if it would follow the last one too soon (`MIN_SECONDS`,
`SAVES_BETWEEN`) or while another is being saved. Its step gets the name all the same, so that the names of a run do not
depend on its speed: a policy without a checkpoint is computed from an earlier one. Checkpoints at intervals of steps,
and those of the last step, are never skipped. The end of the run waits for them; the engine holds a few of them on its
disk and makes the next one wait if there are more (`engine.local.saving`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from engine.errors import EngineError
from engine.workspace import Workspace
from flows.configs.common import CheckpointConfig
from storage.chain.checkpoint_names import name_step, share_name
from storage.chain.records import PolicyRef
from storage.chain.retention import Retention
from storage.errors import StorageError
from tasks.train import begin_checkpoint, save_checkpoint

log = logging.getLogger(__name__)

MIN_SECONDS = 60.0
"""Shortest time between two checkpoints of which the second is one of a share of the run."""
SAVES_BETWEEN = 10.0
"""The same, as a multiple of the time that the last checkpoint took to be saved."""
MAX_COPY_SHARE = 0.02
"""Largest share of the time for which recovery checkpoints stop the training: the engine copies the weights. Digests
and weight syncs take further shares; docs/scaling.md has the sum."""


@dataclass(frozen=True)
class Due:
    """A checkpoint that is to be written."""

    named: str | None
    """Its name, or None for a recovery checkpoint."""
    name_only: bool = False
    """Whether only the name is written, because the last checkpoint is recent."""


class CheckpointSchedule:
    """Decides after each step whether a checkpoint is due."""

    def __init__(self, config: CheckpointConfig | None = None) -> None:
        self.config = config or CheckpointConfig()
        self.retention = self.config.retention
        self._last_end = time.monotonic()
        """When the last checkpoint was committed, or begun if it is not committed yet."""
        self._saving = 0
        self._copy_seconds, self._save_seconds = 0.0, 0.0
        self._recovery_step_passed = False
        """Whether a step of `recovery_steps` has come since the last checkpoint."""

    def due(self, step: int, total_steps: int | None, *, model: str) -> Due | None:
        """The checkpoint to write after 0-based `step`, or None."""
        named = self._named(step, total_steps, model)
        # a named checkpoint is a recovery checkpoint too
        self._recovery_step_passed |= self._is_recovery_step(step)
        by_time = self._seconds_since_last() > self.recovery_seconds
        recovery = (self._recovery_step_passed or by_time) and not self._saving
        if not (named or recovery):
            return None
        if not recovery and self._is_skipped(step, total_steps):
            return Due(named, name_only=True)
        self._last_end, self._recovery_step_passed = time.monotonic(), False
        self._copy_seconds = 0.0
        return Due(named)

    def planned(self, step: int, total_steps: int, *, model: str) -> bool:
        """Whether a checkpoint will be due after 0-based `step`, apart from those that are due by time."""
        return self._named(step, total_steps, model) is not None or self._is_recovery_step(step)

    def missed(self, steps_done: int, total_steps: int | None, *, model: str) -> Due | None:
        """The named checkpoint of the last committed step, or None. A resumed run writes it, because a crash may have
        come between the commit and the checkpoint."""
        if steps_done == 0:
            return None
        named = self._named(steps_done - 1, total_steps, model)
        if named is None:
            return None
        return Due(named, name_only=self._is_skipped(steps_done - 1, total_steps))

    @property
    def recovery_seconds(self) -> float:
        """The time from one checkpoint to the beginning of the next recovery checkpoint."""
        return max(self.config.recovery_seconds, self._copy_seconds / MAX_COPY_SHARE)

    @property
    def longest_redo(self) -> float:
        """Seconds of training that a kill repeats at most, if the next checkpoint takes as long as the last one: the
        steps between the copy of a checkpoint and the commit of the next."""
        return self.recovery_seconds + 2 * self._save_seconds

    def begun(self, seconds: float) -> None:
        """Notes that the engine has copied the weights of a model, for which the loop waited `seconds`. The copies of
        several models are added up."""
        self._copy_seconds += seconds
        self._saving += 1

    def ended(self, seconds: float) -> None:
        """Notes that a checkpoint was saved, or failed, `seconds` after it had begun."""
        self._last_end, self._save_seconds = time.monotonic(), seconds
        self._saving -= 1

    def _is_skipped(self, step: int, total_steps: int | None) -> bool:
        """Whether the checkpoint of a share of the run is skipped after 0-based `step`."""
        if self.config.every_steps is not None or step + 1 == total_steps:
            return False
        return self._saving > 0 or self._seconds_since_last() < max(MIN_SECONDS, SAVES_BETWEEN * self._save_seconds)

    def _seconds_since_last(self) -> float:
        return time.monotonic() - self._last_end

    def _is_recovery_step(self, step: int) -> bool:
        recovery_steps = self.config.recovery_steps
        return recovery_steps is not None and (step + 1) % recovery_steps == 0

    def _named(self, step: int, total_steps: int | None, model: str) -> str | None:
        """The name of the checkpoint after 0-based `step`, or None."""
        frequency, every_steps = self.config.frequency, self.config.every_steps
        if every_steps is not None:
            return f"{model}-{step + 1}" if (step + 1) % every_steps == 0 else None
        if frequency is None or total_steps is None:
            return None
        # due when the step reaches a further multiple of the fraction
        reached = _multiples(step + 1, total_steps, frequency)
        if reached == _multiples(step, total_steps, frequency):
            return None
        return share_name(model, reached * frequency)


def _multiples(steps_done: int, total_steps: int, frequency: float) -> int:
    """The number of multiples of the fraction `frequency` that the run has reached."""
    # the tolerance corrects rounding errors: 0.2 of 10 steps is exactly every second step
    return int(steps_done / total_steps / frequency + 1e-9)


class CheckpointWriter:
    """Writes checkpoints to the store while the loop takes its next steps.

    If a checkpoint fails after its retries, the loop fails at the next checkpoint or at the end of the block.
    """

    def __init__(
        self,
        workspace: Workspace,
        schedule: CheckpointSchedule,
        *,
        on_saved: Callable[[PolicyRef, float], None] = lambda policy, seconds: None,
    ) -> None:
        """`on_saved` is called with the policy of each checkpoint and its duration in seconds. It is called once for a
        step that is saved again at the end of the run."""
        self._workspace, self._schedule, self._on_saved = workspace, schedule, on_saved
        self._saving: asyncio.Task[None] | None = None
        self._saved: dict[str, PolicyRef] = {}
        """The policy of the last checkpoint of each model."""

    async def write(self, policies: Sequence[PolicyRef], due: Due) -> None:
        """Begins to save the checkpoint that is due of each model. The name belongs to the first of `policies`."""
        if due.name_only and due.named is not None:
            await asyncio.to_thread(name_step, self._workspace.open_store(), policies[0], due.named)
            return
        for number, policy in enumerate(policies):
            await self._start(policy, due.named if number == 0 else None, self._schedule.retention)

    async def write_last(self, policies: Sequence[PolicyRef]) -> None:
        """Begins to save the last policy of each model, and then to delete what a finished run does not need."""
        for policy in policies:
            await self._start(policy, None, self._schedule.retention.of_finished())

    async def _start(self, policy: PolicyRef, name: str | None, retention: Retention) -> None:
        """Begins to save `policy`. Raises the error of an earlier checkpoint that failed."""
        if self._saving is not None and self._saving.done():
            await self._finish()
        # wait for the engine's copy of the weights, which the next step changes
        started = time.monotonic()
        await begin_checkpoint(self._workspace, policy, name=name)
        self._schedule.begun(time.monotonic() - started)
        self._saving = asyncio.ensure_future(self._save(self._saving, policy, name, retention))

    async def _save(
        self, previous: asyncio.Task[None] | None, policy: PolicyRef, name: str | None, retention: Retention
    ) -> None:
        """Completes the previous checkpoint, and then this one."""
        started = time.monotonic()
        try:
            if previous is not None:
                await previous
            await save_checkpoint(self._workspace, policy, name=name, retention=retention)
        finally:
            self._schedule.ended(time.monotonic() - started)
        if self._saved.get(policy.model) != policy:
            self._saved[policy.model] = policy
            self._on_saved(policy, time.monotonic() - started)

    async def _finish(self) -> None:
        if self._saving is not None:
            task, self._saving = self._saving, None
            await task

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self._finish()
        elif self._saving is not None:
            # a cancelled run does not wait for the store; the engine saves what it can
            if not issubclass(kind, Exception):
                self._saving.cancel()
            try:
                await self._finish()
            except (EngineError, StorageError, asyncio.CancelledError) as error:
                # a warning only: the exception that ended the loop must not be replaced
                log.warning("a checkpoint was not completed: %r", error)
