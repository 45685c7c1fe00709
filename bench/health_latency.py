"""Measures how long `ostinato engine serve` takes to answer /health while it works.

    python bench/health_latency.py [--hidden 1024] [--layers 8] [--mib 64]

The bench starts a server with a randomly initialised Llama on a store of its own. It requests /health repeatedly, each
time on a new connection, while the server handles one call at a time: the import and the first load of the model, a
long generation, logprobs, Arrow and JSON bodies of the largest sizes, a gradient step, a checkpoint, an export. For
each call it prints the number of requests to /health, and the 99th percentile and the maximum of their response times.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from engine.backends.torch.tiny import build_tiny_model
from engine.http import wire
from engine.http.client import EngineClient
from engine.http.guard import MAX_JSON_BYTES, MAX_JSON_VALUES, MAX_PROMPT_VALUES, NAME_VALUES
from engine.protocol import GenerateRequest, LogprobsRequest, PolicySpec, SamplingParams, TokenSequence
from engine.specs.engine import HttpEngineSpec
from storage.chain.records import OptimizerSpec, PolicyRef, Root, StepRequest
from storage.store.artifacts import Provenance
from storage.store.objects import open_store
from storage.store.tables import SCHEMAS, commit_table

ROOT = Path(__file__).resolve().parents[1]
PROVENANCE = Provenance(code_version="bench", config_digest="0" * 64, seed=0)


class Prober:
    """Requests /health in a process of its own, so that the work of the bench does not delay the requests."""

    SCRIPT = """
import http.client, json, sys, time
port, path = int(sys.argv[1]), sys.argv[2]
while True:
    start = time.monotonic()
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    line.request("GET", "/health")
    assert line.getresponse().read() == b'{"status":"ok"}'
    line.close()
    with open(path, "a") as out:
        out.write(f"{time.monotonic() - start}\\n")
    time.sleep(0.02)
"""

    def __init__(self, port: int, path: Path) -> None:
        self.path = path
        path.touch()
        self.process = subprocess.Popen([sys.executable, "-c", self.SCRIPT, str(port), str(path)])

    def seconds(self) -> list[float]:
        return [float(line) for line in self.path.read_text().splitlines()]


class Bench:
    """A server, a client of it, and the process that requests /health."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.store_url = f"file://{folder}/store"
        command = [sys.executable, *options.wrapper.split(), "-m", "flows.cli.main", "engine", "serve"]
        self.server = subprocess.Popen(
            [*command, "--storage", self.store_url, "--port", "0", "--set", f"threads={options.threads}"],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
            stderr=(folder / "log").open("w"),
        )  # fmt: skip
        assert self.server.stdout is not None
        self.url = self.server.stdout.readline().split()[-1]
        self.prober = Prober(int(self.url.rpartition(":")[2]), folder / "probes")
        self.client = EngineClient(self.store_url, HttpEngineSpec(url=self.url, patience_seconds=600))

    async def during(
        self, name: str, work: Callable[[], Awaitable[Any]], more: Callable[[], str] = lambda: ""
    ) -> Any:
        """Returns the result of the call. Prints a line with the response times of /health during the call."""
        before, started = len(self.prober.seconds()), time.monotonic()
        result = await work()
        seconds = time.monotonic() - started
        await asyncio.sleep(0.3)
        probes = sorted(self.prober.seconds()[before:])
        p99 = probes[int(0.99 * (len(probes) - 1))]
        print(f"| {name}{more()} | {seconds:.1f} | {len(probes)} | {p99:.3f} | {probes[-1]:.3f} |", flush=True)
        return result

    async def posted(self, name: str, path: str, body: bytes, kind: str = "application/json") -> None:
        """Like `during`, for a POST of a prepared body. The printed line contains the status of the response."""
        status = 0

        def call() -> None:
            nonlocal status
            line = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=600)
            line.request("POST", path, body, {"Content-Type": kind})
            answer = line.getresponse()
            answer.read()
            status = answer.status

        await self.during(name, lambda: asyncio.to_thread(call), lambda: f": {status}")

    def end(self) -> None:
        self.prober.process.kill()
        self.server.kill()
        self.prober.process.wait()
        self.server.wait()
        if self.options.log:
            print((self.folder / "log").read_text()[-20000:])


def step_after(bench: Bench, policy: PolicyRef) -> StepRequest:
    """Commits a batch of eight sequences of 400 tokens, and returns the request of a step on it."""
    import pyarrow as pa

    row = {"group": "", "completion": 0, "token_ids": [10] * 400, "loss_mask": [False] + [True] * 399}
    table = pa.Table.from_pylist([row] * 8, schema=SCHEMAS["batch"])
    key = f"runs/{policy.run}/bench-batch"
    batch = commit_table(
        open_store(bench.store_url), key, table, kind="batch", parents=(policy.uri,), provenance=PROVENANCE
    )
    return StepRequest(parent=policy, batch=batch, loss={"kind": "cross_entropy"}, optimizer=OptimizerSpec(lr=1e-4))


