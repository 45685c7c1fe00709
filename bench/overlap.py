"""Measures how much time a GRPO step saves when its parts overlap: the engine's work with grading and the store, and
with --lanes gradient steps with sampling.

    python bench/overlap.py [--rounds 6] [--steps 8] [--grade-seconds 0.5] [--write-seconds 0.05] [--out FILE]
    python bench/overlap.py --lanes --model FOLDER --new-tokens 64 --rounds 3     # SmolLM2-135M, vLLM in .venv-vllm
    .venv-vllm/bin/python bench/overlap.py --long-tail --model FOLDER --rounds 1

The engine is another process (`ostinato engine serve`). A grade takes `--grade-seconds` of waiting, and each write of
the run to the store takes `--write-seconds` more. A round takes each combination of max_staleness and number of shards
in turn, as a new run of the tiny model, so that a slow minute of the machine slows all of them. The result is the wall
time per step of each setting, and the paired ratios between settings, with 95 % bootstrap intervals over the rounds.
The engine counts as working while the run waits for samples, logprobs or a gradient step. The first and the
last step of a run are left out. There is no Prefect server; bench/prefect_overhead.py measures that.

With --lanes, one vLLM replica samples (torch with `own_lane` if there is no .venv-vllm), grades and writes take no
extra time, and max_staleness is 0 or 1. The time of a step with max_staleness 1 is divided by the longer of two parts
of a step with max_staleness 0: the time in which a `generate` call was open, and that of a scoring or step call.

With --long-tail, the engine is in this process, and a vLLM replica decodes at most ROWS completions of 16 to 512 tokens
at a time (4; on a GPU, which trainer and replica share, 64, and 32 times as many completions a step); stop strings end
most of them early. A quarter of the prompts is trained on, so that sampling takes longer than training, as with more
GPUs that train. The settings are max_staleness 0, and 4 with updates in flight. The result is also the share of the
replica's rows that were busy: the mean over time of min(unfinished completions, ROWS), divided by ROWS, from the end of
the first step to the end of the last one that has rollouts of all later steps beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import bench.without_prefect  # noqa: F401 - first, before the tasks
from bench.cost_per_step import PROVENANCE, Context, load, write_rows
from bench.grpo_work import bootstrap_interval
from engine.backends.replicas.partial_completions import PartialCompletion
from engine.backends.torch.tiny import build_tiny_model
from engine.handles import Model
from engine.http.client import EngineClient
from engine.specs.engine import EngineSpec, HttpEngineSpec, LocalEngineSpec, VllmSpec
from engine.text.threads import StringThread
from engine.workspace import Workspace
from flows.configs.common import CheckpointConfig
from flows.display.terminal import TerminalProgress
from flows.grpo import GRPO
from flows.training.checkpointing import CheckpointSchedule
from flows.training.schedules import ConstantScheduler
from storage.chain.records import Chain, PolicyRef
from storage.store.objects import ObjectStore
from storage.store.tables import read_table
from tasks.graders.base import BaseGrader, Grade
from tasks.graders.spec import GraderSpec
from tasks.reports.metrics import StepMetrics

SAMPLER_CALLS, TRAINER_CALLS = ("generate",), ("logprobs_of_rows", "take_gradient_step", "stage_policy")
WRITES = ("put", "put_file", "put_if_absent")
ON_GPU = torch.cuda.is_available()
PROMPTS, COMPLETIONS = (8, 32) if ON_GPU else (4, 4)

Setting = tuple[int, int]
"""(max_staleness, number of shards)"""
SETTINGS: tuple[Setting, ...] = ((0, 1), (1, 1), (0, 4), (1, 4))
LANES_SETTINGS: tuple[Setting, ...] = ((0, 4), (1, 4))
LONG_TAIL_SETTINGS: tuple[Setting, ...] = ((4, 4), (0, 4))
ROWS = 64 if ON_GPU else 4
SHORTEST, LONGEST = 16, 512
STOPS = ("!", "?", ":")
"""Stop strings of --long-tail."""
GRADED = " a l"
THINGS = ("a river", "two brothers", "a lighthouse", "the last train", "a clockmaker", "snow", "a lost key", "a garden")
VLLM_PYTHON = Path(".venv-vllm/bin/python")
COMPARISONS: tuple[tuple[Setting, Setting], ...] = (
    ((0, 1), (1, 1)),
    ((0, 4), (1, 4)),
    ((0, 1), (0, 4)),
    ((1, 1), (1, 4)),
)
"""Pairs of settings. The ratio is the first one's wall time divided by the second one's."""


class SlowGrader(BaseGrader):
    """Grades an answer by its length, after some seconds. Answers to other prompts than those with the text `graded`
    get 0, so that their groups have no gradient and need no training."""

    def __init__(self, seconds: float, graded: str = "") -> None:
        super().__init__("slow")
        self.seconds, self.graded = seconds, graded

    async def grade(self, thread: StringThread) -> Grade:
        await asyncio.sleep(self.seconds)
        varies = self.graded in thread.turns[0][1]
        return Grade(grader_key=self.grader_key, value=float(len(thread.last_content()) % 7) if varies else 0.0)


class OpenTimes:
    """The time in which at least one call of some methods of the engine's client was open."""

    def __init__(self) -> None:
        self.open_calls, self.seconds, self._since = 0, 0.0, 0.0

    def wrap(self, name: str) -> None:
        """Counts the calls of a method of the engine's client."""
        method = getattr(EngineClient, name)

        async def counted(*args: Any, **kwargs: Any) -> Any:
            if not self.open_calls:
                self._since = time.perf_counter()
            self.open_calls += 1
            try:
                return await method(*args, **kwargs)
            finally:
                self.open_calls -= 1
                if not self.open_calls:
                    self.seconds += time.perf_counter() - self._since

        setattr(EngineClient, name, counted)


