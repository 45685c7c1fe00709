"""A world: an S3 server, an engine server, flow workers, the connections between them, and a supervisor that restarts
dead processes.

Everything is on 127.0.0.1 and in processes of its own; logs stay in the world's folder. `World.live(schedule)` lets the
faults of a schedule happen until every run has ended, and tells what happened.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from storage.store.objects import ObjectStore, open_store
from tests.chaos.faults import KINDS, OF_ENGINE, OF_S3, OF_WORKER, Fault, Pause
from tests.chaos.processes import BUCKET, ROOT, Child, S3Server, error_of, s3_environment
from tests.chaos.proxy import Proxy
from tests.chaos.ray_faults import RAY_KINDS, RayNodes, can_happen
from tests.fixtures.stores.s3 import s3_options
from tests.fixtures.toy import toy_config

NOISE = ROOT / "tests" / "chaos" / "noise"
STAGE, MODEL = "0-grpo", "policy"
TICK_SECONDS = 0.02
MOST_RESTARTS = 40
MOST_DEFECTS = 3
"""Ends that no fault explains, before the world is given up."""
_LISTENING = re.compile(r"^listening on http://127\.0\.0\.1:(\d+)$", re.MULTILINE)
TRANSIENT = frozenset({
    "EngineUnreachable", "EngineBusy", "WorkerDied", "StorageUnavailable", "TransientEngineError", "ConnectError",
    "ReadTimeout", "ConnectTimeout", "ReadError", "RemoteProtocolError", "TimeoutError", "ConnectionError",
})  # fmt: skip
"""Errors that a worker may end with. After these it is started again."""


@dataclass(frozen=True)
class Mode:
    """What a world runs."""

    name: str
    deterministic: bool
    runs: int
    on_s3: bool
    memory_gib: float | None = None
    """What the engine may fill."""
    steps: int = 6
    step_seconds: float = 1.0
    """About how long a step takes: faults are spread over it."""
    seconds: float = 240.0
    """How long the world may take to end."""
    nodes_cpus: int = 0
    """CPUs of each node of the engine's Ray cluster; 0: the engine needs none."""
    engine: dict[str, Any] = field(default_factory=dict, hash=False)
    """More of the engine's config."""
    run: dict[str, Any] = field(default_factory=dict, hash=False)
    """Changes of the runs' config."""
    faults: int = 5
    """How many happen in a world."""
    noise: bool = False
    """Whether the engine's device does not repeat its sums (tests/chaos/noise)."""

    @property
    def max_staleness(self) -> int:
        return int(self.run.get("rules", {}).get("max_staleness", 0))

    @property
    def in_flight(self) -> bool:
        return self.run.get("rules", {}).get("weight_updates") == "in_flight"

    @property
    def reference(self) -> Mode:
        """The deterministic run of the same config to which no fault happens."""
        return replace(G2_FILE, steps=self.steps, engine=self.engine, run=self.run)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the processes that compute."""
        return {"PYTHONPATH": f"{NOISE}:{ROOT}"} if self.noise else {}


G2_S3 = Mode("G2 on S3", deterministic=True, runs=1, on_s3=True)
G1_S3 = Mode("G1, two runs, on S3", deterministic=False, runs=2, on_s3=True)
TIGHT_S3 = Mode("G2, two runs, room for one", deterministic=True, runs=2, on_s3=True, memory_gib=0.024)
"""A run in training takes 16 MB and its reference 4 MB. Policies of waiting runs are evicted and rebuilt."""
ON_CPU = {"device": "cpu", "compute_dtype": "float32"}
RANKS = Mode(
    "G1 on two Ray nodes, deepspeed x2", deterministic=False, runs=1, on_s3=False,
    step_seconds=2.0, seconds=1800.0, nodes_cpus=1, faults=3,
    engine=ON_CPU | {"trainer": {"kind": "deepspeed", "ranks": 2, "hang_seconds": 20}},
)  # fmt: skip
REPLICAS = Mode(
    "G1 on two Ray nodes, vLLM x2", deterministic=False, runs=1, on_s3=False,
    step_seconds=2.0, seconds=1800.0, nodes_cpus=1, faults=3,
    engine=ON_CPU | {"sampler": {"kind": "vllm", "replicas": 2, "kv_cache_gib": 0.25, "answer_seconds": 20}},
)  # fmt: skip
NOISY = Mode("G1 with noise, on S3", deterministic=False, runs=1, on_s3=True, noise=True, seconds=480.0)
NOISY_RANKS = replace(RANKS, name="G1 with noise, deepspeed x2", noise=True)
OWN_LANE = {"sampler": {"kind": "torch", "own_lane": True}}
LONG = {"max_new_tokens": 96, "min_new_tokens": 6}
"""Completions that still go on when a step is committed."""
BETWEEN = {"sampling": LONG, "rules": {"max_staleness": 2}}
IN_FLIGHT = {
    "sampling": LONG, "rules": {"max_staleness": 2, "weight_updates": "in_flight", "segment_seconds": 0.5}
}  # fmt: skip
ASYNC = Mode(
    "G1, in flight, 2 steps off, on S3", deterministic=False, runs=1, on_s3=True, steps=8, seconds=1800.0,
    engine=OWN_LANE, run=IN_FLIGHT,
)  # fmt: skip
ASYNC_BETWEEN = replace(ASYNC, name="G2, 2 steps off, on S3", deterministic=True, run=BETWEEN)
ASYNC_RANKS = replace(RANKS, name="G1, in flight, deepspeed x2", steps=8, seconds=2400.0, faults=5, run=IN_FLIGHT)
ASYNC_REPLICAS = replace(
    REPLICAS, name="G1, in flight, vLLM x2", steps=8, seconds=2400.0, faults=5, run=IN_FLIGHT,
    engine=ON_CPU | {"sampler": REPLICAS.engine["sampler"] | {"answer_seconds": 60}},
)  # fmt: skip
"""Several calls are sampled at a time, so that a replica on two busy cores may be silent for longer."""
G2_FILE = Mode("G2 on a folder", deterministic=True, runs=1, on_s3=False)
G1_FILE = Mode("G1, two runs, on a folder", deterministic=False, runs=2, on_s3=False)


@dataclass
class Happening:
    """A fault that happened, and what followed."""

    fault: Fault
    time: float
    died: list[str] = field(default_factory=list)
    """Processes that ended between the fault and the next commit or the next fault."""
    recovered: float | None = None
    """Seconds to the next committed step of its run, or to the end of the run."""
    last: bool = False
    """No step was left to commit: the run only had to be published and reported."""
    how: str = ""
    tokens_in_flight: int = 0
    """Tokens that were sampled and not committed when it happened."""
    sampled_again: int = 0
    """Tokens that were sampled again between it and the next fault."""


@dataclass
class End:
    """How a worker ended by itself."""

    worker: str
    status: int | None
    error: str
    time: float
    terminated: bool
    """A fault sent it SIGTERM."""


class Stuck(AssertionError):
    """A world did not end; the message has the logs."""


class World:
    """One life. Use as a context manager: nothing outlives it but its folder."""

    def __init__(
        self, folder: Path, mode: Mode, *, tiny_folder: Path, prefect: str, s3: S3Server | None, seed: int = 0
    ) -> None:
        folder.mkdir(parents=True)
        self.folder, self.mode = folder, mode
        self.s3 = s3 if mode.on_s3 else None
        self.random = random.Random(f"world-{seed}")
        # Every connection of the world passes through a proxy that can fail.
        self.engine_line = Proxy("worker-engine")
        self.prefect_line = Proxy("workers-prefect", urlsplit(prefect).port or 0)
        self.s3_lines = [Proxy(name, self.s3.port) for name in ("engine-s3", "workers-s3")] if self.s3 else []
        self.url = f"s3://{BUCKET}/{folder.parent.name}-{folder.name}" if self.s3 else f"file://{folder}/data"
        # What the world has observed so far.
        self.children: list[Child] = []
        self.workers: list[Child] = []
        """The newest worker of each run."""
        self.zombies: list[Child] = []
        self.ends: list[End] = []
        self.starts: list[tuple[str, float]] = []
        self.deaths: list[tuple[str, float]] = []
        self.happenings: list[Happening] = []
        self.finished: set[int] = set()
        self.ended: float = 0.0
        self.engine: Child
        self._seen: set[int] = set()
        self._due: list[tuple[float, Callable[[], object]]] = []
        self._pauses: list[tuple[Iterator[Pause], Callable[[], bool]]] = []
        self._log_at, self._log_rest = 0, b""
        self.log: list[dict[str, Any]] = []
        """The work log so far, without its tokens."""
        self.tokens: list[dict[str, Any]] = []
        """The lines of the work log for single tokens."""
        # Configs of the runs and of the engine.
        for run in range(mode.runs):
            self._write_config(run, tiny_folder)
        self.ray = RayNodes(mode.nodes_cpus, mode.environment) if mode.nodes_cpus else None
        engine: dict[str, Any] = {"deterministic": mode.deterministic, "threads": 1} | mode.engine
        if self.ray is not None:
            engine["cluster"] = {"address": self.ray.address}
        if mode.memory_gib is not None:
            engine |= {"memory_gib": mode.memory_gib, "residency_seconds": 0.5}
        (folder / "engine.yaml").write_text(yaml.safe_dump(engine))

    def run_key(self, run: int) -> str:
        return f"chaos-{run}"

    def store(self) -> ObjectStore:
        """The store as it is, past all faults."""
        return open_store(self.url, s3_options(self.s3.endpoint) if self.s3 else None)

    def _write_config(self, run: int, tiny_folder: Path) -> None:
        config = toy_config(
            self.folder,
            tiny_folder,
            # a reward that an untrained model varies in: every step moves the weights
            grader__path="tests.fixtures.grading:even_share",
            algorithm__steps=self.mode.steps,
            algorithm__samples_per_batch=8,
            algorithm__samples_per_mini_batch=8,
            algorithm__prompts_per_shard=1,
            checkpoints__recovery_steps=3,
            model__publish_as=f"toy-{run}",
            storage__url=self.url,
            **self.mode.run,
        )
        config["engine"] = {
            "kind": "http", "url": self.engine_line.endpoint, "timeout_seconds": 4, "patience_seconds": 20,
        }  # fmt: skip
        (self.folder / f"config-{run}.yaml").write_text(yaml.safe_dump(config))

    # -- processes ---------------------------------------------------------------------------------------------

    def start_engine(self) -> Child:
        number = sum(child.name.startswith("engine") for child in self.children)
        command = [
            sys.executable, "-m", "flows.cli.main", "engine", "serve", "--storage", self.url, "--port", "0",
            "--config", "engine.yaml", "--grace-seconds", "10",
        ]  # fmt: skip
        environment = dict(self.mode.environment)
        environment |= s3_environment(self.s3_lines[0].endpoint) if self.s3 else {}
        self.engine = self._start(Child(f"engine-{number}", command, self.folder, environment))
        self.engine_line.upstream_port = 0
        self.engine_line.cut()
        return self.engine

    def start_worker(self, run: int) -> Child:
        number = sum(child.name.startswith(f"worker-{run}.") for child in self.children)
        command = [
            sys.executable, str(ROOT / "tests" / "chaos" / "bare_worker.py"), "run", "grpo",
            "--config", f"config-{run}.yaml", "--run", self.run_key(run),
        ]  # fmt: skip
        environment = {"PREFECT_API_URL": f"{self.prefect_line.endpoint}/api", "PREFECT_LOGGING_LEVEL": "WARNING"}
        environment |= s3_environment(self.s3_lines[1].endpoint) if self.s3 else {}
        worker = self._start(Child(f"worker-{run}.{number}", command, self.folder, environment))
        self.workers[run : run + 1] = [worker]
        return worker

    def _start(self, child: Child) -> Child:
        child.environment |= {"OSTINATO_WORKLOG": str(self.folder / "work.log")}
        self.children.append(child.start())
        self.starts.append((child.name, time.time()))
        return child

    def __enter__(self) -> World:
        if self.ray is not None:
            self.ray.start()
        self.start_engine()
        for run in range(self.mode.runs):
            self.start_worker(run)
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            child.end()
        for proxy in (self.engine_line, self.prefect_line, *self.s3_lines):
            proxy.close()
        if self.ray is not None:
            self.ray.end()
        if self.s3 is not None and (self.s3.child.frozen or not self.s3.child.alive):
            self.s3.child.end()
            self.s3.start()

    # -- what was seen -----------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        return len(self.finished) == self.mode.runs

    def _read_log(self) -> None:
        path = self.folder / "work.log"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._log_at)
            data = file.read()
        self._log_at += len(data)
        *lines, self._log_rest = (self._log_rest + data).split(b"\n")
        for event in map(json.loads, lines):
            (self.tokens if event["event"] == "token" else self.log).append(event)

    def step_of(self, run: int) -> int | None:
        """Steps made so far by the run; None before its loop has started."""
        started, step = False, 0
        for event in self.log:
            if event["event"] in ("start", "step") and f":{self.run_key(run)}/" in event.get("policy", ""):
                started, step = True, max(step, event.get("step", 0), event.get("resumed_from", 0))
        return step if started else None

    def driving(self, worker: Child) -> bool:
        """Whether that worker's loop has started."""
        return any(event["event"] == "start" and event["pid"] == worker.pid for event in self.log)

    def moved_on(self, run: int) -> Callable[[], bool]:
        """Until the run has made two steps from now, or ended."""
        before = self.step_of(run) or 0
        return lambda: run in self.finished or (self.step_of(run) or 0) >= min(before + 2, self.mode.steps)

    def _ready(self, fault: Fault) -> bool:
        """Whether the fault's moment has come and its target is there to be hit."""
        step = self.step_of(fault.run)
        if fault.step >= 0 and (step is None or step < fault.step):
            return False
        if fault.kind in OF_WORKER:
            worker = self.workers[fault.run]
            there = worker.alive and not worker.frozen and fault.run not in self.finished
            return there and (fault.step < 0 or self.driving(worker))
        if fault.kind in RAY_KINDS:
            return self.engine.alive and self.engine_line.upstream_port != 0 and can_happen(self, fault)
        if fault.kind in OF_ENGINE:
            listening = self.engine_line.upstream_port != 0
            return self.engine.alive and not self.engine.frozen and (fault.step < 0 or listening)
        if fault.kind in OF_S3 and "kill" in fault.kind:
            assert self.s3 is not None
            return self.s3.child.alive and not self.s3.child.frozen
        return True

    def is_defect(self, end: End) -> bool:
        """Whether a worker ended as none may: neither done, nor terminated, nor by an error that passes, nor fenced
        where two drove one run (of two that open it at once, either may be the later)."""
        run = end.worker.partition(".")[0]
        fenced = end.error == "Fenced" and any(worker.name.startswith(f"{run}.") for worker in self.zombies)
        return not (end.status == 0 or end.terminated or end.error in TRANSIENT or fenced)

    # -- life --------------------------------------------------------------------------------------------------

    def live(self, schedule: list[Fault]) -> list[Happening]:
        """Until every run has ended and every fault that began is over. Raises Stuck."""
        left, armed = list(schedule), 0.0
        deadline = time.monotonic() + self.mode.seconds
        while not (self.over and not self._pauses):
            if time.monotonic() > deadline:
                raise Stuck(f"the world did not end within {self.mode.seconds:.0f} s\n{self.tails()}")
            self._tick()
            if left and not self.over and self._ready(left[0]):
                armed = armed or time.monotonic() + left[0].offset
                if time.monotonic() >= armed:
                    self._begin(left.pop(0))
                    armed = 0.0
            time.sleep(TICK_SECONDS)
        self._read_log()
        return self.happenings

    def _begin(self, fault: Fault) -> None:
        self.happenings.append(Happening(fault, time.time()))
        happening = (KINDS | RAY_KINDS)[fault.kind](self, fault)
        self._go_on(happening)

    def _go_on(self, happening: Iterator[Pause]) -> None:
        try:
            pause = next(happening)
        except StopIteration:
            return
        if callable(pause):
            self._pauses.append((happening, pause))
        else:
            until = time.monotonic() + pause
            self._pauses.append((happening, lambda: time.monotonic() >= until))

    def _tick(self) -> None:
        self._read_log()
        for happening, is_over in list(self._pauses):
            if is_over():
                self._pauses.remove((happening, is_over))
                self._go_on(happening)
        for at, do in list(self._due):
            if time.monotonic() >= at:
                self._due.remove((at, do))
                do()
        if self.engine_line.upstream_port == 0 and (found := _LISTENING.search(self.engine.text())):
            self.engine_line.upstream_port = int(found[1])
        for child in [*self.children, *([self.s3.child] if self.s3 else [])]:
            if not child.alive and child.process is not None and child.pid not in self._seen:
                self._seen.add(child.pid)
                self._bury(child)

    def _bury(self, child: Child) -> None:
        """A process ended. Its supervisor starts it again after a moment."""
        if child.status != 0:
            self.deaths.append((child.name, time.time()))
        if len(self.starts) > MOST_RESTARTS:
            raise Stuck(f"{len(self.starts)} processes were started\n{self.tails()}")
        if self.s3 is not None and child is self.s3.child:
            self._soon(lambda: (child.start(), self.starts.append(("s3", time.time()))))
        elif child is self.engine:
            self.engine_line.upstream_port = 0
            self._soon(lambda: self.start_engine() if child is self.engine else None)
        elif child.name.startswith("worker"):
            self._bury_worker(child)

    def _bury_worker(self, child: Child) -> None:
        run = int(child.name.partition("-")[2].partition(".")[0])
        if child.status is not None and child.status >= 0:
            error = error_of(child.text()) if child.status else ""
            self.ends.append(End(child.name, child.status, error, time.time(), child.terminated))
            if sum(map(self.is_defect, self.ends)) >= MOST_DEFECTS:
                raise Stuck(f"{child.name} and others before it ended by {error or 'an unnamed error'}\n{self.tails()}")
        if child.status == 0:
            self.finished.add(run)
            self.ended = time.time()
        if run in self.finished or child is not self.workers[run]:
            return
        self._soon(lambda: self.start_worker(run) if child is self.workers[run] else None)

    def _soon(self, do: Callable[[], object]) -> None:
        self._due.append((time.monotonic() + self.random.uniform(0.1, 0.6), do))

    def tails(self) -> str:
        servers = [self.s3.child] if self.s3 else []
        return "\n".join(child.tail() for child in [*self.children[-6:], *servers]) + f"\nlogs: {self.folder}"
