"""The workers of the simulation, in a process of their own: real task code for a share of the shards, copies for the rest.

A copy has the prompts of its own shard and the tokens of the last real one, and goes through the same lookups and the
same commit; the requests of a real shard that a copy does not need (prompts, tokenizer) are charged again as they were.
"""

from __future__ import annotations

import asyncio
import heapq
import resource
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench.scale_sim_engine import EngineModel, SimulatedWorkspace, World, new_world
from bench.scale_sim_store import Meter, S3Model, Verb
from engine.protocol import SamplingParams
from storage import keys
from storage.artifacts import ArtifactRef, find_artifact
from storage.chain import PolicyRef
from storage.errors import StorageUnavailable
from storage.retry import retried
from storage.tables import commit_table, read_table
from tasks.gradings import Grading, grade_shard
from tasks.rollouts import PromptShard, sample_shard

STAGE = "0-grpo"
TASK_RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0)
"""tasks.retries.DURABLE: four more attempts."""


@dataclass
class WorkerStep:
    """What the workers did in one step."""

    rollouts: list[ArtifactRef]
    graded: list[ArtifactRef]
    rollout_end: float
    """Virtual seconds at which the last shard was sampled; no grade begins before it (flows.grpo gathers)."""
    end: float
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
    replay: list[tuple[Verb, str, int]] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    retries: int = 0
    failed: int = 0

    def run(self, policy: PolicyRef, shards: list[PromptShard], *, step: int, start: float) -> WorkerStep:
        backend, meter = self.world.backend, Meter()
        self.world.meter.__init__()  # type: ignore[misc]
        backend.forget_windows()
        self.retries = self.failed = 0
        self.cpu.clear()
        self.world.engine.free_at = start
        rollouts, middle = self._each(shards, start, lambda shard: self._rollout(policy, shard, step))
        by_index = dict(zip((shard.index for shard in shards), rollouts, strict=True))
        graded, end = self._each(shards, middle, lambda shard: self._grade(by_index[shard.index], shard, step))
        meter.add(self.world.meter)
        real = sum(self._is_real(shard) for shard in shards)
        return WorkerStep(
            rollouts, graded, middle, end, real, sum(self.cpu) / max(1, real), self.retries, self.failed, meter,
            backend.busiest(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
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
            refs.append(self._patiently(task, shard))
            at = self.world.clock.settle()
            heapq.heappush(free, (at, worker))
            end = max(end, at)
        return refs, end

    def _patiently(self, task: Any, shard: PromptShard) -> ArtifactRef:
        """As Prefect runs a task of ours: again after a transient error, with its delays."""
        for delay in (*TASK_RETRY_SECONDS, None):
            try:
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
            self.replay = [entry for entry in trace if not entry[1].startswith("runs/")]
            self.template["rollouts"] = read_quietly(self.world, ref)
            return ref
        key = keys.step_artifact(policy.run, policy.stage, step, "rollouts", shard.index)
        if found := find_artifact(self.world.store, key):
            return found
        for verb, at, size in self.replay:
            retried(lambda v=verb, k=at, s=size: self.world.backend.charge(v, k, s), at, self.world.store.retry)  # type: ignore[misc]
        self.world.engine.occupy(len(shard.rows) * shard.completions)
        table = self._named(self.template["rollouts"], shard)
        state = pa.array([policy.state] * table.num_rows, pa.string())
        table = table.set_column(table.schema.get_field_index("policy_state"), table.schema.field("policy_state"), state)
        self._copy_cpu()
        return commit_table(
            self.world.store, key, table, kind="rollouts", parents=(policy.uri, shard.dataset.uri),
            provenance=self.workspace.provenance, extra={"prompts": len(shard.rows), "dropped": 0},
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

    def _copy_cpu(self) -> None:
        self.world.clock.advance(self.cpu[-1])  # what the real one took

    def _named(self, table: pa.Table, shard: PromptShard) -> pa.Table:
        """The template's rows under the prompts of another shard of at most its size."""
        rows = [row for row in shard.rows for _ in range(shard.completions)]
        table = table.slice(0, len(rows))
        numbers = [n for earlier in shard.repetitions for n in range(earlier * shard.completions, (earlier + 1) * shard.completions)]
        values = {"prompt_index": rows, "prompt_id": [self.ids[row] for row in rows], "completion": numbers}
        for name, column in values.items():
            at, named = table.schema.get_field_index(name), table.schema.field(name)
            table = table.set_column(at, named, pa.array(column, named.type))
        return table


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
