"""Samples the shards of one large step through a real engine server with a stub in place of the model.

    PYTHONPATH=. .venv/bin/python bench/many_shards.py --shards 320 5000

For each number of shards, a server process runs the app of `ostinato engine serve` over `StubEngine`, and a client
process samples and grades all shards as a step of GRPO does, without Prefect's task runs. Printed are the wall and CPU
seconds and the peak resident memory of the client, the most calls and connections that the server had at once, and the
requests that it refused. The growth of the client's memory begins after the first shards were sampled.

The store is a folder in a temporary directory. The stub takes `--seconds` per call, and `--lanes` calls at once.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.scale_sim_engine import NUMERICS
from bench.speed.ours import WithoutPrefect
from engine.http.app import create_app
from engine.http.calls import CallLimits
from engine.http.lifecycle import Binding, EngineServer
from engine.http.service import ServerOptions
from engine.protocol import Completion, EngineInfo, GenerateRequest, SamplingParams
from engine.specs.engine import HttpEngineSpec
from engine.workspace import Workspace
from flows.training.rollout_collection import PromptShards, RolloutCollector
from storage.chain.records import PolicyRef
from storage.store.artifacts import ArtifactRef, Provenance
from storage.store.objects import open_store, store_id
from tasks.graders.spec import grader_spec
from tasks.plans import Grading, PromptShard

PROVENANCE = Provenance(code_version="bench", config_digest="0" * 64, seed=0)
POLICY = PolicyRef(run="many", stage="0-grpo", model="policy", step=0, state="0" * 64)
WARM_UP = 16
"""Shards that are sampled before the client's memory is measured first."""


@dataclass(frozen=True)
class Load:
    """The size of the step, and the speed of the stub."""

    shards: int
    completions: int = 4
    """Completions of the one prompt of a shard."""
    tokens: int = 32
    """Tokens per completion."""
    seconds: float = 0.02
    """Time that the stub takes for a call."""
    lanes: int = 64
    """Calls that the stub computes at once."""
    limits: CallLimits = field(default_factory=CallLimits)
    timeout_seconds: float = 30.0
    patience_seconds: float = 300.0


@dataclass
class ServerFigures:
    """What the server counted."""

    calls: int = 0
    """Calls of `generate` that were computed."""
    most_calls: int = 0
    """Most unfinished calls at once."""
    most_connections: int = 0
    refused: int = 0
    """Responses with status 503."""


@dataclass(frozen=True)
class ClientFigures:
    """What the client measured. Memory is resident memory in bytes."""

    rollouts: int
    graded: int
    wall: float
    cpu: float
    memory_before: int
    memory_peak: int


class StubEngine:
    """Implements the methods of engine.protocol.Engine that sampling needs. Every token has the same logprob."""

    def __init__(self, store_url: str, load: Load) -> None:
        self.store, self.load, self.calls = open_store(store_url), load, 0
        self._lanes = asyncio.Semaphore(load.lanes)

    async def generate(self, request: GenerateRequest, *, epoch: int = 0) -> list[Completion]:
        async with self._lanes:
            await asyncio.sleep(self.load.seconds)
        self.calls += 1
        tokens = self.load.tokens
        return [Completion([65 + seed % 26] * tokens, [-1.0] * tokens, "length") for seed in request.seeds]

    async def info(self) -> EngineInfo:
        return EngineInfo(
            numerics=NUMERICS, store_id=store_id(self.store), memory_bytes=1, memory_used_bytes=0,
            operations_per_second=1.0,
        )  # fmt: skip

    async def close(self) -> None:
        pass


# -- the server ------------------------------------------------------------------------------------------------------


def serve(pipe: Connection, store_url: str, load: Load) -> None:
    """Serves until the other end sends something, and answers with the figures. Sends the port first."""
    asyncio.run(_serve(pipe, store_url, load))


async def _serve(pipe: Connection, store_url: str, load: Load) -> None:
    listener = Binding("127.0.0.1", 0).open()
    engine, figures = StubEngine(store_url, load), ServerFigures()
    app = create_app(engine, engine.store, ServerOptions(limits=load.limits))  # type: ignore[arg-type]
    service, server = app.state.service, EngineServer(app)
    submit = service.calls.submit

    def submit_and_count(*arguments: Any, **options: Any) -> Any:
        call = submit(*arguments, **options)
        figures.most_calls = max(figures.most_calls, service.calls.waiting())
        figures.most_connections = max(figures.most_connections, len(server.server_state.connections))
        return call

    service.calls.submit = submit_and_count
    serving = asyncio.create_task(server.serve([listener]))
    await service.until_ready(serving)
    pipe.send(listener.getsockname()[1])
    await asyncio.to_thread(pipe.recv)
    figures.calls = engine.calls
    for sample in next(iter(service.metrics.requests.collect())).samples:
        if sample.name.endswith("_total") and sample.labels["status"] == "503":
            figures.refused += int(sample.value)
    pipe.send(figures)
    server.should_exit = True
    await serving


# -- the client ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StubModel:
    """What the collector reads of a model."""

    workspace: Workspace
    sampling: SamplingParams


def sample(pipe: Connection, workspace: Workspace, shards: list[PromptShard], load: Load) -> None:
    """Samples and grades the shards. Sends ClientFigures, or the error."""
    try:
        pipe.send(asyncio.run(_sample(workspace, shards, load)))
    except Exception as error:  # noqa: BLE001 - the boundary of the process
        pipe.send(f"{type(error).__name__}: {error}")


