"""The workers of the simulation, in a process of their own: real task code for some shards, copies for the others.

A copy has the prompts of its own shard and the tokens of the last real shard. It makes the same lookups and the same
commit. A real worker reads some objects only once, such as prompts and the tokenizer. The simulation records these
requests at the first real shard, and charges them to the first task of every worker. Workers live as long as the run.
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
from tasks.plans import Grading, PromptShard
from tasks.sampling.completions import generate_rollouts
from tasks.sampling.grading import grade_rollouts
from tasks.task_runs import work_of

STAGE = "0-grpo"
TASK_RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0)
"""Delays before the four retries of a task (tasks.task_runs.DURABLE)."""


@dataclass
class WorkerStep:
    """The results and figures of the workers in one step."""

    rollouts: list[ArtifactRef]
    graded: list[ArtifactRef]
    start: float
    rollout_end: float
    """Virtual time at which the last shard was sampled. No grading begins before it, because flows.grpo waits for all
    rollouts."""
    end: float
    cold_seconds: float
    """Seconds of requests that each worker makes once, over all workers."""
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
    """A number of worker machines, each of which runs one task at a time."""

    workspace: SimulatedWorkspace
    world: World
    grading: Grading
    sampling: SamplingParams
    workers: int
    real_every: int
    """One shard in this many is made by the real tasks."""
    ids: list[str]
    """Prompt ids of the dataset."""
    template: dict[str, pa.Table] = field(default_factory=dict)
    """The table of the last real shard, by kind."""
    cold: list[tuple[Verb, str, int]] = field(default_factory=list)
    """Requests that a worker makes at its first shard, outside the run's own keys."""
    every: list[tuple[Verb, str, int]] = field(default_factory=list)
    """Requests that a worker makes at each later shard, outside the run's own keys."""
    begun: set[int] = field(default_factory=set)
    """Workers that have had a task."""
    cpu: list[float] = field(default_factory=list)
    """CPU seconds of each real task."""
    cold_seconds: float = 0.0
    retries: int = 0
    failed: int = 0

    def run(self, policy: PolicyRef, shards: list[PromptShard], *, step: int, start: float) -> WorkerStep:
        """Samples and grades the shards of one step, from the virtual time `start` on."""
        # reset the counters
        backend, meter = self.world.backend, Meter()
        self.world.meter.__init__()  # type: ignore[misc]
        backend.forget_windows()
        self.retries, self.failed, self.cold_seconds = 0, 0, 0.0
        self.cpu.clear()
        self.world.engine.free_at = start
        # all rollouts, then all grades
        rollouts, middle = self._each(shards, start, lambda shard: self._rollout(policy, shard, step))
        by_index = dict(zip((shard.index for shard in shards), rollouts, strict=True))
        graded, end = self._each(shards, middle, lambda shard: self._grade(by_index[shard.index], shard, step))
        # the figures
        meter.add(self.world.meter)
        real = sum(self._is_real(shard) for shard in shards)
        return WorkerStep(
            rollouts, graded, start, middle, end, self.cold_seconds, real, sum(self.cpu) / max(1, real), self.retries,
            self.failed, meter, backend.busiest(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )  # fmt: skip

    def _is_real(self, shard: PromptShard) -> bool:
        return shard.index % self.real_every == 0

    def _each(self, shards: list[PromptShard], start: float, task: Any) -> tuple[list[ArtifactRef], float]:
        """Runs the task for each shard on the worker that is free first. Returns the results, and the time at which the
        last task ended."""
        free_workers = [(start, worker) for worker in range(self.workers)]
        end, refs = start, []
        for shard in shards:
            free_since, worker = heapq.heappop(free_workers)
            self.world.clock.now = free_since
            refs.append(self._with_retries(task, shard, worker))
            task_end = self.world.clock.settle()
            heapq.heappush(free_workers, (task_end, worker))
            end = max(end, task_end)
        return refs, end

    def _with_retries(self, task: Any, shard: PromptShard, worker: int) -> ArtifactRef:
        """Runs a task like Prefect: after a transient error, it is tried again after a delay."""
        for delay in (*TASK_RETRY_SECONDS, None):
            try:
                if worker not in self.begun and self.cold:
                    began = self.world.clock.read()
                    self._charge(self.cold)
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
        # a real shard, whose requests outside the run are recorded for the copies
        if self._is_real(shard):
            self.world.backend.trace = []
            ref = self._real(work_of(generate_rollouts)(self.workspace, policy, shard, self.sampling, step=step))
            trace, self.world.backend.trace = self.world.backend.trace, None
            requests = [entry for entry in trace or () if not entry[1].startswith("runs/")]
            if self.cold:
                self.every = requests
            else:
                self.cold = requests
            self.template["rollouts"] = read_without_charge(self.world, ref)
            return ref
        # a copy of the last real shard
        key = keys.step_artifact(policy.run, policy.stage, step, "rollouts", shard.index)
        committed = find_artifact(self.world.store, key)
        if committed is not None:
            return committed
        self._charge(self.every)
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
            grade = work_of(grade_rollouts)
            ref = self._real(
                grade(self.workspace, rollouts, self.grading, stage=STAGE, step=step, shard=shard.index)
            )
            self.template["graded"] = read_without_charge(self.world, ref)
            return ref
        # a copy: the requests of a grading task, then the table of the last real one
        key = keys.step_artifact(self.workspace.run, STAGE, step, "graded", shard.index)
        committed = find_artifact(self.world.store, key)
        if committed is not None:
            return committed
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

    def _charge(self, requests: list[tuple[Verb, str, int]]) -> None:
        """Charges recorded requests once more."""
        for verb, key, size in requests:
            with_retries(partial(self.world.backend.charge, verb, key, size), key, self.world.store.retry)

    def _copy_cpu(self) -> None:
        """Advances the clock by the CPU time of the last real task."""
        self.world.clock.advance(self.cpu[-1])

    def _named(self, table: pa.Table, shard: PromptShard) -> pa.Table:
        """Returns the rows of the template with the prompts of another shard, which must not be larger."""
        # one row for each completion of each prompt
        rows: list[int] = []
        completions: list[int] = []
        for row, earlier in zip(shard.rows, shard.repetitions, strict=True):
            rows += [row] * shard.completions
            # a prompt that occurred before in this step continues its numbering
            first = earlier * shard.completions
            completions += range(first, first + shard.completions)
        table = table.slice(0, len(rows))
        table = _with(table, "prompt_index", rows)
        table = _with(table, "prompt_id", [self.ids[row] for row in rows])
        return _with(table, "completion", completions)


def _with(table: pa.Table, name: str, values: list[Any]) -> pa.Table:
    column = table.schema.field(name)
    return table.set_column(table.schema.get_field_index(name), column, pa.array(values, column.type))


def read_without_charge(world: World, ref: ArtifactRef) -> pa.Table:
    """Reads a table for the simulation itself, which costs nothing."""
    world.backend.quiet = True
    try:
        return read_table(world.store, ref)
    finally:
        world.backend.quiet = False


def serve(pipe: Connection, folder: Path, s3: S3Model, engine: EngineModel, setup: dict[str, Any]) -> None:
    """Runs the worker process: for the shards of a step it sends a WorkerStep. It ends when it receives None."""
    world = new_world(folder, s3, engine, seed=1)
    workspace = SimulatedWorkspace(**setup.pop("workspace")).enter(world)
    pool = WorkerPool(workspace, world, **setup)
    while (work := pipe.recv()) is not None:
        pipe.send(pool.run(work["policy"], work["shards"], step=work["step"], start=work["start"]))
