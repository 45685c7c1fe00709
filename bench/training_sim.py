"""Where the time of a long GRPO run goes: the real loop, engine, checkpoints and store, on simulated devices and S3.

    PYTHONPATH=. .venv/bin/python bench/training_sim.py --steps 1000 --prompts 1024
    PYTHONPATH=. .venv/bin/python bench/training_sim.py --steps 200 --kills 5

Real: flows.grpo with its checkpoint schedule, `LocalEngine` with its queue, restores, redos and uploads, and the store
with its retries. Simulated: the trainer and the sampler, whose calls last as long as bench/cost_model.py says for the
whole model and batch, and S3. Their data are small: a few weights, and some of the rows of a batch. The clock is
virtual (bench.virtual_time): CPU seconds of the real code count as they are.

The seconds of a step's rows that are not simulated are added to the coordinator's, by the cost model's constants.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import bench.without_prefect  # noqa: F401 - first, before the tasks
from bench import cost_model as model
from bench.scale_sim_store import Meter, S3Model, SimulatedS3, VirtualRetry
from bench.virtual_time import VirtualTime, run
from engine.backends.protocol import UpdateReport
from engine.backends.replicas.broadcast import BUCKET_BYTES, EXCHANGE_INTERVAL, bucket_plans
from engine.backends.torch.tiny import build_tiny_model
from engine.backends.weight_files.digests import digest_tensors
from engine.backends.weight_files.sketches import sketch_of_tensors
from engine.errors import TransientEngineError
from engine.handles import Model
from engine.local.engine import LocalEngine
from engine.local.materialise import Materialiser
from engine.local.queue import FairQueue
from engine.protocol import ActorCount, Completion
from engine.specs.engine import LocalEngineSpec
from engine.text.threads import StringThread
from engine.workspace import Workspace
from flows.configs.common import CheckpointConfig
from flows.display.terminal import TerminalProgress
from flows.grpo import GRPO
from flows.training.checkpointing import CheckpointSchedule
from flows.training.schedules import ConstantScheduler
from storage.chain.records import Chain, Numerics, PolicyRef
from storage.serialization import FileDigest
from storage.store.artifacts import Provenance
from storage.store.objects import ObjectStore
from tasks.datasets.load import load_dataset
from tasks.datasets.spec import FileDataset
from tasks.graders.base import BaseGrader, Grade

PROVENANCE = Provenance(code_version="bench", config_digest="0" * 64, seed=0)
COMPLETIONS, NEW_TOKENS = 8, 16
SENT, RECEIVED = "digests of synced weights, senders", "digests of synced weights, receivers"
LOST = ("digests", "sketches", "weight syncs", SENT, RECEIVED, "copies of checkpoints", "last checkpoint")
"""The parts that are checkpoints, digests and syncs."""
SHOWN_EVERY = 50
"""Steps between two tables of what has passed so far."""
UPLOAD_THREADS = ("ostinato-upload", "ostinato-files")


@dataclass(frozen=True)
class Seconds:
    """How long the simulated devices take."""

    sample: float
    """All completions of a step. So with `score` and `train`."""
    score: float
    train: float
    digest: float
    """The digest of the master weights, on all ranks."""
    sketch: float
    sync: float
    """The transfer of the weights to the samplers."""
    sent: float
    """The digests of the weights of a sync where they leave, and ..."""
    received: float
    """... where they arrive."""
    copy: float
    """A checkpoint, from the ranks to their disks."""
    upload: float
    download: float
    rows: float
    """CPU seconds of the coordinator for the rows of a step."""


def seconds_of(
    shape: model.Shape,
    cluster: model.Cluster,
    work: model.Work,
    *,
    uploaders: int,
    disk: float,
    receiver_rate: float,
    folder_rate: float | None = None,
) -> Seconds:
    """`uploaders`: processes that transfer a checkpoint. `disk`: bytes per second of all ranks' disks together.
    `receiver_rate`: bytes per second that one sampler's process digests; each receives all weights. `folder_rate`:
    bytes per second of the shared folder through which the weights go (transport "checkpoint"), where the engine's
    process digests them; None: every rank broadcasts and digests its own part (transport "nccl")."""
    split = model.step_split(shape, cluster, work)
    master, synced = 4 * shape.parameters, model.WEIGHT_BYTES * shape.parameters
    checkpoint = model.STATE_BYTES * shape.parameters
    sent_rate = cluster.train * model.GPU_DIGEST_BYTES_PER_SECOND
    if folder_rate:
        sent_rate = model.DIGEST_BYTES_PER_SECOND
    return Seconds(
        sample=split.sample,
        score=split.score,
        train=split.train,
        digest=master / cluster.train / model.GPU_DIGEST_BYTES_PER_SECOND,
        sketch=master / cluster.train / model.GPU_SKETCH_BYTES_PER_SECOND,
        sync=2 * synced / folder_rate if folder_rate else split.sync + broadcast_overhead(cluster.train),
        sent=synced / sent_rate,
        received=synced / receiver_rate,
        copy=checkpoint / disk,
        upload=checkpoint / (uploaders * model.UPLOAD_BYTES_PER_SECOND),
        download=checkpoint / (uploaders * model.DOWNLOAD_BYTES_PER_SECOND),
        rows=split.coordinator,
    )


def llama_70b() -> dict[str, tuple[int, ...]]:
    """The shapes of Llama 3 70B's tensors, by name."""
    hidden, inner, keys, vocabulary = 8192, 28_672, 1024, 128_256
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden)}
    shapes["model.norm"] = (hidden,)
    for number in range(80):
        layer = f"model.layers.{number}."
        shapes |= {layer + "q_proj": (hidden, hidden), layer + "o_proj": (hidden, hidden)}
        shapes |= {layer + "k_proj": (keys, hidden), layer + "v_proj": (keys, hidden)}
        shapes |= {layer + "gate": (inner, hidden), layer + "up": (inner, hidden), layer + "down": (hidden, inner)}
        shapes |= {layer + "norm_1": (hidden,), layer + "norm_2": (hidden,)}
    return dict(sorted(shapes.items()))