def json_bodies() -> dict[str, bytes]:
    """Returns bodies with as many bytes, or as many values, as the server accepts. They take long to parse, to validate
    or to refuse."""
    long = "word " * (MAX_JSON_BYTES // 5 - 100)
    many, ids = [0] * (MAX_JSON_VALUES - 200), [0] * (MAX_PROMPT_VALUES - 200)
    step = {"parent": {}, "batch": {}, "loss": {"kind": "x", "a": many}, "optimizer": {"lr": 1.0}}
    names = {f"{number}": "x" for number in range(len(many) // (NAME_VALUES + 1))}
    bodies: dict[str, Any] = {
        "completions of one long text": {"model": "bench", "max_tokens": 1, "prompt": long},
        "completions of many ids": {"model": "bench", "max_tokens": 1, "prompt": ids},
        "chat/completions of many wrong messages": {"model": "bench", "messages": ids},
        "step with many values": {"request": step},
        "step with many wrong names": {"request": step | {"loss": {}, "cursor_in": names}},
    }
    encoded = {name: json.dumps(body).encode() for name, body in bodies.items()}
    encoded["step with too many values"] = b'{"request": [' + b"0," * (MAX_JSON_BYTES // 2 - 10)
    return encoded


async def measure(bench: Bench, model: Path) -> None:
    """Makes the calls one after the other. Prints one line for each."""
    client, options = bench.client, bench.options
    draw = random.Random(0)
    # the idle server, the import and the first load of the model
    await bench.during("nothing", lambda: asyncio.sleep(3))
    base = await bench.during(
        "import of the model", lambda: client.import_model(str(model), provenance=PROVENANCE)
    )
    root = Root(base=base, base_digest=base.sha256, trainable={"kind": "full"}, init_seed=0)
    spec = PolicySpec(run="bench", stage="0-s", model="policy", root=root)
    policy = await bench.during("create_policy", lambda: client.create_policy(spec))
    short = GenerateRequest(policy, [[10, 11]], [0], SamplingParams(max_new_tokens=1))
    await bench.during("load of the model, one token", lambda: client.generate(short))
    # calls that compute
    sampling = SamplingParams(max_new_tokens=options.tokens, min_new_tokens=options.tokens)
    long = GenerateRequest(policy, [[10, 11, 12]] * 64, list(range(64)), sampling)
    await bench.during(f"generation of 64 times {options.tokens} tokens", lambda: client.generate(long))
    scored = LogprobsRequest(policy, [TokenSequence([10] * 512, [0.0] + [1.0] * 511)] * 16)
    await bench.during("logprobs of 16 times 512 tokens", lambda: client.logprobs(scored))

    # bodies, which are prepared before the clock starts; no such policy exists, so that only the decoding takes time
    none = policy.model_copy(update={"run": "none"})
    count = (options.mib << 20) // 4 // 1024
    prompts = [[draw.randrange(1 << 31) for _ in range(1024)] for _ in range(64)]
    rows = [prompts[number % 64] for number in range(count)]
    body = wire.encode_generate(GenerateRequest(none, rows, [0] * len(rows)), epoch=0)
    name = f"generate, Arrow body of {len(body) >> 20} MiB"
    await bench.posted(name, "/v1/generate", body, wire.MEDIA_TYPE)
    flat = wire.encode_generate(GenerateRequest(none, [[7] * (options.mib << 18)], [0]), epoch=0)
    name = f"generate, one row of {options.mib << 18} ids in {len(flat) >> 10} KiB"
    await bench.posted(name, "/v1/generate", flat, wire.MEDIA_TYPE)

    for name, body in json_bodies().items():
        # the first word of a name is its route, except for steps
        path = "/v1/take_gradient_step" if "step" in name else f"/v1/{name.split()[0]}"
        await bench.posted(f"JSON body: {name}", path, body)

    # calls that write to the store
    request = step_after(bench, policy)
    record = await bench.during("gradient step of 8 times 400 tokens", lambda: client.take_gradient_step(request))
    await bench.during("checkpoint", lambda: client.save_checkpoint(record.policy, provenance=PROVENANCE))
    await bench.during("export", lambda: client.export_model(record.policy, "m", provenance=PROVENANCE))
    await client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--mib", type=int, default=64, help="MiB of token ids in the large bodies")
    parser.add_argument("--wrapper", default="", help=argparse.SUPPRESS)
    parser.add_argument("--log", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build_tiny_model(folder / "model", seed=0, hidden=options.hidden, layers=options.layers)
        bench = Bench(options, folder)
        print("| meanwhile | s | asked | p99 s | longest s |\n|---|---:|---:|---:|---:|")
        try:
            asyncio.run(measure(bench, model))
        finally:
            bench.end()


if __name__ == "__main__":
    main()