class BusyRows:
    """The time integral of the rows that a pool of one replica decodes."""

    def __init__(self) -> None:
        self.row_seconds, self._since = 0.0, time.perf_counter()
        self._unfinished: set[int] = set()
        restart, add_chunk = PartialCompletion.restart, PartialCompletion.add_chunk
        interrupt = PartialCompletion.interrupt

        def restarted(completion: PartialCompletion) -> None:
            self._change(self._unfinished.add, completion)
            restart(completion)

        def added(completion: PartialCompletion, *chunk: Any) -> Iterator[tuple[int, float]]:
            yield from add_chunk(completion, *chunk)
            if completion.stop is not None:
                self._change(self._unfinished.discard, completion)

        def interrupted(completion: PartialCompletion) -> None:
            self._change(self._unfinished.discard, completion)
            interrupt(completion)

        for name, method in (("restart", restarted), ("add_chunk", added), ("interrupt", interrupted)):
            setattr(PartialCompletion, name, method)

    def _change(self, change: Callable[[int], None], completion: PartialCompletion) -> None:
        self.seconds_so_far()
        change(id(completion))

    def seconds_so_far(self) -> float:
        """Row-seconds until now."""
        now = time.perf_counter()
        self.row_seconds += (now - self._since) * min(len(self._unfinished), ROWS)
        self._since = now
        return self.row_seconds


class StepTimes(TerminalProgress):
    """Notes the time and the seconds of all calls, of the sampler's and of the trainer's at the end of each step, and
    with `rows` the row-seconds."""

    def __init__(self, calls: list[OpenTimes], rows: BusyRows | None = None) -> None:
        super().__init__()
        self.calls, self.rows = calls, rows
        self.ends: list[list[float]] = []

    def step(self, metrics: StepMetrics, *, seconds_left: float | None = None) -> None:
        rows = [self.rows.seconds_so_far()] if self.rows is not None else []
        self.ends.append([time.perf_counter(), *(calls.seconds for calls in self.calls), *rows])


def slow_down_writes(seconds: float) -> None:
    """Makes each write to a store take `seconds` longer."""
    for name in WRITES:
        method = getattr(ObjectStore, name)

        def slow(*args: Any, method: Any = method, **kwargs: Any) -> Any:
            time.sleep(seconds)
            return method(*args, **kwargs)

        setattr(ObjectStore, name, slow)