def broadcast_overhead(ranks: int) -> float:
    """Seconds of a sync that do not depend on the link: the starts of the broadcasts of all buckets, as the real code
    plans them for ZeRO 3, and the time until a member notices that a bucket has arrived."""
    manifest, parts = {}, {}
    for name, shape in llama_70b().items():
        elements = math.prod(shape)
        length = -(-elements // ranks)
        manifest[name] = ("torch.bfloat16", shape, "")
        bounds = [min(rank * length, elements) for rank in range(ranks + 1)]
        parts[name] = [(rank, bounds[rank], bounds[rank + 1] - bounds[rank]) for rank in range(ranks)]
    plans = list(bucket_plans(manifest, parts, BUCKET_BYTES))
    return len(plans) * EXCHANGE_INTERVAL + sum(map(len, plans)) * model.BROADCAST_START_SECONDS


class EngineKilled(TransientEngineError):
    """The engine that was called has been killed."""


class Site:
    """The devices, the store, and the engine that lives now."""

    def __init__(self, clock: VirtualTime, seconds: Seconds, folder: Path, *, rows: int, ranks: int) -> None:
        self.clock, self.seconds, self.rows, self.ranks = clock, seconds, rows, ranks
        self.parts: Counter[str] = Counter()
        """Virtual seconds of the engine's compute thread and of the loop."""
        self.began, self.copies = 0.0, 0
        self.busy = 0.0
        """Virtual seconds in which the compute thread had a call."""
        self.kills: dict[int, float] = {}
        """The step that is being taken when the engine is killed, and the share of its update that is done."""
        self.trained, self.redone, self.restarts, self.generation = 0, 0, 0, 0
        meter = Meter()
        self.s3 = S3(folder, S3Model(), clock=RequestClock(self), meter=meter, seed=0, bytes_scale={})  # type: ignore[arg-type]
        self.s3.site = self
        self.meter, self.retry = meter, VirtualRetry(RequestClock(self), meter)  # type: ignore[arg-type]
        self.store = ObjectStore(self.s3, retry=self.retry)
        self._down = asyncio.Event()
        self._restart = asyncio.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.engine: LocalEngine | None = None

    def spend(self, part: str, seconds: float) -> None:
        """The devices work for `seconds`. The caller is the compute thread."""
        self.parts[part] += seconds
        self.clock.advance(seconds)

    def start_engine(self) -> None:
        store = ObjectStore(OfEngine(self, self.generation), retry=self.retry)  # type: ignore[arg-type]
        backend, samplers = SimulatedBackend(self, self.generation), SimulatedSamplers(self)
        with (
            patch("engine.local.engine.open_store", lambda _: store),
            patch("engine.local.engine.create_trainer_backend", lambda _: backend),
            patch("engine.local.engine.create_sampler_backend", lambda *_: samplers),
        ):
            self.engine = LocalEngine("sim://", LocalEngineSpec(threads=1))
        self._down = asyncio.Event()

    def kill(self) -> None:
        """Kills the engine, with its uploads. Called in its compute thread."""
        self.generation += 1
        self.s3.free_at = self.clock.read()
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self._down.set)
        raise EngineKilled("killed")

    async def call(self, name: str, arguments: Any, keywords: Any) -> Any:
        """Calls the engine as its HTTP client does: a call that ends with the engine is made again when it is back."""
        while True:
            engine, down = self.engine, self._down
            call = asyncio.ensure_future(getattr(engine, name)(*arguments, **keywords))
            death = asyncio.ensure_future(down.wait())
            await asyncio.wait({call, death}, return_when=asyncio.FIRST_COMPLETED)
            death.cancel()
            if call.done() and not isinstance(call.exception(), EngineKilled):
                return call.result()
            call.cancel()
            async with self._restart:
                if self.engine is engine:
                    await asyncio.sleep(model.START_SECONDS)
                    self.restarts += 1
                    self.start_engine()


