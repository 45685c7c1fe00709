"""CPU-seconds of a GRPO step by a client in another process, over HTTP, beside the embedded engine.

    python bench/http_overhead.py [--model FOLDER] [--pairs 10] [--completions 8] [--control]

Two arms with the same prompts and seeds, deterministic and with one thread, so that both do identical work: equal
states and weights at the end prove it. Arm "embedded" is one process with a LocalEngine; arm "http" is `ostinato engine
serve` and a process with an EngineClient. Steps alternate: A B, B A, A B, ... What counts is the CPU time, user and
system, that all processes of an arm take during one step. The ratio http / embedded comes with a 95 % bootstrap
interval over the pairs. The goal is 1.05 at most. With --control the second arm is a LocalEngine in a process too: how
far from 1 the ratio of two equal arms is on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from grpo_work import SMOLLM, Shape, found_model, grpo_step, new_policy

from engine.connect import connect
from engine.http.client import EngineClient
from engine.specs.engine import HttpEngineSpec, LocalEngineSpec
from storage.store.objects import open_store

WARM_UP = 2
TRIVIAL_CALLS = 200
ROOT = Path(__file__).resolve().parents[1]


def engine_keys(steps: int) -> dict[str, Any]:
    """Of the engine in both arms. The weights are digested once, at the last step."""
    return {"device": "cpu", "deterministic": True, "threads": 1, "digest_every": steps}


# -- the worker: one process per arm, told what to do line by line -------------------------------------------------


class Counting(httpx.AsyncHTTPTransport):
    """Counts bodies and heads of what goes over the wire. `totals`: [sent, received] bytes, [2] requests."""

    totals = [0, 0, 0]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        self.totals[0] += _head(request.headers) + int(request.headers.get("content-length", 0))
        self.totals[1] += _head(response.headers) + int(response.headers.get("content-length", 0))
        self.totals[2] += 1
        return response


def _head(headers: httpx.Headers) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers.raw)


async def worker(store_url: str, url: str, model: Path, shape: Shape, steps: int) -> None:
    """Answers each line of standard input ("step", "trivial") with a line of JSON."""
    if url:
        engine: Any = EngineClient(store_url, HttpEngineSpec(url=url), transport=Counting)
    else:
        engine = connect(store_url, LocalEngineSpec.model_validate(engine_keys(steps)))
    store = open_store(store_url)
    policy = start = await new_policy(engine, model, "bench")
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        before, totals = time.perf_counter(), list(Counting.totals)
        answer: dict[str, Any] = {}
        if line.strip() == "step":
            record = await grpo_step(engine, store, policy, start, shape)
            policy = record.policy
            answer = {"state": record.state, "digest": record.weights_digest}
        else:
            answer = {"p50": await trivial_call_seconds(engine)}
        wire = [now - then for now, then in zip(Counting.totals, totals, strict=True)]
        print(json.dumps(answer | {"seconds": time.perf_counter() - before, "wire": wire}), flush=True)
    await engine.close()


async def trivial_call_seconds(engine: Any) -> float:
    """p50 wall seconds of `info`."""
    seconds = []
    for _ in range(TRIVIAL_CALLS):
        before = time.perf_counter()
        await engine.info()
        seconds.append(time.perf_counter() - before)
    return statistics.median(seconds)


# -- the arms ------------------------------------------------------------------------------------------------------


@dataclass
class Arm:
    """One way to reach an engine: the process that drives it, and all processes whose time counts."""

    name: str
    driver: subprocess.Popen[str]
    processes: list[psutil.Process]

    def hear(self) -> dict[str, Any]:
        assert self.driver.stdout is not None
        line = self.driver.stdout.readline()
        if not line:
            raise SystemExit(f"the {self.name} arm ended with status {self.driver.wait()}")
        return json.loads(line)

    def tell(self, word: str) -> dict[str, Any]:
        assert self.driver.stdin is not None
        print(word, file=self.driver.stdin, flush=True)
        return self.hear()

    def cpu_seconds(self) -> list[float]:
        """User and system time of each process so far."""
        return [times.user + times.system for times in (process.cpu_times() for process in self.processes)]

    def step(self) -> dict[str, Any]:
        """One step; `cpu` is what each process took for it."""
        before = self.cpu_seconds()
        answer = self.tell("step")
        return answer | {"cpu": [now - then for now, then in zip(self.cpu_seconds(), before, strict=True)]}


@contextlib.contextmanager
def process(command: list[str], log: Path) -> Iterator[subprocess.Popen[str]]:
    """A Python program with pipes, told to end at the end. Its standard error is shown when the block fails."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("w") as errors:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        started = subprocess.Popen([sys.executable, *command], text=True, env=environment, **pipes)
    try:
        yield started
    except BaseException:
        print(log.read_text()[-4000:], file=sys.stderr)
        raise
    finally:
        started.terminate()
        started.communicate(timeout=60)


