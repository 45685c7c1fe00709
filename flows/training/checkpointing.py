"""When a training loop writes checkpoints, and how it continues while one is being written.

Named checkpoints follow the progress of the run. Recovery checkpoints follow the number of steps and the time, and
limit how much work a crash repeats.

A checkpoint of a share of the run (`frequency`) is skipped if it would follow the last one too soon (`MIN_SECONDS`,
`SAVES_BETWEEN`). Its step gets the name all the same, so that the names of a run do not depend on its speed: a policy
without a checkpoint is computed from an earlier one. Checkpoints at intervals of steps, and those of the last step, are
never skipped.
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
        self._last_write = time.monotonic()
        self._save_seconds = 0.0

    def due(self, step: int, total_steps: int | None, *, model: str) -> Due | None:
        """The checkpoint to write after 0-based `step`, or None."""
        named = self._named(step, total_steps, model)
        # a named checkpoint is a recovery checkpoint too
        by_steps = self._is_recovery_step(step)
        by_time = self._seconds_since_last() > self.config.recovery_seconds
        if not (named or by_steps or by_time):
            return None
        if not (by_steps or by_time) and self._is_skipped(step, total_steps):
            return Due(named, name_only=True)
        self._last_write = time.monotonic()
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

    def saved(self, seconds: float) -> None:
        """Notes how long the last checkpoint took to be saved."""
        self._save_seconds = seconds

    def _is_skipped(self, step: int, total_steps: int | None) -> bool:
        """Whether the checkpoint of a share of the run is skipped after 0-based `step`."""
        if self.config.every_steps is not None or step + 1 == total_steps:
            return False
        return self._seconds_since_last() < max(MIN_SECONDS, SAVES_BETWEEN * self._save_seconds)

    def _seconds_since_last(self) -> float:
        return time.monotonic() - self._last_write

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
    """Writes checkpoints to the store while the loop takes its next steps, at most one at a time.

    If a checkpoint fails after its retries, the loop fails at the next checkpoint or at the end of the block.
    """

    def __init__(
        self,
        workspace: Workspace,
        schedule: CheckpointSchedule,
        *,
        on_saved: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """`on_saved` is called with the duration of each checkpoint in seconds."""
        self._workspace, self._schedule, self._on_saved = workspace, schedule, on_saved
        self._saving: asyncio.Task[None] | None = None

    async def write(self, policies: Sequence[PolicyRef], due: Due) -> None:
        """Begins to save the checkpoint that is due of each model. The name belongs to the first of `policies`."""
        if due.name_only and due.named is not None:
            name_step(self._workspace.open_store(), policies[0], due.named)
            return
        for number, policy in enumerate(policies):
            await self._start(policy, due.named if number == 0 else None, self._schedule.retention)

    async def write_last(self, policies: Sequence[PolicyRef]) -> None:
        """Begins to save the last policy of each model, and then to delete what a finished run does not need."""
        for policy in policies:
            await self._start(policy, None, self._schedule.retention.of_finished())

    async def _start(self, policy: PolicyRef, name: str | None, retention: Retention) -> None:
        """Begins to save `policy`, after the previous checkpoint is complete."""
        await self._finish()
        # wait for the engine's copy of the weights, which the next step changes
        await begin_checkpoint(self._workspace, policy, name=name)
        self._saving = asyncio.ensure_future(self._save(policy, name, retention))

    async def _save(self, policy: PolicyRef, name: str | None, retention: Retention) -> None:
        started = time.monotonic()
        await save_checkpoint(self._workspace, policy, name=name, retention=retention)
        seconds = time.monotonic() - started
        self._schedule.saved(seconds)
        self._on_saved(seconds)

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