class Client:
    """The engine as the tasks see it."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments, **keywords: self._site.call(name, arguments, keywords)


# -- the store ---------------------------------------------------------------------------------------------------


class RequestClock:
    """The clock of requests. Those of uploads pass while the run goes on. All others count one after another, also
    where the code makes several at the same time, so that their sum is an upper bound."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def read(self) -> float:
        return self._site.clock.read()

    def advance(self, seconds: float) -> None:
        if threading.current_thread().name.startswith(UPLOAD_THREADS):
            self._site.clock.advance(seconds)
        else:
            self._site.clock.add(max(0.0, seconds))


class S3(SimulatedS3):
    """S3, with checkpoints of the model's size. All their files share the rate of the processes that transfer them."""

    site: Site
    free_at = 0.0
    """Virtual time at which the transfers so far will have ended."""

    def _transfer(self, key: str, seconds: float) -> None:
        if "/checkpoints/" not in key:
            return
        with self._lock:
            now = self.site.clock.read()
            self.free_at = max(self.free_at, now) + seconds / self.site.ranks
            wait = self.free_at - now
        self.site.clock.advance(wait)

    def put_file(self, key: str, path: Path, *, move: bool, resume: bool) -> FileDigest:
        self._transfer(key, self.site.seconds.upload)
        return super().put_file(key, path, move=move, resume=resume)

    def download(self, key: str, to: Path) -> FileDigest:
        self._transfer(key, self.site.seconds.download)
        return super().download(key, to)


class OfEngine:
    """The store of one engine. After a kill, its threads reach nothing more."""

    def __init__(self, site: Site, generation: int) -> None:
        self._site, self._generation = site, generation

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._site.s3, name)
        if not callable(method):
            return method

        def call(*arguments: Any, **keywords: Any) -> Any:
            self._check()
            result = method(*arguments, **keywords)
            self._check()
            return result

        return call

    def _check(self) -> None:
        if self._site.generation != self._generation:
            raise EngineKilled("the engine of this upload was killed")


# -- the devices -------------------------------------------------------------------------------------------------


class SimulatedBackend:
    """Implements engine.backends.protocol.TrainerBackend for models that are trained as a whole."""

    threads, devices, actors, transfers = 1, 1, ActorCount(), None
    device, compute_dtype, master_dtype = torch.device("cpu"), torch.bfloat16, torch.float32

    def __init__(self, site: Site, generation: int) -> None:
        self._site, self._generation = site, generation

    def numerics(self) -> Numerics:
        return Numerics(
            backend="simulated", device="none", compute_dtype="bfloat16", threads=1,
            max_tokens=LocalEngineSpec().max_tokens_per_forward,
        )  # fmt: skip

    def prepare_thread(self) -> None:
        """Does nothing: the devices are simulated."""

    def threads_of(self, numerics: Numerics) -> Any:
        return nullcontext()

    def memory_bytes(self) -> int:
        return 1 << 50

    def operations_per_second(self) -> float:
        return 1e15

    def try_load(self, folder: Path) -> None:
        """Every folder is accepted."""

    def load(self, folder: Path, *, head: str = "lm", init_seed: int = 0) -> SimulatedTrainer:
        return SimulatedTrainer(self._site, self._generation)

    def close(self) -> None:
        """There is nothing to close."""


