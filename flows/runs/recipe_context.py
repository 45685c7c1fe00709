"""The `ctx` of a recipe: its run, the models that train in it, and loops that resume after a crash."""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from engine.handles import TrainingModel
from engine.protocol import Engine
from engine.specs.engine import EngineSpec, LocalEngineSpec
from engine.workspace import Workspace
from flows.loggers import JobNotifier
from flows.runs.code_version import code_version
from flows.runs.input_checks import commits_entry
from flows.runs.session import take_lease
from storage.chain.fork import check_fork
from storage.chain.leases import current_epoch, is_held, release_lease
from storage.chain.records import PolicyRef
from storage.chain.run_record import create_or_check_run
from storage.errors import StorageError
from storage.serialization import canonical_json, digest
from storage.store import keys
from storage.store.artifacts import Provenance
from tasks.graders.setting import set_grading_workspace

log = logging.getLogger(__name__)


class Positioned(Protocol):
    """An iterator whose position can be read and set, such as a DataSet."""

    position: int


@dataclass
class _RecipeState:
    """The state of a recipe in this process."""

    models: list[TrainingModel] = field(default_factory=list)
    """The models that were spawned for training so far."""
    loops_started: int = 0
    devices: int | None = None
    """The engine's number of devices. None until the engine was asked."""