async def _sample(workspace: Workspace, shards: list[PromptShard], load: Load) -> ClientFigures:
    anything: Any = None
    model: Any = StubModel(workspace, SamplingParams(max_new_tokens=load.tokens))
    source = WithoutPrefect(Grading(grader=grader_spec("tasks.graders.rules:RegexMatch", {"pattern": "[A-M]"})))
    collector = RolloutCollector(PromptShards(model, anything, 1, 1, 1, anything, None, "error"), source)
    rollouts, graded = await collector.sample_and_grade(POLICY, shards[:WARM_UP], step=0)
    before, wall, cpu = resident_bytes("VmRSS"), time.perf_counter(), time.process_time()
    more_rollouts, more_graded = await collector.sample_and_grade(POLICY, shards[WARM_UP:], step=0)
    figures = ClientFigures(
        rollouts=len({ref.key for ref in rollouts + more_rollouts}),
        graded=len({ref.key for ref in graded + more_graded}),
        wall=time.perf_counter() - wall,
        cpu=time.process_time() - cpu,
        memory_before=before,
        memory_peak=resident_bytes("VmHWM"),
    )
    await workspace.connect().close()
    return figures


def resident_bytes(name: str) -> int:
    """VmRSS: resident memory now. VmHWM: its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {name}")


# -- both ------------------------------------------------------------------------------------------------------------


def publish_inputs(store_url: str, shards: int) -> tuple[ArtifactRef, ArtifactRef]:
    """Publishes a tiny model and a dataset of one prompt per shard."""
    from engine.backends.torch.tiny import build_tiny_model
    from engine.text.threads import StringThread
    from storage.registry.models import publish_model
    from tasks.datasets.load import load_dataset
    from tasks.datasets.spec import InlineDataset

    store = open_store(store_url)
    with tempfile.TemporaryDirectory() as scratch:
        model = build_tiny_model(Path(scratch, "model"), seed=0, hidden=64, layers=1)
        files = {path.name: path for path in model.iterdir()}
        base = publish_model(store, "tiny", "1", files, provenance=PROVENANCE)
    threads = [StringThread().user(f"What is {row} times {row % 97}?") for row in range(shards)]
    return base, load_dataset(store, InlineDataset.of(threads), provenance=PROVENANCE).ref


def measure(load: Load) -> tuple[ClientFigures, ServerFigures]:
    """Samples one step. Raises RuntimeError with the client's error."""
    with tempfile.TemporaryDirectory(prefix="many-shards-") as scratch:
        store_url = f"file://{scratch}/store"
        base, dataset = _in_child(publish_inputs, store_url, load.shards)
        shards = []
        for index in range(load.shards):
            shard = PromptShard(base=base, dataset=dataset, index=index, rows=(index,), completions=load.completions)
            shards.append(shard)
        with _child(serve, store_url, load) as server:
            url = f"http://127.0.0.1:{server.recv()}"
            spec = HttpEngineSpec(url=url, timeout_seconds=load.timeout_seconds, patience_seconds=load.patience_seconds)
            workspace = Workspace(store=store_url, engine=spec, run=POLICY.run, provenance=PROVENANCE)
            with _child(sample, workspace, shards, load) as client:
                outcome = client.recv()
            server.send(None)
            figures = server.recv()
    if isinstance(outcome, str):
        raise RuntimeError(f"{outcome} ({asdict(figures)})")
    return outcome, figures


@contextmanager
def _child(function: Callable[..., None], *arguments: Any) -> Any:
    """A process that runs the function with one end of a pipe; yields the other end."""
    context = multiprocessing.get_context("spawn")
    pipe, child_pipe = context.Pipe()
    child = context.Process(target=function, args=(child_pipe, *arguments), daemon=True)
    child.start()
    # With the last other copy of the child's end closed, `recv` fails if the child dies.
    child_pipe.close()
    try:
        yield pipe
    finally:
        child.join(30)


def _in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, nargs="+", default=[320, 5000])
    parser.add_argument("--completions", type=int, default=Load.completions)
    parser.add_argument("--tokens", type=int, default=Load.tokens)
    parser.add_argument("--seconds", type=float, default=Load.seconds)
    parser.add_argument("--lanes", type=int, default=Load.lanes)
    parser.add_argument("--timeout", type=float, default=Load.timeout_seconds)
    parser.add_argument("--patience", type=float, default=Load.patience_seconds)
    options = parser.parse_args()
    for shards in options.shards:
        load = Load(
            shards, options.completions, options.tokens, options.seconds, options.lanes,
            timeout_seconds=options.timeout, patience_seconds=options.patience,
        )  # fmt: skip
        try:
            client, server = measure(load)
        except RuntimeError as error:
            print(f"{shards:,} shards: failed: {error}", flush=True)
            continue
        growth = client.memory_peak - client.memory_before
        print(
            f"{shards:,} shards: {client.wall:.1f} s, {client.cpu:.1f} CPU-s of the client, its memory "
            f"{client.memory_before >> 20} MiB + {growth >> 20} MiB; at most {server.most_calls} calls and "
            f"{server.most_connections} connections at once, {server.refused} refused requests",
            flush=True,
        )


if __name__ == "__main__":
    main()
