"""Compares the CPU-seconds of a GRPO step over HTTP with those of the embedded engine.

    python bench/http_overhead.py [--model FOLDER] [--pairs 10] [--completions 8] [--control]

The arm "embedded" is one process with a LocalEngine. The arm "http" is `ostinato engine serve` and a process with an
EngineClient. Both use the same prompts and seeds, one thread and deterministic algorithms, so that they do identical
work; the bench checks that their states and weights are equal at the end.

Steps alternate: A B, B A, A B, ... The CPU time of a step is the user and system time of all processes of its arm. The
bench prints the mean ratio http / embedded with a 95 % bootstrap interval over the pairs. The goal is at most 1.05.
With --control the second arm is another LocalEngine. Its ratio shows how far from 1 two equal arms are on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
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
from grpo_work import SMOLLM, Shape, bootstrap_interval, grpo_step, new_policy, require_model

from engine.http.client import EngineClient
from engine.specs.engine import HttpEngineSpec, LocalEngineSpec
from engine.workspace import connect
from storage.store.objects import open_store

WARM_UP = 2
TRIVIAL_CALLS = 200
ROOT = Path(__file__).resolve().parents[1]


def engine_keys(steps: int) -> dict[str, Any]:
    """The settings of the engine in both arms. The digest of the weights is computed once, at the last step."""
    return {"device": "cpu", "deterministic": True, "threads": 1}


# -- the worker: one process per arm, which reads commands from its standard input -----------------------------------


class CountingTransport(httpx.AsyncHTTPTransport):
    """Counts the bytes of heads and bodies that are sent and received, and the requests."""

    totals = [0, 0, 0]
    """Bytes sent, bytes received, requests."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        self.totals[0] += _head(request.headers) + int(request.headers.get("content-length", 0))
        self.totals[1] += _head(response.headers) + int(response.headers.get("content-length", 0))
        self.totals[2] += 1
        return response


def _head(headers: httpx.Headers) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers.raw)


async def worker(store_url: str, url: str, model: Path, shape: Shape, steps: int) -> None:
    """Answers each line of standard input ("step" or "trivial") with a line of JSON."""
    # without a URL: an engine in this process
    if url:
        engine: Any = EngineClient(store_url, HttpEngineSpec(url=url), transport=CountingTransport)
    else:
        engine = connect(store_url, LocalEngineSpec.model_validate(engine_keys(steps)))
    store = open_store(store_url)
    policy = start = await new_policy(engine, model, "bench")
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        before, totals = time.perf_counter(), list(CountingTransport.totals)
        answer: dict[str, Any]
        if line.strip() == "step":
            record = await grpo_step(engine, store, policy, start, shape)
            policy = record.policy
            answer = {"state": record.state, "digest": record.weights_digest}
        else:
            answer = {"p50": await trivial_call_seconds(engine)}
        wire = [now - then for now, then in zip(CountingTransport.totals, totals, strict=True)]
        print(json.dumps(answer | {"seconds": time.perf_counter() - before, "wire": wire}), flush=True)
    await engine.close()


async def trivial_call_seconds(engine: Any) -> float:
    """Returns the median wall seconds of the call `info`."""
    seconds = []
    for _ in range(TRIVIAL_CALLS):
        before = time.perf_counter()
        await engine.info()
        seconds.append(time.perf_counter() - before)
    return statistics.median(seconds)


# -- the arms ------------------------------------------------------------------------------------------------------


@dataclass
class Arm:
    """One way to reach an engine."""

    name: str
    driver: subprocess.Popen[str]
    """The process that runs `worker`."""
    processes: list[psutil.Process]
    """All processes whose CPU time counts: the driver, and the server if there is one."""

    def read_answer(self) -> dict[str, Any]:
        assert self.driver.stdout is not None
        line = self.driver.stdout.readline()
        if not line:
            raise SystemExit(f"the {self.name} arm ended with status {self.driver.wait()}")
        return json.loads(line)

    def send(self, command: str) -> dict[str, Any]:
        assert self.driver.stdin is not None
        print(command, file=self.driver.stdin, flush=True)
        return self.read_answer()

    def cpu_seconds(self) -> list[float]:
        """User and system time of each process so far."""
        seconds = []
        for process in self.processes:
            times = process.cpu_times()
            seconds.append(times.user + times.system)
        return seconds

    def step(self) -> dict[str, Any]:
        """Takes one step. `cpu` of the answer is the CPU time of each process during the step."""
        before = self.cpu_seconds()
        answer = self.send("step")
        return answer | {"cpu": [now - then for now, then in zip(self.cpu_seconds(), before, strict=True)]}