@contextlib.contextmanager
def arms(options: argparse.Namespace, steps: int) -> Iterator[list[Arm]]:
    """Both arms, ready for their first step, each on a store of its own."""
    with tempfile.TemporaryDirectory(prefix="ostinato-bench-") as folder:
        stores = [f"file://{folder}/embedded", f"file://{folder}/http"]
        sets = [f"--set={key}={json.dumps(value)}" for key, value in engine_keys(steps).items()]
        serve = ["-m", "flows.cli.main", "engine", "serve", "--port=0", f"--storage={stores[1]}", *sets]
        shape = [f"--model={options.model}", f"--pairs={options.pairs}", f"--completions={options.completions}"]
        with contextlib.ExitStack() as running:

            def start(name: str, command: list[str]) -> subprocess.Popen[str]:
                return running.enter_context(process(command, Path(folder, f"{name}.log")))

            servers, url = [], ""
            if not options.control:
                servers = [start("server", serve)]
                url = servers[0].stdout.readline().split()[-1]
            one = start("embedded", [__file__, "--worker", stores[0], "", *shape])
            two = start("client", [__file__, "--worker", stores[1], url, *shape])
            both = [
                Arm("embedded", one, [psutil.Process(one.pid)]),
                Arm(
                    "control" if options.control else "http",
                    two,
                    [psutil.Process(program.pid) for program in (*servers, two)],
                ),
            ]
            for arm in both:
                arm.hear()
            yield both


# -- the figures ---------------------------------------------------------------------------------------------------


def bootstrap(ratios: list[float], *, draws: int = 10_000) -> tuple[float, float]:
    """95 % interval of the mean ratio, over resampled pairs."""
    dice = random.Random(0)
    means = sorted(statistics.fmean(dice.choices(ratios, k=len(ratios))) for _ in range(draws))
    return means[int(0.025 * draws)], means[int(0.975 * draws)]


def measure(both: list[Arm], pairs: int) -> None:
    first, second = both
    for _ in range(WARM_UP):
        assert first.step()["state"] == second.step()["state"], "the arms did different work"
    results: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in both}
    for pair in range(pairs):
        for arm in both if pair % 2 == 0 else both[::-1]:
            results[arm.name].append(arm.step())
        one, two = (results[arm.name][-1] for arm in both)
        assert one["state"] == two["state"], "the arms did different work"
        parts = " + ".join(f"{seconds:.2f}" for seconds in two["cpu"])
        ratio = sum(two["cpu"]) / sum(one["cpu"])
        line = f"pair {pair:2}   {first.name} {sum(one['cpu']):.2f}   {second.name} {parts} CPU-s   ratio {ratio:.4f}"
        print(line, flush=True)
    last = [results[arm.name][-1]["digest"] for arm in both]
    assert last[0] is not None and last[0] == last[1], f"the arms ended with other weights: {last}"
    print(f"weights digest of both arms after the last step: {last[0][:16]}")
    report(results)
    for arm in both:
        print(f"p50 of a trivial call (info), {arm.name}: {arm.tell('trivial')['p50'] * 1e3:.2f} ms")


def report(results: dict[str, list[dict[str, Any]]]) -> None:
    for name, steps in results.items():
        parts = [statistics.fmean(cpu) for cpu in zip(*(step["cpu"] for step in steps), strict=True)]
        seconds = statistics.fmean(step["seconds"] for step in steps)
        print(f"per step, {name}: {' + '.join(f'{part:.3f}' for part in parts)} CPU-s, {seconds:.2f} s wall")
    sums = [[sum(step["cpu"]) for step in steps] for steps in results.values()]
    ratios = [b / a for a, b in zip(*sums, strict=True)]
    low, high = bootstrap(ratios)
    mean = statistics.fmean(ratios)
    names = " / ".join(reversed(results))
    print(f"ratio {names} over {len(ratios)} pairs: mean {mean:.4f}, 95 % CI {low:.4f} to {high:.4f}")
    if "http" in results:
        wire = [statistics.fmean(step["wire"][n] for step in results["http"]) for n in range(3)]
        print(f"over the wire per step: {wire[2]:.1f} requests, {wire[0]:.0f} bytes sent, {wire[1]:.0f} received")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SMOLLM, help="a Hugging Face folder")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--completions", type=int, default=Shape.completions, help="of each of 4 prompts")
    parser.add_argument("--control", action="store_true", help="two embedded arms")
    parser.add_argument("--worker", nargs=2, metavar=("STORE", "URL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    found_model(options.model)
    steps = WARM_UP + options.pairs
    if options.worker:
        return asyncio.run(worker(*options.worker, options.model, Shape(completions=options.completions), steps))
    with arms(options, steps) as both:
        measure(both, options.pairs)
    return None


if __name__ == "__main__":
    main()