class SimulatedTrainer:
    """Implements engine.backends.protocol.Trainer: a few weights, and calls that last as long as those of the model."""

    base, adapter, scalar, weights_nbytes = None, None, False, 1 << 10

    def __init__(self, site: Site, generation: int) -> None:
        self._site, self._generation = site, generation
        self._weights_2W = torch.zeros(2, 64)
        self._updates = 0

    @property
    def alive(self) -> bool:
        return self._site.generation == self._generation

    def nbytes(self, *, training: bool = True) -> int:
        return 1 << 10

    def update(
        self, samples: Sequence[Any], objective: Any, optimizer: Any, *, max_tokens: int, on_micro_batch: Any
    ) -> UpdateReport:
        site = self._site
        seconds = site.seconds.train * len(samples) / site.rows
        self._updates += 1
        if self._updates <= site.trained:
            site.redone += 1
            site.spend("steps again", seconds)
        else:
            # the number of the update is that of its step: there is one in each
            share = site.kills.pop(self._updates, None)
            if share is not None:
                site.spend("steps again", share * seconds)
                site.kill()
            site.trained = self._updates
            site.spend("training", seconds)
        on_micro_batch()
        # equal samples after equal weights give equal weights
        sha256 = hashlib.sha256(self._weights_2W.numpy().tobytes())
        for sample in samples:
            sha256.update(sample.token_ids.tobytes())
        generator = torch.Generator().manual_seed(int.from_bytes(sha256.digest()[:7], "big"))
        self._weights_2W += 1e-3 * torch.randn(2, 64, generator=generator)
        tokens = float(sum(sample.trained for sample in samples))
        return UpdateReport({"loss": 0.0, "grad_norm": 1.0, "tokens": tokens}, micro_batches=1, max_tokens=max_tokens)

    def logprobs(self, sequences: Sequence[Any], *, temperature: float, max_tokens: int) -> list[Any]:
        self._site.spend("scoring", self._site.seconds.score / 2 * len(sequences) / self._site.rows)
        return [np.full(int(sequence.loss_mask.sum()), -1.0) for sequence in sequences]

    def reset_optimizer(self) -> None:
        """There are no moments."""

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [(f"layer.{number}", weights) for number, weights in enumerate(self._weights_2W)]

    def weights_digest(self) -> tuple[str, dict[str, str]]:
        self._site.spend("digests", self._site.seconds.digest)
        return digest_tensors(self._tensors())

    def weights_sketch(self) -> Any:
        self._site.spend("sketches", self._site.seconds.sketch)
        return sketch_of_tensors(self._tensors())

    def write_checkpoint(self, folder: Path) -> dict[str, Path]:
        self._site.copies += 1
        self._site.spend("copies of checkpoints", self._site.seconds.copy)
        folder.mkdir(parents=True, exist_ok=True)
        files = {f"part-{rank:05d}": folder / f"part-{rank:05d}" for rank in range(self._site.ranks)}
        content = json.dumps([self._updates, self._weights_2W.tolist()])
        for path in files.values():
            path.write_text(content)
        return files

    def read_checkpoint(self, files: dict[str, Path], *, optimizer: bool) -> None:
        self._updates, weights = json.loads(files["part-00000"].read_text())
        self._weights_2W = torch.tensor(weights)


class SimulatedSamplers:
    """Implements engine.backends.protocol.SamplerBackend."""

    devices, actors, tensor_parallel_from_config, concurrent_calls = 1, ActorCount(), True, 1

    def __init__(self, site: Site) -> None:
        self._site = site

    def added_bytes(self, trainer: Any) -> int:
        return 0

    def new_sampler(self, trainer: Any, **_: Any) -> SimulatedSampler:
        return SimulatedSampler(self._site)

    def offload_for_training(self) -> None:
        """The samplers have GPUs of their own."""

    def close(self) -> None:
        """There is nothing to close."""


@dataclass
class SimulatedWeights:
    """Implements engine.backends.protocol.StagedWeights."""

    state: str

    def close(self) -> None:
        """There is nothing to free."""


