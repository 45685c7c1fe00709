"""The engine of the simulation: random token ids and logprobs, and seconds computed from a throughput, without a model.

Commits of steps are real (storage.chain.records). The memory that a real engine needs for a step is not simulated.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import PrivateAttr

from bench.scale_sim_store import Clock, Meter, S3Model, SimulatedS3, VirtualRetry
from engine.http import wire
from engine.protocol import Completion, GenerateRequest, RowsRequest
from engine.workspace import Workspace
from storage.chain.records import Chain, CommitRecord, Numerics, StepRequest
from storage.store.objects import ObjectStore

NUMERICS = Numerics(backend="simulated", device="none", compute_dtype="bfloat16", threads=1, max_tokens=8192)

TABLE_BYTES = {"rollouts": (48.0, 7.4), "batch": (28.0, 13.6)}
"""Measured bytes of a table's file, per completion and per completion token. The ids were drawn from a vocabulary of
100,000, and the logprobs did not compress."""


@dataclass(frozen=True)
class EngineModel:
    """The speed of one engine, in tokens of full-length completions."""

    new_tokens: int = 16
    """Tokens per completion that are really made."""
    nominal_tokens: int = 1024
    """Tokens per completion for which times and bytes are computed."""
    sample_tokens_per_second: float = 2e6
    score_tokens_per_second: float = 8e6
    train_tokens_per_second: float = 3e6
    seconds_per_token: float = 0.02
    """Time for each token of one sequence, which no completion can go below."""


class SimulatedEngine:
    """Implements the methods of engine.protocol.Engine that a step calls."""

    def __init__(self, store: ObjectStore, model: EngineModel, clock: Clock) -> None:
        self.store, self.model, self.clock = store, model, clock
        self.free_at = 0.0
        """Virtual time at which the samplers will have finished all requests so far."""
        self.cpu_seconds = 0.0
        """CPU seconds of this class, which a real run would spend on another machine."""

    def occupy(self, completions: int) -> None:
        """Advances the clock of the lane until the samplers have sampled these completions, after those before them."""
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

    async def logprobs_of_rows(self, request: RowsRequest, *, epoch: int = 0) -> np.ndarray:
        # The caller encodes the request and decodes the response, as a client does over HTTP.
        await asyncio.sleep(0)
        wire.encode_rows_request(request, epoch=epoch)
        # The engine is on another machine. Every completion has as many tokens as `generate` makes.
        began = time.process_time()
        rows = sum(int(np.count_nonzero(part.rows)) for part in request.tables)
        self.clock.advance(rows * self.model.nominal_tokens / self.model.score_tokens_per_second)
        drawn_T = (-np.random.default_rng(0).exponential(1.0, rows * self.model.new_tokens)).astype(np.float32)
        response = wire.encode_scores(drawn_T)
        self.cpu_seconds += time.process_time() - began
        return wire.decode_scores(response)

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
                weights_digest="0",
            )
        )


@dataclass
class World:
    """What one process of the simulation uses: the shared store, a clock and an engine."""

    clock: Clock
    meter: Meter
    backend: SimulatedS3
    store: ObjectStore
    engine: SimulatedEngine


def new_world(folder: Any, s3: S3Model, engine: EngineModel, *, seed: int) -> World:
    # bytes of a table with nominal tokens, per byte of one with new tokens
    scale = {}
    for kind, (fixed, per_token) in TABLE_BYTES.items():
        nominal_bytes = fixed + engine.nominal_tokens * per_token
        scale[kind] = nominal_bytes / (fixed + engine.new_tokens * per_token)
    clock, meter = Clock(), Meter()
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