@contextmanager
def engine_server(store_url: str, *, lanes: bool) -> Iterator[str]:
    """Starts an engine for the store, and returns its address."""
    python, settings = sys.executable, ["--set=threads=1"]
    if lanes and VLLM_PYTHON.is_file():
        python = str(VLLM_PYTHON)
        settings += ["--set=sampler.kind=vllm", "--set=sampler.replicas=1", "--set=sampler.max_context=512"]
    elif lanes:
        settings.append("--set=sampler.own_lane=true")
    command = [python, "-m", "flows.cli.main", "engine", "serve", "--port=0", f"--storage={store_url}"]
    server = subprocess.Popen([*command, *settings], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        yield server.stdout.readline().split()[-1]
    finally:
        server.terminate()
        server.wait(60)


async def train(
    folder: Path, engine: EngineSpec, times: StepTimes, setting: Setting, *, number: int, options: argparse.Namespace
) -> None:
    """Makes one run."""
    (staleness, shards), seconds = setting, options.grade_seconds
    workspace = Workspace(
        store=f"file://{folder}/store",
        engine=engine,
        run=f"round-{number}-staleness-{staleness}-shards-{shards}",
        provenance=PROVENANCE,
    )
    model = await Model(str(options.model or folder / "tiny")).to_builder(Context(workspace)).spawn_train("policy")
    arguments: dict[str, Any] = {"seconds": seconds} | ({"graded": GRADED} if options.long_tail else {})
    grader = GraderSpec(path="bench.overlap:SlowGrader", arguments=arguments)
    model = model.temperature(1.0).max_gen_len(options.new_tokens)
    if options.long_tail:
        model = model.min_gen_len(SHORTEST).stop(*STOPS)
    # Without a KL term, groups of equal rewards need no training.
    options_of_loss: dict[str, Any] = {"kl_beta": 0.0} if options.long_tail else {}
    loop = GRPO(
        load(workspace, folder, "prompt"), model, grader,
        max_num_grpo_steps=options.steps + not_counted(setting),
        samples_per_batch=PROMPTS * COMPLETIONS, samples_per_mini_batch=PROMPTS * COMPLETIONS,
        completions_per_sample=COMPLETIONS, prompts_per_shard=PROMPTS // shards, max_staleness=staleness,
        weight_updates="in_flight" if options.long_tail and staleness else "between",
        importance_cap=2.0, logger=times, lr_scheduler=ConstantScheduler(1e-5),
        checkpoints=CheckpointSchedule(CheckpointConfig(frequency=None, recovery_steps=5)),
        **options_of_loss,
    )  # fmt: skip
    policy = await loop.run()
    if options.long_tail:
        print(setting, "tokens of completions:", completion_lengths(workspace, policy), flush=True)


def not_counted(setting: Setting) -> int:
    """Number of further steps, so that all that count have rollouts of later steps beside them."""
    return max(setting[0] - 1, 0)


def completion_lengths(workspace: Workspace, policy: PolicyRef) -> dict[str, int]:
    """Quantiles of the lengths of all completions of the run, in tokens."""
    store, lengths = workspace.open_store(), list[int]()
    for record in Chain.of(store, policy).records(after=0, until=policy.step):
        for mask in read_table(store, record.request.batch)["loss_mask"].to_pylist():
            lengths.append(sum(mask))
    lengths.sort()
    return {f"{share:.0%}": lengths[int(share * (len(lengths) - 1))] for share in (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)}


async def measure(options: argparse.Namespace, folder: Path, engine: EngineSpec) -> dict[str, Any]:
    calls = [OpenTimes(), OpenTimes(), OpenTimes()]
    for times_of, names in zip(calls, (SAMPLER_CALLS + TRAINER_CALLS, SAMPLER_CALLS, TRAINER_CALLS), strict=True):
        for name in names:
            times_of.wrap(name)
    rows = BusyRows() if options.long_tail else None
    settings = LONG_TAIL_SETTINGS if options.long_tail else LANES_SETTINGS if options.lanes else SETTINGS
    seconds: dict[Setting, list[float]] = {setting: [] for setting in settings}
    shares: dict[Setting, list[list[float]]] = {setting: [] for setting in settings}
    for number in range(options.rounds):
        for setting in settings:
            times = StepTimes(calls, rows)
            await train(folder, engine, times, setting, number=number, options=options)
            # From the end of the first step to the end of the last one that has rollouts of all later steps beside it:
            # with the others, a step of max_staleness 1 would seem faster than it is.
            ends = zip(times.ends[0], times.ends[options.steps - 2], strict=True)
            wall, *open_seconds = (after - before for before, after in ends)
            seconds[setting].append(wall / (options.steps - 2))
            shares[setting].append([part / wall for part in open_seconds])
            print(number, setting, round(seconds[setting][-1], 3), shares[setting][-1], flush=True)
    return summary(seconds, shares)


def summary(seconds: dict[Setting, list[float]], shares: dict[Setting, list[list[float]]]) -> dict[str, Any]:
    """The JSON of the result. The values of a setting are in the order of the rounds."""
    settings = []
    for (staleness, shards), values in seconds.items():
        settings.append(
            {
                "max_staleness": staleness,
                "shards": shards,
                "seconds_per_step": mean_with_interval(values),
                "engine_share": mean_with_interval([share[0] for share in shares[staleness, shards]]),
                "sampler_share": mean_with_interval([share[1] for share in shares[staleness, shards]]),
                "trainer_share": mean_with_interval([share[2] for share in shares[staleness, shards]]),
                "busy_rows": [round(part / ROWS, 3) for share in shares[staleness, shards] for part in share[3:]],
                "rounds": [round(value, 3) for value in values],
            }
        )
    ratios: list[dict[str, Any]] = []
    for slow, fast in COMPARISONS:
        if slow not in seconds or fast not in seconds:
            continue
        pairs = zip(seconds[slow], seconds[fast], strict=True)
        ratios.append({"of": slow, "to": fast, "ratio": mean_with_interval([a / b for a, b in pairs])})
    if set(seconds) == set(LANES_SETTINGS):
        one_lane, two_lanes = (seconds[setting] for setting in LANES_SETTINGS)
        longer = [wall * max(share[1:]) for wall, share in zip(one_lane, shares[LANES_SETTINGS[0]], strict=True)]
        ratio = mean_with_interval([wall / part for wall, part in zip(two_lanes, longer, strict=True)])
        ratios.append({"of": LANES_SETTINGS[1], "to": "the longer of sampling and training", "ratio": ratio})
    return {"load": os.getloadavg()[0], "settings": settings, "ratios_of_seconds": ratios}


def mean_with_interval(values: list[float]) -> list[float]:
    """The mean, and the ends of its 95 % interval."""
    return [round(number, 3) for number in (statistics.fmean(values), *bootstrap_interval(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--grade-seconds", type=float, default=0.5)
    parser.add_argument("--write-seconds", type=float, default=0.05)
    parser.add_argument("--lanes", action="store_true")
    parser.add_argument("--long-tail", action="store_true")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.lanes or options.long_tail:
        options.grade_seconds = options.write_seconds = 0.0
    with tempfile.TemporaryDirectory(prefix="ostinato-bench-") as name:
        folder = Path(name)
        build_tiny_model(folder / "tiny", seed=0)
        write_rows(folder / "rows.jsonl")
        if options.long_tail:
            stories = ({"prompt": f"Tell a story about {thing}.", "metadata": {}} for thing in THINGS)
            (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in stories))
        if options.long_tail:
            options.new_tokens = LONGEST
            sampler = VllmSpec(replicas=1, max_context=2 * LONGEST, kv_cache_gib=ROWS / 8, sleep=False)
            max_tokens = 16384 if ON_GPU else 2048
            spec = LocalEngineSpec(threads=1, max_rows=ROWS, max_tokens_per_forward=max_tokens, sampler=sampler)
            result = asyncio.run(measure(options, folder, spec))
        else:
            with engine_server(f"file://{folder}/store", lanes=options.lanes) as url:
                if options.write_seconds:
                    slow_down_writes(options.write_seconds)
                result = asyncio.run(measure(options, folder, HttpEngineSpec(url=url)))
    for entry in (*result["settings"], *result["ratios_of_seconds"]):
        print(json.dumps(entry))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