class SimulatedSampler:
    """Implements engine.backends.protocol.Sampler."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.loaded_state: str | None = None

    independent = False
    """The trainer waits for the sync. Without max_staleness it would have nothing to do meanwhile."""

    def stage(self, trainer: Any, state: str) -> SimulatedWeights:
        self._site.spend("weight syncs", self._site.seconds.sync)
        self._site.spend(SENT, self._site.seconds.sent)
        return SimulatedWeights(state)

    def load(self, staged: SimulatedWeights) -> None:
        self._site.spend(RECEIVED, self._site.seconds.received)
        self.loaded_state = staged.state

    def sample(self, prompts: Sequence[Any], seeds: Sequence[int], params: Any, on_token: Any = None) -> Any:
        self._site.spend("sampling", self._site.seconds.sample * len(prompts) / self._site.rows)
        with self._site.clock.uncounted():
            ids = np.random.default_rng(seeds[0]).integers(3, 259, (len(prompts), params.max_new_tokens)).tolist()
            logprobs = [-1.0] * params.max_new_tokens
            return [Completion(row, logprobs, "length") for row in ids]

    def nbytes(self) -> int:
        return 0

    def close(self) -> None:
        """There is nothing to close."""


# -- the run -----------------------------------------------------------------------------------------------------


class Coin(BaseGrader):
    """Grades by a digest of the answer, so that the answers of a prompt differ."""

    async def grade(self, thread: StringThread) -> Grade:
        value = hashlib.sha256(thread.last_content().encode()).digest()[0] & 1
        return Grade(value=float(value), grader_key=self.grader_key)


class Silent(TerminalProgress):
    """Notes when each step ended, and how long the compute thread had calls until then."""

    def __init__(self, site: Site, show: Callable[[str], None]) -> None:
        super().__init__()
        self._site, self._show = site, show
        self.ends: list[tuple[float, float]] = []

    def step(self, metrics: Any, *, seconds_left: float | None = None) -> None:
        self.ends.append((self._site.clock.read(), self._site.busy))
        if len(self.ends) % SHOWN_EVERY == 0:
            self._show(table(_report(self._site, self.ends, self.ends[-1][0], [])))


@dataclass
class Report:
    """The virtual seconds of a run, by part. The parts add up to `total`."""

    steps: int
    total: float
    parts: dict[str, float]
    copies: int
    """Checkpoints that were begun."""
    redone: int
    restarts: int
    requests: int
    jumps: int
    cpu: float
    """CPU seconds of this process, those of the simulation included."""
    records: list[str] = field(default_factory=list)
    """The weights' digest in each commit record."""

    @property
    def lost(self) -> float:
        """Share of the time that goes to checkpoints, digests and syncs."""
        return sum(self.parts.get(part, 0.0) for part in LOST) / self.total


@contextmanager
def _measured(site: Site) -> Iterator[None]:
    """Notes how long the compute thread has calls, and how long it restores policies."""
    submit, restore = FairQueue.run, Materialiser._restore

    def run_timed(queue: FairQueue, line: str, function: Callable[[], Any]) -> Any:
        def timed() -> Any:
            began = site.clock.read()
            try:
                return function()
            finally:
                site.busy += site.clock.read() - began

        return submit(queue, line, timed)

    def restore_timed(*arguments: Any, **keywords: Any) -> Any:
        began = site.clock.read()
        try:
            return restore(*arguments, **keywords)
        finally:
            site.parts["restores"] += site.clock.read() - began

    with patch.object(FairQueue, "run", run_timed), patch.object(Materialiser, "_restore", restore_timed):
        yield


