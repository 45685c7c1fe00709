"""Simulates a run of 1,000 workers and 10^7 rollouts on the real code of tasks and storage, with a simulated engine.

    PYTHONPATH=. .venv/bin/python bench/scale_sim.py --steps 12 --prompts 100000 --completions 8 --workers 1000

Real are the code of the tasks, artifacts, tables, keys, commits of the chain and retries, with their CPU seconds and
memory. The rollouts and grades of one shard in --real-every are made by the tasks; the other shards are copies with
their own prompts, which the real code commits. The batch and the metrics are computed from all shards.

Simulated are the engine (random ids and logprobs), S3 (latency, limits, SlowDown) and the clocks of the workers.
Completions have --new-tokens tokens. CPU seconds and memory are those of the real tokens; modelled times and bytes are
computed for --nominal-tokens.

Prefect itself, contention for CPUs, and kills are not simulated. The cost of Prefect per task run was measured
separately, and is multiplied by the number of task runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.scale_sim_engine import EngineModel, SimulatedWorkspace, new_world
from bench.scale_sim_store import Meter, S3Model
from bench.scale_sim_workers import STAGE, WorkerStep, serve
from engine.protocol import SamplingParams
from storage.chain.leases import acquire_lease
from storage.chain.records import Chain, OptimizerSpec, PolicyRef, Root, StepRequest
from storage.chain.run_record import create_or_check_run
from storage.registry.models import publish_model
from storage.serialization import canonical_json
from storage.store.artifacts import ArtifactRef, Provenance
from tasks.batches.rl import prepare_batch
from tasks.datasets.load import load_dataset
from tasks.datasets.order import DataCursor, repetitions, shuffled
from tasks.datasets.spec import FileDataset
from tasks.graders.spec import grader_spec
from tasks.plans import BatchPlan, Grading, PromptShard
from tasks.reports.clock import NO_TIME
from tasks.reports.step_metrics import measure_step, write_metrics
from tasks.task_runs import work_of

RUN = "scale"
PROVENANCE = Provenance(code_version="bench", config_digest="0" * 64, seed=0)
PREFECT_CLIENT_SECONDS, PREFECT_SERVER_SECONDS = 0.004, 0.025
"""CPU seconds per task run of Prefect 3.8.8, measured with 200 trivial tasks (docs/scaling.md)."""


@dataclass(frozen=True)
class Size:
    """The size of the simulated run."""

    steps: int
    prompts: int
    completions: int
    per_shard: int
    """Prompts per shard."""
    workers: int
    real_every: int
    """One shard in this many is made by the real tasks."""
    rows: int
    """Rows of the dataset."""


@dataclass
class Phase:
    """A part of a step on the coordinator."""

    name: str
    cpu: float = 0.0
    wall: float = 0.0
    virtual: float = 0.0
    """Modelled seconds: those of the requests and the engine, plus the CPU seconds spent here."""
    peak_rss: int = 0
    """Bytes."""
    meter: Meter = field(default_factory=Meter)


@dataclass
class StepReport:
    """The figures of one step."""

    step: int
    phases: list[Phase]
    workers: WorkerStep
    rows: int
    batch_ref_bytes: int
    """Size of the batch's reference in the step request, as JSON."""
    record_bytes: int
    refs_bytes: int
    """Size of the references that the batch task receives, as JSON."""


