"""When a training loop writes checkpoints, and how it continues while one is being written.

Named checkpoints follow the progress of the run and are kept. Recovery checkpoints follow the number of steps and the
time, and limit how much work a crash repeats.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Self

from engine.errors import EngineError
from engine.workspace import Workspace
from flows.configs.common import CheckpointConfig
from storage.chain.records import PolicyRef
from storage.chain.retention import Retention
from storage.errors import StorageError
from storage.store.artifacts import ArtifactRef
from tasks.checkpoint import begin_checkpoint, save_checkpoint

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Due:
    """A checkpoint that is to be written."""

    named: str | None
    """Its name, or None for a recovery checkpoint."""


class CheckpointSchedule:
    """Decides after each step whether a checkpoint is due."""

    def __init__(self, config: CheckpointConfig | None = None) -> None:
        self.config = config or CheckpointConfig()
        self.retention = self.config.retention
        self._last_write = time.monotonic()

    def due(self, step: int, total_steps: int | None, *, model: str) -> Due | None:
        """The checkpoint to write after 0-based `step`, or None."""
        named = self._named(step, total_steps, model)
        # a named checkpoint is a recovery checkpoint too
        recovery_steps = self.config.recovery_steps
        by_steps = recovery_steps is not None and (step + 1) % recovery_steps == 0
        by_time = time.monotonic() - self._last_write > self.config.recovery_seconds
        if not (named or by_steps or by_time):
            return None
        self._last_write = time.monotonic()
        return Due(named)

    def missed(self, steps_done: int, total_steps: int | None, *, model: str) -> Due | None:
        """The named checkpoint of the last committed step, or None. A resumed run writes it, because a crash may have
        come between the commit and the checkpoint."""
        if steps_done == 0:
            return None
        named = self._named(steps_done - 1, total_steps, model)
        return None if named is None else Due(named)

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
        return f"{model}-{reached * frequency:.4g}"


def _multiples(steps_done: int, total_steps: int, frequency: float) -> int:
    """The number of multiples of the fraction `frequency` that the run has reached."""
    # the tolerance corrects rounding errors: 0.2 of 10 steps is exactly every second step
    return int(steps_done / total_steps / frequency + 1e-9)


class CheckpointWriter:
    """Writes checkpoints to the store while the loop takes its next steps, at most one at a time.

    If a checkpoint fails after its retries, the loop fails at the next checkpoint or at the end of the block.
    """

    def __init__(self, workspace: Workspace, *, retention: Retention) -> None:
        self._workspace, self._retention = workspace, retention
        self._saving: asyncio.Task[ArtifactRef] | None = None

    async def start(self, policy: PolicyRef, *, name: str | None = None) -> None:
        """Begins to save `policy`, after the previous checkpoint is complete."""
        await self._finish()
        # wait for the engine's copy of the weights, which the next step changes
        await begin_checkpoint(self._workspace, policy, name=name)
        saving = save_checkpoint(self._workspace, policy, name=name, retention=self._retention)
        self._saving = asyncio.ensure_future(saving)

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
