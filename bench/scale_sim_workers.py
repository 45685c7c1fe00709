"""The workers of the simulation, in a process of their own: real task code for some shards, copies for the rest.

A copy has the prompts of its own shard and the tokens of the last real one, and goes through the same lookups and the
same commit. What a process asks for once (prompts, tokenizer: all that is not of the run) is charged to the first task
of every worker, as the first real shard asked for it: workers live as long as the run.
"""

from __future__ import annotations

import asyncio
import heapq
import resource
import time
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench.scale_sim_engine import EngineModel, SimulatedWorkspace, World, new_world
from bench.scale_sim_store import Meter, S3Model, Verb
from engine.protocol import SamplingParams
from storage.chain.records import PolicyRef
from storage.errors import StorageUnavailable
from storage.store import keys
from storage.store.artifacts import ArtifactRef, find_artifact
from storage.store.retry import with_retries
from storage.store.tables import commit_table, read_table
from tasks.sampling.completions import PromptShard, sample_shard
from tasks.sampling.grading import Grading, grade_shard

STAGE = "0-grpo"
TASK_RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0)
"""tasks.retries.DURABLE: four more attempts."""


@dataclass
class WorkerStep:
    """What the workers did in one step."""

    rollouts: list[ArtifactRef]
    graded: list[ArtifactRef]
    start: float
    rollout_end: float
    """Virtual seconds at which the last shard was sampled; no grade begins before it (flows.grpo gathers)."""
    end: float
    cold_seconds: float
    """In requests of processes that start, over all workers."""
    real_shards: int
    cpu_per_real_shard: float
    task_retries: int
    tasks_failed: int
    meter: Meter
    busiest: dict[str, int]
    peak_rss: int
    """Bytes."""