class Simulation:
    """The coordinator. It does in one step what flows.grpo does."""

    def __init__(
        self, folder: Path, size: Size, s3: S3Model, engine: EngineModel, *, processes: bool = True
    ) -> None:
        """Without `processes` the workers run in this process: it starts faster, but its memory includes theirs."""
        # the model, the dataset and the run
        self.size, self.folder = size, folder
        prepared = _in_child(prepare, folder, size, s3, engine) if processes else prepare(folder, size, s3, engine)
        self.base, self.dataset, self.policy, ids = prepared
        self.world = new_world(folder, s3, engine, seed=2)
        # the workers
        workspace = {"store": "sim", "run": RUN, "epoch": 1, "provenance": PROVENANCE}
        self.workspace = SimulatedWorkspace(**workspace).enter(self.world)
        setup = {
            "workspace": workspace, "workers": size.workers, "real_every": size.real_every, "ids": ids,
            "grading": Grading(grader=grader_spec("tasks.graders.rules:RegexMatch", {"pattern": "[a-m]"})),
            "sampling": SamplingParams(max_new_tokens=engine.new_tokens),
        }  # fmt: skip
        context = multiprocessing.get_context("spawn")
        self.pipe, worker_pipe = context.Pipe()
        worker_class = context.Process if processes else threading.Thread
        self.child = worker_class(target=serve, args=(worker_pipe, folder, s3, engine, setup), daemon=True)
        self.child.start()
        # the prompt ids belong to the workers' memory
        del ids, setup
        self.plan = BatchPlan(reference=self.policy)
        self.order, self.cursor = shuffled(size.rows, seed=42), DataCursor()

    def close(self) -> None:
        self.pipe.send(None)
        self.child.join(30)

    def run_step(self, step: int) -> StepReport:
        """Runs one step, and checks that no rollout is missing."""
        # plan the shards
        phases: list[Phase] = []
        with self._phase("plan", phases):
            rows, cursor_out = self.order.take(self.cursor, self.size.prompts)
            shards = self._shards(rows)
        # the workers sample and grade
        self.pipe.send({"policy": self.policy, "shards": shards, "step": step, "start": self.world.clock.now})
        done: WorkerStep = self.pipe.recv()
        self.world.clock.now = done.end
        # the batch, the gradient step and its metrics
        with self._phase("batch", phases):
            batch = asyncio.run(
                work_of(prepare_batch)(self.workspace, self.policy, done.rollouts, done.graded, self.plan, step=step)
            )
        with self._phase("step", phases):
            request = StepRequest(
                parent=self.policy, batch=batch, reference=self.plan.reference, loss={"kind": "grpo"},
                optimizer=OptimizerSpec(lr=1e-6), cursor_in=self.cursor.model_dump(),
                cursor_out=cursor_out.model_dump(),
            )  # fmt: skip
            record = asyncio.run(self.workspace.connect().take_gradient_step(request))
        with self._phase("metrics", phases):
            metrics = measure_step(
                self.world.store, record, done.rollouts, done.graded, total_steps=self.size.steps, lap=NO_TIME
            )
            write_metrics(self.world.store, record.policy, metrics)
        self.policy, self.cursor = record.policy, cursor_out
        # every rollout must be in the batch and in the metrics
        expected = self.size.prompts * self.size.completions
        if not expected == batch.rows == metrics.completions or metrics.prompts != len(set(rows)):
            raise SystemExit(f"step {step}: {expected} rollouts, {batch.rows} trained, {metrics.completions} measured")
        return StepReport(
            step=step,
            phases=phases,
            workers=done,
            rows=expected,
            batch_ref_bytes=len(canonical_json(batch)),
            record_bytes=len(canonical_json(record)),
            refs_bytes=sum(len(canonical_json(ref)) for ref in (*done.rollouts, *done.graded)),
        )

    def _shards(self, rows: list[int]) -> list[PromptShard]:
        """Divides the prompts of a step into shards, like flows.grpo."""
        size, earlier = self.size.per_shard, repetitions(rows)
        shards = []
        for start in range(0, len(rows), size):
            shard = PromptShard(
                base=self.base,
                dataset=self.dataset,
                index=len(shards),
                rows=tuple(rows[start : start + size]),
                completions=self.size.completions,
                repetitions=tuple(earlier[start : start + size]),
            )
            shards.append(shard)
        return shards

    @contextmanager
    def _phase(self, name: str, phases: list[Phase]) -> Iterator[None]:
        """Measures a part of the step, and appends it to `phases`."""
        # reset the counters, and the peak of resident memory
        world, phase = self.world, Phase(name)
        world.meter.__init__()  # type: ignore[misc]
        Path("/proc/self/clear_refs").write_text("5")
        cpu, wall, virtual = time.process_time(), time.perf_counter(), world.clock.now
        world.engine.cpu_seconds = 0.0
        yield
        # the CPU time of the simulated engine would be spent on another machine
        phase.cpu, phase.wall = time.process_time() - cpu - world.engine.cpu_seconds, time.perf_counter() - wall
        world.clock.advance(phase.cpu)
        phase.virtual = world.clock.settle() - virtual
        phase.peak_rss = _peak_rss()
        phase.meter.add(world.meter)
        phases.append(phase)