@contextlib.contextmanager
def process(command: list[str], log: Path) -> Iterator[subprocess.Popen[str]]:
    """Runs a Python program with pipes, and terminates it after the block. If the block fails, its standard error is
    printed."""
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
    """Starts both arms, each on a store of its own. They are ready for their first step."""
    with tempfile.TemporaryDirectory(prefix="ostinato-bench-") as folder:
        stores = [f"file://{folder}/embedded", f"file://{folder}/http"]
        sets = [f"--set={key}={json.dumps(value)}" for key, value in engine_keys(steps).items()]
        serve = ["-m", "flows.cli.main", "engine", "serve", "--port=0", f"--storage={stores[1]}", *sets]
        shape = [f"--model={options.model}", f"--pairs={options.pairs}", f"--completions={options.completions}"]
        # the stack ends all processes, also if one of them fails to start
        with contextlib.ExitStack() as running:

            def start(name: str, command: list[str]) -> subprocess.Popen[str]:
                return running.enter_context(process(command, Path(folder, f"{name}.log")))

            servers, url = [], ""
            if not options.control:
                servers = [start("server", serve)]
                url = servers[0].stdout.readline().split()[-1]
            # without a server, the second worker has an engine of its own, like the first
            embedded = start("embedded", [__file__, "--worker", stores[0], "", *shape])
            client = start("client", [__file__, "--worker", stores[1], url, *shape])
            second_name = "control" if options.control else "http"
            second_processes = [psutil.Process(program.pid) for program in (*servers, client)]
            both = [
                Arm("embedded", embedded, [psutil.Process(embedded.pid)]),
                Arm(second_name, client, second_processes),
            ]
            for arm in both:
                arm.read_answer()
            yield both


# -- the figures ---------------------------------------------------------------------------------------------------


def measure(both: list[Arm], pairs: int) -> None:
    """Takes the steps of both arms in alternating order, checks that they do the same work, and prints the figures."""
    first, second = both
    for _ in range(WARM_UP):
        assert first.step()["state"] == second.step()["state"], "the arms did different work"
    results: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in both}
    for pair in range(pairs):
        for arm in both if pair % 2 == 0 else both[::-1]:
            results[arm.name].append(arm.step())
        first_step, second_step = results[first.name][-1], results[second.name][-1]
        assert first_step["state"] == second_step["state"], "the arms did different work"
        first_cpu, second_cpu = sum(first_step["cpu"]), sum(second_step["cpu"])
        parts = " + ".join(f"{seconds:.2f}" for seconds in second_step["cpu"])
        print(
            f"pair {pair:2}   {first.name} {first_cpu:.2f}   {second.name} {parts} CPU-s   "
            f"ratio {second_cpu / first_cpu:.4f}",
            flush=True,
        )
    # equal weights at the end prove that both arms did the same work
    last = [results[arm.name][-1]["digest"] for arm in both]
    assert last[0] is not None and last[0] == last[1], f"the arms ended with other weights: {last}"
    print(f"weights digest of both arms after the last step: {last[0][:16]}")
    report(results)
    for arm in both:
        print(f"p50 of a trivial call (info), {arm.name}: {arm.send('trivial')['p50'] * 1e3:.2f} ms")


def report(results: dict[str, list[dict[str, Any]]]) -> None:
    """Prints the CPU-seconds of each arm, the ratio of the two with its interval, and the bytes of the HTTP arm."""
    # each arm: the mean of each of its processes
    cpu_of_arms = []
    for name, steps in results.items():
        cpu_of_processes = zip(*(step["cpu"] for step in steps), strict=True)
        means = " + ".join(f"{statistics.fmean(cpu):.3f}" for cpu in cpu_of_processes)
        seconds = statistics.fmean(step["seconds"] for step in steps)
        print(f"per step, {name}: {means} CPU-s, {seconds:.2f} s wall")
        cpu_of_arms.append([sum(step["cpu"]) for step in steps])
    # the ratio of the two arms in each pair
    ratios = [second / first for first, second in zip(*cpu_of_arms, strict=True)]
    low, high = bootstrap_interval(ratios)
    mean = statistics.fmean(ratios)
    names = " / ".join(reversed(results))
    print(f"ratio {names} over {len(ratios)} pairs: mean {mean:.4f}, 95 % CI {low:.4f} to {high:.4f}")
    if "http" in results:
        sent, received, requests = map(statistics.fmean, zip(*(step["wire"] for step in results["http"]), strict=True))
        print(f"over the wire per step: {requests:.1f} requests, {sent:.0f} bytes sent, {received:.0f} received")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SMOLLM, help="a Hugging Face folder")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--completions", type=int, default=Shape.completions, help="completions of each of 4 prompts")
    parser.add_argument("--control", action="store_true", help="compare two embedded engines")
    parser.add_argument("--worker", nargs=2, metavar=("STORE", "URL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    require_model(options.model)
    steps = WARM_UP + options.pairs
    if options.worker:
        return asyncio.run(worker(*options.worker, options.model, Shape(completions=options.completions), steps))
    with arms(options, steps) as both:
        measure(both, options.pairs)
    return None


if __name__ == "__main__":
    main()