@dataclass
class WorkerPool:
    """`workers` machines, each with one task at a time."""

    workspace: SimulatedWorkspace
    world: World
    grading: Grading
    sampling: SamplingParams
    workers: int
    real_every: int
    """One shard in so many runs the real code."""
    ids: list[str]
    """Prompt ids of the dataset."""
    template: dict[str, pa.Table] = field(default_factory=dict)
    cold: list[tuple[Verb, str, int]] = field(default_factory=list)
    """Requests of a process that starts."""
    every: list[tuple[Verb, str, int]] = field(default_factory=list)
    """Requests of every shard besides those of its run."""
    begun: set[int] = field(default_factory=set)
    """Workers that had a task."""
    cpu: list[float] = field(default_factory=list)
    cold_seconds: float = 0.0
    retries: int = 0
    failed: int = 0

    def run(self, policy: PolicyRef, shards: list[PromptShard], *, step: int, start: float) -> WorkerStep:
        backend, meter = self.world.backend, Meter()
        self.world.meter.__init__()  # type: ignore[misc]
        backend.forget_windows()
        self.retries, self.failed, self.cold_seconds = 0, 0, 0.0
        self.cpu.clear()
        self.world.engine.free_at = start
        rollouts, middle = self._each(shards, start, lambda shard: self._rollout(policy, shard, step))
        by_index = dict(zip((shard.index for shard in shards), rollouts, strict=True))
        graded, end = self._each(shards, middle, lambda shard: self._grade(by_index[shard.index], shard, step))
        meter.add(self.world.meter)
        real = sum(self._is_real(shard) for shard in shards)
        return WorkerStep(
            rollouts, graded, start, middle, end, self.cold_seconds, real, sum(self.cpu) / max(1, real), self.retries,
            self.failed, meter, backend.busiest(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )  # fmt: skip

    def _is_real(self, shard: PromptShard) -> bool:
        return shard.index % self.real_every == 0

    def _each(self, shards: list[PromptShard], start: float, task: Any) -> tuple[list[ArtifactRef], float]:
        """Each shard's ref, by whichever worker is free first; and when the last one was done."""
        free = [(start, worker) for worker in range(self.workers)]
        end, refs = start, []
        for shard in shards:
            at, worker = heapq.heappop(free)
            self.world.clock.now = at
            refs.append(self._patiently(task, shard, worker))
            at = self.world.clock.settle()
            heapq.heappush(free, (at, worker))
            end = max(end, at)
        return refs, end

    def _patiently(self, task: Any, shard: PromptShard, worker: int) -> ArtifactRef:
        """As Prefect runs a task of ours: again after a transient error, with its delays."""
        for delay in (*TASK_RETRY_SECONDS, None):
            try:
                if worker not in self.begun and self.cold:
                    began = self.world.clock.read()
                    self._again(self.cold)
                    self.cold_seconds += self.world.clock.read() - began
                self.begun.add(worker)
                return task(shard)  # type: ignore[no-any-return]
            except StorageUnavailable:
                if delay is None:
                    self.failed += 1
                    raise
                self.retries += 1
                self.world.clock.advance(delay)
        raise AssertionError("unreachable")

    def _rollout(self, policy: PolicyRef, shard: PromptShard, step: int) -> ArtifactRef:
        if self._is_real(shard):
            self.world.backend.trace = []
            ref = self._real(sample_shard(self.workspace, policy, shard, self.sampling, step=step))
            trace, self.world.backend.trace = self.world.backend.trace, None
            asked = [entry for entry in trace or () if not entry[1].startswith("runs/")]
            if self.cold:
                self.every = asked
            else:
                self.cold = asked
            self.template["rollouts"] = read_quietly(self.world, ref)
            return ref
        key = keys.step_artifact(policy.run, policy.stage, step, "rollouts", shard.index)
        if found := find_artifact(self.world.store, key):
            return found
        self._again(self.every)
        self.world.engine.occupy(len(shard.rows) * shard.completions)
        table = self._named(self.template["rollouts"], shard)
        table = _with(table, "policy_state", [policy.state] * table.num_rows)
        self._copy_cpu()
        tokens = table.num_rows * self.world.engine.model.new_tokens
        return commit_table(
            self.world.store, key, table, kind="rollouts", parents=(policy.uri, shard.dataset.uri),
            provenance=self.workspace.provenance,
            extra={"prompts": len(shard.rows), "dropped": 0, "completion_tokens": tokens},
        )  # fmt: skip

    def _grade(self, rollouts: ArtifactRef, shard: PromptShard, step: int) -> ArtifactRef:
        if self._is_real(shard):
            ref = self._real(
                grade_shard(self.workspace, rollouts, self.grading, stage=STAGE, step=step, shard=shard.index)
            )
            self.template["graded"] = read_quietly(self.world, ref)
            return ref
        key = keys.step_artifact(self.workspace.run, STAGE, step, "graded", shard.index)
        if found := find_artifact(self.world.store, key):
            return found
        self.world.store.get(keys.manifest(rollouts.key))
        self.world.backend.charge("GET", f"{rollouts.key}.parquet", rollouts.bytes)
        self._copy_cpu()
        table = self._named(self.template["graded"], shard)
        return commit_table(
            self.world.store, key, table, kind="graded", parents=(rollouts.uri,), provenance=self.workspace.provenance
        )

    def _real(self, task: Any) -> ArtifactRef:
        began = time.process_time()
        ref: ArtifactRef = asyncio.run(task)
        spent = time.process_time() - began
        self.cpu.append(spent)
        self.world.clock.advance(spent)
        return ref

    def _again(self, requests: list[tuple[Verb, str, int]]) -> None:
        """Charges them once more."""
        for verb, key, size in requests:
            with_retries(partial(self.world.backend.charge, verb, key, size), key, self.world.store.retry)

    def _copy_cpu(self) -> None:
        self.world.clock.advance(self.cpu[-1])  # what the real one took

    def _named(self, table: pa.Table, shard: PromptShard) -> pa.Table:
        """The template's rows under the prompts of another shard of at most its size."""
        rows = [row for row in shard.rows for _ in range(shard.completions)]
        table = table.slice(0, len(rows))
        number = range(shard.completions)
        numbers = [earlier * shard.completions + n for earlier in shard.repetitions for n in number]
        table = _with(table, "prompt_index", rows)
        table = _with(table, "prompt_id", [self.ids[row] for row in rows])
        return _with(table, "completion", numbers)


def _with(table: pa.Table, name: str, values: list[Any]) -> pa.Table:
    at, named = table.schema.get_field_index(name), table.schema.field(name)
    return table.set_column(at, named, pa.array(values, named.type))


def read_quietly(world: World, ref: ArtifactRef) -> pa.Table:
    """A table for the simulation's own use: nothing is charged."""
    world.backend.quiet = True
    try:
        return read_table(world.store, ref)
    finally:
        world.backend.quiet = False


def serve(pipe: Connection, folder: Path, s3: S3Model, engine: EngineModel, setup: dict[str, Any]) -> None:
    """The worker process: a step's shards in, a WorkerStep out, until None comes."""
    world = new_world(folder, s3, engine, seed=1)
    workspace = SimulatedWorkspace(**setup.pop("workspace")).enter(world)
    pool = WorkerPool(workspace, world, **setup)
    while (work := pipe.recv()) is not None:
        pipe.send(pool.run(work["policy"], work["shards"], step=work["step"], start=work["start"]))