async def _train(site: Site, folder: Path, options: Options, progress: Silent) -> tuple[PolicyRef, float]:
    """(the last policy, when the run ended)"""
    site.loop = asyncio.get_running_loop()
    site.start_engine()
    workspace = Workspace(store="memory://simulated", run="sim", provenance=PROVENANCE)
    tiny = build_tiny_model(folder / "tiny", seed=0)
    built = await Model(str(tiny)).to_builder(_Context(workspace)).spawn_train("policy")
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n} + {n} = "}) + "\n" for n in range(4 * options.real_prompts)))
    data = load_dataset(site.store, FileDataset(path=str(path)), use="prompt", provenance=PROVENANCE)
    loop = GRPO(
        data, built.temperature(1.0).max_gen_len(NEW_TOKENS), Coin("coin"),
        max_num_grpo_steps=options.steps, samples_per_batch=site.rows, samples_per_mini_batch=site.rows,
        completions_per_sample=COMPLETIONS, prompts_per_shard=max(1, options.real_prompts // 8),
        lr_scheduler=ConstantScheduler(1e-5), logger=progress,
        checkpoints=CheckpointSchedule(CheckpointConfig()),
    )  # fmt: skip
    site.began, site.busy = site.clock.read(), 0.0
    policy = await loop.run()
    return policy, site.clock.read()


class _Context:
    """What a model builder needs of a run."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace


@dataclass(frozen=True)
class Options:
    """What is simulated."""

    steps: int
    seconds: Seconds
    real_prompts: int = 16
    ranks: int = 32
    kills: int = 0
    settle: float = 0.0002


def simulate(options: Options, *, show: Callable[[str], None] = print) -> Report:
    """Makes the run and returns where its time went."""
    with tempfile.TemporaryDirectory(prefix="training-sim-") as scratch, ExitStack() as stack:
        clock = VirtualTime(settle_seconds=options.settle)
        stack.callback(clock.close)
        stack.enter_context(clock.patched())
        site = Site(
            clock, options.seconds, Path(scratch, "store"), rows=options.real_prompts * COMPLETIONS, ranks=options.ranks
        )
        drawn = random.Random(0)
        site.kills = {step: drawn.random() for step in drawn.sample(range(2, options.steps), options.kills)}
        stack.enter_context(patch("engine.workspace._open_store", lambda _: site.store))
        stack.enter_context(patch("engine.workspace.connect", lambda *_: Client(site)))
        stack.enter_context(_measured(site))
        progress = Silent(site, show)
        policy, ended = run(clock, _train(site, Path(scratch), options, progress))
        site.s3.quiet = True
        records = list(Chain.of(site.store, policy).records(after=0, until=policy.step))
        return _report(site, progress.ends, ended, [record.weights_digest for record in records])


def _report(site: Site, ends: list[tuple[float, float]], ended: float, records: list[str]) -> Report:
    """The report of a run whose steps have these `Silent.ends`, and which ended, or is now, at `ended`."""
    parts = dict(site.parts)
    last_end, busy_until = ends[-1]
    parts["last checkpoint"] = ended - last_end - (site.busy - busy_until)
    parts["engine: its store requests and CPU"] = site.busy - sum(site.parts.values())
    parts["loop: store requests and CPU"] = last_end - site.began - busy_until
    parts["loop: rows that are not simulated"] = len(ends) * site.seconds.rows
    return Report(
        steps=len(ends), total=ended - site.began + parts["loop: rows that are not simulated"], parts=parts,
        copies=site.copies, redone=site.redone, restarts=site.restarts, requests=sum(site.meter.requests.values()),
        jumps=site.clock.jumps, cpu=time.process_time(), records=records,
    )  # fmt: skip


def table(report: Report) -> str:
    lines = ["| part | s | s per step | % |", "|---|---|---|---|"]
    for part, seconds in sorted(report.parts.items(), key=lambda item: -item[1]):
        share = 100 * seconds / report.total
        lines.append(f"| {part} | {seconds:,.0f} | {seconds / report.steps:,.2f} | {share:.2f} |")
    lines.append(f"| all | {report.total:,.0f} | {report.total / report.steps:,.2f} | 100 |")
    lines.append(
        f"\ncheckpoints, digests and syncs: {100 * report.lost:.2f} %; {report.copies} checkpoints, "
        f"{report.restarts} restarts, {report.redone} steps again, {report.requests:,} requests, "
        f"{report.jumps:,} jumps, {report.cpu:,.0f} CPU-s"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=1024, help="prompts of a step, with 8 completions each")
    parser.add_argument("--real-prompts", type=int, default=16, help="of these, the ones that are simulated")
    parser.add_argument("--uploaders", type=int, default=32, help="processes that transfer a checkpoint")
    parser.add_argument("--disk", type=float, default=8e9, help="bytes per second of all machines' disks together")
    parser.add_argument("--receiver-rate", type=float, default=model.GPU_DIGEST_BYTES_PER_SECOND)
    parser.add_argument("--folder-rate", type=float, help="bytes per second of a shared folder of the synced weights")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--settle", type=float, default=0.0002, help="real seconds after which the clock jumps")
    chosen = parser.parse_args()
    cluster = model.Cluster(model.H100, 32, 32, 4)
    seconds = seconds_of(
        model.B70, cluster, model.Work(chosen.prompts), uploaders=chosen.uploaders, disk=chosen.disk,
        receiver_rate=chosen.receiver_rate, folder_rate=chosen.folder_rate,
    )  # fmt: skip
    options = Options(
        chosen.steps, seconds, chosen.real_prompts, cluster.train, chosen.kills, chosen.settle
    )
    print(f"70B on {cluster.title}, {chosen.prompts} prompts per step: {seconds}", flush=True)
    began = time.perf_counter()
    print(table(simulate(options, show=lambda line: print(line, flush=True))))
    print(f"{time.perf_counter() - began:.0f} s of wall time")


if __name__ == "__main__":
    main()
