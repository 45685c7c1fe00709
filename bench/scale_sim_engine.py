"""The engine of the simulation: token ids and logprobs out of a generator, seconds out of a throughput, no model.

Commits of steps are real (storage.chain.records). What a real engine holds in memory for a step is measured apart.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import PrivateAttr

from bench.scale_sim_store import Clock, Meter, S3Model, SimulatedS3, VirtualRetry
from engine.protocol import Completion, GenerateRequest, LogprobsRequest
from engine.workspace import Workspace
from storage.chain.records import Chain, CommitRecord, Numerics, StepRequest
from storage.store.objects import ObjectStore

NUMERICS = Numerics(backend="simulated", device="none", compute_dtype="bfloat16", threads=1, max_tokens=8192)

TABLE_BYTES = {"rollouts": (45.0, 11.2), "batch": (10.0, 20.3)}
"""Measured: bytes of a table's file per completion, and per completion token with ids of a vocabulary of 100,000 and
logprobs that do not compress."""


@dataclass(frozen=True)
class EngineModel:
    """Speed of the pool behind one engine, in tokens of full-length completions."""

    new_tokens: int = 16
    """Materialised per completion."""
    nominal_tokens: int = 1024
    """That the times and the bytes stand for."""
    sample_tokens_per_second: float = 2e6
    score_tokens_per_second: float = 8e6
    train_tokens_per_second: float = 3e6
    seconds_per_token: float = 0.02
    """Of one sequence: no completion is faster than this times its length."""


class SimulatedEngine:
    """The part of engine.protocol.Engine that a step calls."""

    def __init__(self, store: ObjectStore, model: EngineModel, clock: Clock) -> None:
        self.store, self.model, self.clock = store, model, clock
        self.free_at = 0.0
        """When the samplers have done what they were asked for so far."""
        self.cpu_seconds = 0.0
        """That the simulation spent here, in place of another machine."""

    def occupy(self, completions: int) -> None:
        """The lane waits until the pool has sampled that many completions after what is queued before them."""
        begun = self.clock.read()
        work = completions * self.model.nominal_tokens / self.model.sample_tokens_per_second
        self.free_at = max(self.free_at, begun) + work
        slowest = begun + self.model.nominal_tokens * self.model.seconds_per_token
        self.clock.advance(max(self.free_at, slowest) - begun)

    async def generate(self, request: GenerateRequest, *, epoch: int = 0) -> list[Completion]:
        await asyncio.sleep(0)
        self.occupy(len(request.seeds))
        random = np.random.default_rng(request.seeds[0])
        shape = (len(request.seeds), self.model.new_tokens)
        ids = random.integers(3, 259, shape).tolist()
        logprobs = (-random.exponential(1.0, shape)).astype(np.float32).tolist()
        return [Completion(i, lp, "length") for i, lp in zip(ids, logprobs, strict=True)]

    async def logprobs(self, request: LogprobsRequest, *, epoch: int = 0) -> list[list[float]]:
        await asyncio.sleep(0)
        began = time.process_time()
        self.clock.advance(
            len(request.sequences) * self.model.nominal_tokens / self.model.score_tokens_per_second
        )
        trained = [sequence.weights.count(1.0) for sequence in request.sequences]
        drawn = (-np.random.default_rng(0).exponential(1.0, sum(trained))).astype(np.float32)
        scored = [part.tolist() for part in np.split(drawn, np.cumsum(trained)[:-1])]
        self.cpu_seconds += time.process_time() - began
        return scored

    async def take_gradient_step(self, request: StepRequest, *, epoch: int = 0) -> CommitRecord:
        await asyncio.sleep(0)
        rows = request.batch.rows or 0
        self.clock.advance(rows * self.model.nominal_tokens / self.model.train_tokens_per_second)
        chain = Chain.of(self.store, request.parent)
        standing = chain.record(request.parent.step + 1)
        return standing or chain.commit(
            CommitRecord(
                request=request,
                state=request.next_state(),
                updates=1,
                numerics=NUMERICS,
                metrics={"loss": 0.0, "grad_norm": 1.0, "tokens": float(rows * self.model.new_tokens)},
            )
        )


@dataclass
class World:
    """One process of the simulation: its view of the shared store, its clock and its engine."""

    clock: Clock
    meter: Meter
    backend: SimulatedS3
    store: ObjectStore
    engine: SimulatedEngine


def new_world(folder: Any, s3: S3Model, engine: EngineModel, *, seed: int) -> World:
    clock, meter = Clock(), Meter()
    scale = {
        kind: 1 + (engine.nominal_tokens - engine.new_tokens) * per_token / (fixed + engine.new_tokens * per_token)
        for kind, (fixed, per_token) in TABLE_BYTES.items()
    }
    backend = SimulatedS3(folder, s3, clock=clock, meter=meter, seed=seed, bytes_scale=scale)
    store = ObjectStore(backend, retry=VirtualRetry(clock, meter))
    return World(clock, meter, backend, store, SimulatedEngine(store, engine, clock))


class SimulatedWorkspace(Workspace):
    """A workspace whose store and engine are those of a World."""

    _world: World = PrivateAttr()

    def open_store(self) -> ObjectStore:
        return self._world.store

    def connect(self) -> Any:
        return self._world.engine

    def enter(self, world: World) -> SimulatedWorkspace:
        self._world = world
        return self
