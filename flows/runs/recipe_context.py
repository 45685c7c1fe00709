"""The `ctx` of a recipe: a run of its own, the models that train in it, and loops that resume."""

from __future__ import annotations

import asyncio
import json
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
from flows.runs.session import take_lease
from storage.chain.fork import check_fork
from storage.chain.records import PolicyRef
from storage.chain.run_record import create_or_check_run
from storage.serialization import canonical_json, digest
from storage.store import keys
from storage.store.artifacts import Provenance
from tasks.graders.running.workspace import set_grading_workspace


class Positioned(Protocol):
    """What a loop can bring back to where it was: a DataSet."""

    position: int


@dataclass
class _Loops:
    """What the context of one process knows of its recipe."""

    models: list[TrainingModel] = field(default_factory=list)
    begun: int = 0
    devices: int | None = None
    """Of the engine, once it was asked."""


@dataclass(frozen=True)
class RecipeContext:
    """The `ctx` of a recipe: `Model(key).to_builder(ctx)`.

    A recipe is run again from its first line after a crash. Each `optim_step` is committed; a loop of `steps` also goes
    on where it was:

        async for step in ctx.steps(200, dataset):       # dataset: a DataSet, moved to where it was
            ...
            await model.optim_step(lr)

    Around such a loop everything is as it was at the first attempt: code before it finds the models where they began
    (so `clone_inf()` is the same reference again), the loop skips the iterations that are done, and a step of the
    iteration that was cut off is found instead of taken again. What the iteration's other lines sampled
    is sampled anew, to the same tokens on a deterministic engine. A plain `while` loop around `optim_step` gets atomic
    steps, but begins to count again at a model that has moved on.
    """

    workspace: Workspace
    _loops: _Loops = field(default_factory=_Loops, compare=False, repr=False)

    @classmethod
    def open(
        cls,
        run: str,
        *,
        store: str = "ostinato-data",
        seed: int = 0,
        engine: EngineSpec | None = None,
        semantic: dict[str, Any] | None = None,
    ) -> Self:
        """Creates the run, or opens it again to go on from its last committed step, and takes the lease on it.

        `semantic`: what decides the result, if that is known; another one under the same key is refused
        (SemanticMismatch). Without it a recipe is code: what it passes to its training classes is not compared.
        """
        body = {"recipe": run} if semantic is None else {"recipe": run} | semantic
        provenance = Provenance(code_version=code_version(), config_digest=digest(canonical_json(body)), seed=seed)
        workspace = Workspace(
            store=store, engine=engine or LocalEngineSpec(), run=run, seed=seed, provenance=provenance
        )
        check_fork(workspace.open_store(), run)
        create_or_check_run(
            workspace.open_store(),
            run,
            semantic={"seed": seed} | (semantic or {}),
            other={},
            code_version=provenance.code_version,
        )
        ctx = cls(take_lease(workspace))
        set_grading_workspace(ctx)
        return ctx

    @property
    def client(self) -> Engine:
        """The engine. Code in the documents passes it on; ours finds it in the context."""
        return self.workspace.connect()

    @property
    def job(self) -> JobNotifier:
        """Who hears how far the recipe is."""
        return JobNotifier(self.workspace.run)

    @property
    def world_size(self) -> int:
        """Devices of the engine, which is asked. `tp(ctx.world_size)` spreads a sampled model as far as the sampler can
        spread it."""
        if self._loops.devices is None:
            # in a thread of its own: this property is read in the middle of a running event loop
            with ThreadPoolExecutor(max_workers=1) as thread:
                self._loops.devices = thread.submit(asyncio.run, self.workspace.connect().info()).result().devices
        return self._loops.devices

    def spawned(self, model: TrainingModel) -> None:
        """Called by a builder for each model that it spawns for training. Raises ValueError for a name that another
        model of the recipe has: both would write to the same chain."""
        if any(other.name == model.name for other in self._loops.models):
            raise ValueError(f"a model named {model.name!r} was spawned already in this recipe; give it another name")
        if self._marks(0):
            model.replay()
        self._loops.models.append(model)

    async def steps(self, n: int, *cursors: Positioned) -> AsyncIterator[int]:
        """0 … n-1, from the first that no earlier attempt of the recipe finished. The models spawned so far, and the
        `cursors`, are brought to where they were then."""
        loop, self._loops.begun = self._loops.begun, self._loops.begun + 1
        marks = self._marks(loop)
        if marks:
            await self._bring_back(loop, marks[-1], cursors)
        else:
            for model in self._loops.models:
                if not (await model.policy()).stage.endswith("-recipe"):
                    await model.begin_stage("recipe")  # a training class counts the steps of its stage
            await self._mark(loop, 0, cursors)
        for step in range(marks[-1] if marks else 0, n):
            yield step
            await self._mark(loop, step + 1, cursors)

    def _marks(self, loop: int) -> list[int]:
        """How many iterations were done, mark by mark."""
        found = self.workspace.open_store().list(keys.loop_prefix(self.workspace.run, loop))
        return sorted(done for info in found if (done := keys.parse_number(info.key)) is not None)

    async def _mark(self, loop: int, done: int, cursors: tuple[Positioned, ...]) -> None:
        policies = {model.name: (await model.policy()).model_dump() for model in self._loops.models}
        body = {"policies": policies, "cursors": [cursor.position for cursor in cursors]}
        key = keys.loop_mark(self.workspace.run, loop, done)
        self.workspace.open_store().put_if_absent(key, canonical_json(body))

    async def _bring_back(self, loop: int, done: int, cursors: tuple[Positioned, ...]) -> None:
        body = json.loads(self.workspace.open_store().get(keys.loop_mark(self.workspace.run, loop, done)))
        for model in self._loops.models:
            if model.name in body["policies"]:
                model.resume_from(PolicyRef.model_validate(body["policies"][model.name]))
        for cursor, position in zip(cursors, body["cursors"], strict=False):
            cursor.position = position