def prepare(
    folder: Path, size: Size, s3: S3Model, engine: EngineModel
) -> tuple[ArtifactRef, ArtifactRef, PolicyRef, list[str]]:
    """Publishes a model, loads a dataset, opens a run with its lease, and commits the root of its chain. Returns the
    model, the dataset, policy 0 and the ids of the prompts."""
    from engine.backends.torch.tiny import build_tiny_model
    from storage.store.tables import read_table

    # the model and the dataset
    world = new_world(folder, s3, engine, seed=0)
    with tempfile.TemporaryDirectory() as scratch:
        model = build_tiny_model(Path(scratch, "model"), seed=0, hidden=64, layers=1)
        files = {path.name: path for path in model.iterdir()}
        base = publish_model(world.store, "tiny", "1", files, provenance=PROVENANCE)
        prompts = Path(scratch, "prompts.jsonl")
        with prompts.open("w") as file:
            for row in range(size.rows):
                file.write(json.dumps({"prompt": f"What is {row} times {row % 97}?"}) + "\n")
        data = load_dataset(world.store, FileDataset(path=str(prompts)), provenance=PROVENANCE)
    # the run and its chain
    create_or_check_run(world.store, RUN, semantic={"bench": "scale"}, other={}, code_version="bench")
    acquire_lease(world.store, RUN, {"pid": 0})
    root = Root(base=base, base_digest=base.sha256)
    Chain(world.store, RUN, STAGE, "policy").create_root(root)
    policy = PolicyRef(run=RUN, stage=STAGE, model="policy", step=0, state=root.state())
    return base, data.ref, policy, read_table(world.store, data.ref, ["id"])["id"].to_pylist()