@dataclass(frozen=True)
class RecipeContext:
    """The `ctx` of a recipe: `Model(key).to_builder(ctx)`.

    After a crash a recipe runs again from its first line. Each `optim_step` is committed. A loop over `steps` also
    continues at the iteration that was interrupted:

        async for step in ctx.steps(200, dataset):       # dataset: a DataSet, whose position is restored
            ...
            await model.optim_step(lr)

    Code before such a loop finds the models as they were at the first attempt, so `clone_inf()` returns the same
    reference again. The loop skips the iterations that are finished. In the interrupted iteration, a gradient step
    that was committed is not taken again, while completions are sampled again; on a deterministic engine they have the
    same tokens. A plain `while` loop around `optim_step` also has atomic steps, but restarts its count while the model
    keeps its progress.
    """

    workspace: Workspace
    _state: _RecipeState = field(default_factory=_RecipeState, compare=False, repr=False)

    @classmethod
    def open(
        cls,
        run: str,
        *,
        store: str = "ostinato-data",
        seed: int = 0,
        engine: EngineSpec | None = None,
        semantic: dict[str, Any] | None = None,
        hub: dict[str, str] | None = None,
    ) -> Self:
        """Creates or reopens the run and takes its lease. A reopened run continues after its last committed step.

        `semantic` holds the values that decide the result. The same key with other values raises SemanticMismatch.
        Without it, the values that the recipe passes to its training classes are not compared. `hub` holds the commits
        of the hub's branches that the run uses, by their addresses.
        """
        # provenance of all artifacts that the recipe commits
        body = {"recipe": run} if semantic is None else {"recipe": run} | semantic
        provenance = Provenance(code_version=code_version(), config_digest=digest(canonical_json(body)), seed=seed)
        workspace = Workspace(
            store=store, engine=engine or LocalEngineSpec(), run=run, seed=seed, provenance=provenance, hub=hub or {}
        )
        # create the run, or check that its semantic values are the same
        check_fork(workspace.open_store(), run)
        create_or_check_run(
            workspace.open_store(),
            run,
            semantic={"seed": seed} | (semantic or {}),
            other={"engine": workspace.engine.model_dump(mode="json"), "storage": {"url": store}}
            | commits_entry(workspace.hub),
            code_version=provenance.code_version,
        )
        # graders that the recipe sets up work on behalf of this run
        ctx = cls(take_lease(workspace))
        # a flow of recipe_main releases the lease at its end; a script has only the end of its process
        atexit.register(_release_at_exit, ctx.workspace, os.getpid())
        set_grading_workspace(ctx)
        return ctx

    @property
    def client(self) -> Engine:
        """The engine, for code that calls it directly or passes it to a grader."""
        return self.workspace.connect()

    @property
    def job(self) -> JobNotifier:
        """Reports the progress of the recipe's stages."""
        return JobNotifier(self.workspace.run)

    @property
    def world_size(self) -> int:
        """Number of devices of the engine. `tp(ctx.world_size)` spreads a sampled model over all of them."""
        if self._state.devices is None:
            # in a thread of its own, because an event loop is running when this property is read
            with ThreadPoolExecutor(max_workers=1) as thread:
                info = thread.submit(asyncio.run, self.workspace.connect().info()).result()
            self._state.devices = info.devices
        return self._state.devices

    def spawned(self, model: TrainingModel) -> None:
        """Registers a model. A builder calls it for each model that it spawns for training.

        Raises ValueError if another model of the recipe has this name, because both would write to the same chain.
        """
        if any(other.name == model.name for other in self._state.models):
            raise ValueError(f"a model named {model.name!r} was spawned already in this recipe; give it another name")
        # a later attempt replays the code before the first loop on the models of the first attempt
        if self._finished_iterations(0):
            model.reuse_committed_steps()
        self._state.models.append(model)

    async def steps(self, n: int, *cursors: Positioned) -> AsyncIterator[int]:
        """Yields the iterations 0 … n-1 that no earlier attempt of the recipe has finished.

        Before the first of them, the models spawned so far and the `cursors` are set to their state at that point.
        """
        loop = self._state.loops_started
        self._state.loops_started += 1
        finished = self._finished_iterations(loop)
        if finished:
            await self._restore(loop, finished[-1], cursors)
        else:
            for model in self._state.models:
                # a training class may have begun the stage already, and counts the steps of its stage
                if not (await model.policy()).stage.endswith("-recipe"):
                    await model.begin_stage("recipe")
            await self._mark(loop, 0, cursors)
        for step in range(finished[-1] if finished else 0, n):
            yield step
            await self._mark(loop, step + 1, cursors)

    def _finished_iterations(self, loop: int) -> list[int]:
        """The counts of finished iterations that were recorded for a loop, in increasing order."""
        infos = self.workspace.open_store().list(keys.loop_prefix(self.workspace.run, loop))
        counts = (keys.parse_number(info.key) for info in infos)
        return sorted(count for count in counts if count is not None)

    async def _mark(self, loop: int, finished: int, cursors: tuple[Positioned, ...]) -> None:
        """Records the policies and cursor positions after `finished` iterations of a loop."""
        # the first mark of an iteration stays, so that a retry does not change it
        policies = {model.name: (await model.policy()).model_dump() for model in self._state.models}
        body = {"policies": policies, "cursors": [cursor.position for cursor in cursors]}
        key = keys.loop_mark(self.workspace.run, loop, finished)
        self.workspace.open_store().put_if_absent(key, canonical_json(body))

    async def _restore(self, loop: int, finished: int, cursors: tuple[Positioned, ...]) -> None:
        """Sets models and cursors to their state after `finished` iterations of a loop."""
        body = json.loads(self.workspace.open_store().get(keys.loop_mark(self.workspace.run, loop, finished)))
        for model in self._state.models:
            if model.name in body["policies"]:
                model.resume_from(PolicyRef.model_validate(body["policies"][model.name]))
        # a changed recipe may have another number of cursors
        for cursor, position in zip(cursors, body["cursors"], strict=False):
            cursor.position = position


def _release_at_exit(workspace: Workspace, pid: int) -> None:
    """Releases the lease that the process `pid` took, unless it is released or another process has taken it."""
    if os.getpid() != pid:
        # a forked process inherits the call
        return
    try:
        store = workspace.open_store()
        if current_epoch(store, workspace.run) == workspace.epoch and is_held(store, workspace.run):
            release_lease(store, workspace.run, workspace.epoch)
    except (StorageError, RuntimeError) as error:
        # a store may need threads, which no longer start at this point
        log.warning("the lease of run %s was not released: %s", workspace.run, error)
