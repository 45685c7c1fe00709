"""When a loop writes weights, and how it goes on meanwhile: named checkpoints by progress, recovery checkpoints by the
cost of a redo.
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
    """A checkpoint is due; `named` ones are kept, the others are only there to shorten a redo."""

    named: str | None


class CheckpointSchedule:
    """Decides after each step. Cadences by fraction are computed on integers, so 0.2 of 10 steps is exactly every 2."""

    def __init__(self, config: CheckpointConfig | None = None) -> None:
        self.config = config or CheckpointConfig()
        self.retention = self.config.retention
        self._last_write = time.monotonic()

    def due(self, step: int, total_steps: int | None, *, model: str) -> Due | None:
        """What to write after 0-based `step`, if anything."""
        named = self._named(step, total_steps, model)
        recovery = self.config.recovery_steps is not None and (step + 1) % self.config.recovery_steps == 0
        late = time.monotonic() - self._last_write > self.config.recovery_seconds
        if not (named or recovery or late):
            return None
        self._last_write = time.monotonic()
        return Due(named)

    def missed(self, steps_done: int, total_steps: int | None, *, model: str) -> Due | None:
        """The named checkpoint of the last committed step, which a crash may have come before; a resume writes it."""
        named = self._named(steps_done - 1, total_steps, model) if steps_done else None
        return None if named is None else Due(named)

    def _named(self, step: int, total_steps: int | None, model: str) -> str | None:
        if self.config.every_steps is not None:
            return f"{model}-{step + 1}" if (step + 1) % self.config.every_steps == 0 else None
        if self.config.frequency is None or total_steps is None:
            return None
        reached, before = (self._mark(s, total_steps) for s in (step + 1, step))
        return f"{model}-{reached * self.config.frequency:.4g}" if reached > before else None

    def _mark(self, steps_done: int, total_steps: int) -> int:
        """How many multiples of the fraction are reached; 1e-9 forgives the fraction's own rounding."""
        assert self.config.frequency is not None
        return int(steps_done / total_steps / self.config.frequency + 1e-9)


class CheckpointWriter:
    """Checkpoints on their way to storage while the loop takes its next steps; at most one at a time. One that fails
    after its retries fails the loop, at the next one or at the end of the block."""

    def __init__(self, workspace: Workspace, *, retention: Retention) -> None:
        self._workspace, self._retention = workspace, retention
        self._under_way: asyncio.Task[ArtifactRef] | None = None

    async def start(self, policy: PolicyRef, *, name: str | None = None) -> None:
        """Begins to save `policy`, once the checkpoint before it is complete."""
        await self._finish()
        await begin_checkpoint(self._workspace, policy, name=name)  # awaited: the next step moves the weights
        saving = save_checkpoint(self._workspace, policy, name=name, retention=self._retention)
        self._under_way = asyncio.ensure_future(saving)

    async def _finish(self) -> None:
        if self._under_way is not None:
            task, self._under_way = self._under_way, None
            await task

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self._finish()
        elif self._under_way is not None:
            if not issubclass(kind, Exception):
                self._under_way.cancel()  # the run is being ended: the engine saves what it can
            try:
                await self._finish()
            except (EngineError, StorageError, asyncio.CancelledError) as error:
                log.warning("a checkpoint was not completed: %r", error)  # what ended the loop is the story