def _in_child(call: Any, *arguments: Any) -> Any:
    """Runs the call in a process of its own, so that its imports do not count as the coordinator's memory."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(call, arguments)


def _peak_rss() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# -- what is printed ---------------------------------------------------------------------------------------------


def table(report: StepReport) -> str:
    """Describes one step: the phases of the coordinator, the workers, and the store."""
    done, shards = report.workers, len(report.workers.rollouts)
    tasks = 2 * shards + 2
    lines = [f"step {report.step}: {report.rows:,} rollouts in {shards:,} shards"]
    for phase in report.phases:
        lines.append(
            f"  {phase.name:8} cpu {phase.cpu:7.1f} s  wall {phase.wall:7.1f} s  modelled {phase.virtual:8.1f} s  "
            f"peak RSS {phase.peak_rss / 2**20:6.0f} MiB  {_requests(phase.meter)}"
        )
    lines += [
        f"  workers  modelled {done.rollout_end - done.start:8.1f} s to the last rollout, "
        f"{done.end - done.start:8.1f} s to the last grade; cpu {done.cpu_per_real_shard:.2f} s a shard (of "
        f"{done.real_shards} real); task retries {done.task_retries}; peak RSS {done.peak_rss / 2**20:.0f} MiB",
        f"           {_requests(done.meter)}; busiest second {done.busiest}",
        f"           in one process: {done.meter.wait_seconds - done.cold_seconds:,.0f} s of requests, one after the "
        f"other, and {done.cpu_per_real_shard * shards:,.0f} CPU-s",
        f"  refs     {report.refs_bytes:,} B to the batch task, {report.batch_ref_bytes:,} B the batch's reference, "
        f"{report.record_bytes:,} B the commit record",
        f"  prefect  {tasks:,} task runs: server {tasks * PREFECT_SERVER_SECONDS:,.0f} CPU-s, client "
        f"{tasks * PREFECT_CLIENT_SECONDS:,.0f} CPU-s",
    ]
    return "\n".join(lines)


def _requests(meter: Meter) -> str:
    areas: dict[str, Counter[str]] = {}
    for (area, verb), count in meter.requests.items():
        areas.setdefault(area, Counter())[verb] += count
    parts = []
    for area, counts in areas.items():
        verbs = " ".join(f"{verb} {count:,}" for verb, count in sorted(counts.items()))
        parts.append(f"{area} {verbs}")
    text = "; ".join(parts)
    text += f"; read {meter.bytes_read / 1e9:.2f} GB, wrote {meter.bytes_written / 1e9:.2f} GB"
    if meter.throttled:
        text += f"; {meter.throttled:,} SlowDown, {meter.backoff_seconds:,.0f} lane-s of backoff"
    return text


def simulate(
    size: Size,
    s3: S3Model,
    engine: EngineModel,
    *,
    folder: Path,
    show: Callable[[str], None] = print,
    processes: bool = True,
) -> list[StepReport]:
    """Runs the steps, and shows the figures of each. Ends the program if a count or the chain is wrong."""
    simulation = Simulation(folder, size, s3, engine, processes=processes)
    try:
        reports = []
        for step in range(size.steps):
            reports.append(simulation.run_step(step))
            show(table(reports[-1]))
        head = Chain.of(simulation.world.store, simulation.policy).head()
        if head != simulation.policy:
            raise SystemExit(f"the chain stands at {head.uri}, the simulation at {simulation.policy.uri}")
        return reports
    finally:
        simulation.close()


def measure_maintenance(folder: Path, s3: S3Model, engine: EngineModel) -> str:
    """Measures a garbage collection with dry_run, and an audit, on the store of the finished run."""
    from storage.inspect.audit import audit_store
    from storage.inspect.gc import collect_garbage

    lines = []
    for name, call in (
        ("gc --dry-run, 1 thread", lambda store: collect_garbage(store, dry_run=True, threads=1)),
        ("audit without reading data", lambda store: audit_store(store, read_bytes=False)),
    ):
        world = new_world(folder, s3, engine, seed=3)
        Path("/proc/self/clear_refs").write_text("5")
        cpu = time.process_time()
        report = call(world.store)
        lines.append(
            f"{name}: cpu {time.process_time() - cpu:.1f} s, modelled {world.clock.settle():,.0f} s of requests, peak "
            f"RSS {_peak_rss() / 2**20:.0f} MiB; {_requests(world.meter)}; "
            f"{len(getattr(report, 'problems', ()))} findings"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulates a large run on the real orchestration and storage code.")
    for name, default in (
        ("steps", 12), ("prompts", 100_000), ("completions", 8), ("per-shard", 100), ("workers", 1000),
        ("real-every", 20), ("rows", 0), ("new-tokens", 16), ("nominal-tokens", 1024),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--maintenance", action="store_true", help="measure a dry garbage collection and an audit at the end"
    )
    parser.add_argument("--json", type=Path, help="write the reports to this file")
    options = parser.parse_args()
    size = Size(
        options.steps, options.prompts, options.completions, options.per_shard, options.workers, options.real_every,
        options.rows or 2 * options.prompts,
    )  # fmt: skip
    s3, engine = S3Model(), EngineModel(new_tokens=options.new_tokens, nominal_tokens=options.nominal_tokens)
    # the steps, and optionally the maintenance of the store after them
    with tempfile.TemporaryDirectory(prefix="scale-sim-") as scratch:
        began = time.perf_counter()
        reports = simulate(size, s3, engine, folder=Path(scratch, "store"), show=partial(print, flush=True))
        total = sum(report.rows for report in reports)
        print(f"{total:,} rollouts in {len(reports)} steps, {time.perf_counter() - began:.0f} s of wall time")
        if options.maintenance:
            print(measure_maintenance(Path(scratch, "store"), s3, engine))
    if options.json:
        options.json.write_text(json.dumps([_plain(report) for report in reports], indent=1, default=str))


def _plain(report: StepReport) -> dict[str, Any]:
    """Returns the report as JSON values, with the number of shards instead of their references."""
    body = asdict(report)
    for meter in (body["workers"]["meter"], *(phase["meter"] for phase in body["phases"])):
        meter["requests"] = {" ".join(name): count for name, count in meter["requests"].items()}
    body["workers"] |= {"rollouts": len(body["workers"]["rollouts"]), "graded": len(body["workers"]["graded"])}
    return body


if __name__ == "__main__":
    main()
