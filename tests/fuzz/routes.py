"""Fuzz campaign against the routes of a real `ostinato engine serve` on loopback, with a tiny model.

    python -m tests.fuzz.routes --minutes 60 --seed 0 --keep violations/
    python -m tests.fuzz.routes --replay violations/17.http

It fails when the process ends, when an answer is 5xx but not 503, when /health is not answered, when the log has a
traceback, or when memory or open files of the process grow from the middle of the campaign to its end. The request of
each violation is written to the folder of `--keep`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from engine.backends.torch.tiny import build_tiny_model
from engine.http.client import EngineClient
from engine.specs.adapters import FullSpec
from engine.specs.engine import HttpEngineSpec
from storage.store.objects import open_store
from tests.fixtures.engines import PROVENANCE, commit_batch, new_policy
from tests.fuzz.requests import Case, World, case

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-token-for-the-fuzzer"
CALLERS = 12
CASES_PER_RUN = 300
"""Number of cases after which a new run begins and the old one is released."""
ANSWER_SECONDS = 75.0
HEALTH_SECONDS = 30.0
MEMORY_GIB = 0.2
SHOWN = 3
GROWTH = 1.15
"""Largest ratio of the memory at the end to the memory in the middle."""


class Server:
    """The server process under test."""

    def __init__(self, folder: Path) -> None:
        self.store_url, self.log = f"file://{folder}/store", folder / "log"
        command = [sys.executable, "-m", "flows.cli.main", "engine", "serve", "--port", "0"]
        command += ["--storage", self.store_url]
        keys = ["--set", "threads=1", "--set", f"memory_gib={MEMORY_GIB}", "--set", "residency_seconds=1"]
        with self.log.open("ab") as stderr:
            self.process = subprocess.Popen(
                [*command, *keys], cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        assert line.startswith("listening on "), self.log.read_text()
        self.url = line.split()[-1]
        self.port = int(self.url.rpartition(":")[2])
        self.monitor = psutil.Process(self.process.pid)

    def sizes(self) -> dict[str, int]:
        memory = self.monitor.memory_info().rss >> 20
        return {"RSS MiB": memory, "open files": self.monitor.num_fds(), "threads": self.monitor.num_threads()}

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Tally:
    """Counts of a campaign: statuses, violations and probes."""

    keep: Path | None
    statuses: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    violations: Counter[str] = field(default_factory=Counter)
    probes: int = 0
    longest_probe: float = 0.0
    log_read: int = 0

    def violation(self, number: int | None, what: str, data: bytes = b"") -> None:
        """Counts a violation. The first `SHOWN` of a kind are printed, and their requests are written to files."""
        self.violations[what] += 1
        if self.violations[what] > SHOWN:
            return
        print(f"VIOLATION {'' if number is None else f'of case {number}'}: {what}", flush=True)
        if self.keep is not None and data:
            (self.keep / f"{number}.http").write_bytes(data)


async def exchange(port: int, sent: Case) -> tuple[str, bytes]:
    """Sends a case on a new connection. Returns (status of the response or what happened in its place, the
    response)."""
    async with asyncio.timeout(ANSWER_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            size = -(-len(sent.data) // sent.pieces) or 1
            for start in range(0, len(sent.data), size):
                if start:
                    await asyncio.sleep(sent.pause)
                writer.write(sent.data[start : start + size])
                await writer.drain()
            answer = await reader.read(-1 if sent.read is None else sent.read)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
    match = re.match(rb"HTTP/1\.1 (\d{3}) ", answer)
    if match:
        return match[1].decode(), answer
    return ("given up" if sent.read is not None else "closed"), answer


class Campaign:
    def __init__(self, options: argparse.Namespace, folder: Path, tally: Tally) -> None:
        self.options, self.folder, self.tally = options, folder, tally
        self.tiny = build_tiny_model(folder / "tiny", seed=0)
        self.server = Server(folder)
        self.numbers = itertools.count(options.first)
        self.world: World
        self.over = False
        self.recent: dict[int, bytes] = {}
        """Requests that have no response yet, by case number."""

    async def new_world(self, number: int) -> None:
        """Begins a new run for the next cases, and releases the previous run."""
        run = f"r{number // CASES_PER_RUN}"
        client = EngineClient(self.server.store_url, HttpEngineSpec(url=self.server.url, patience_seconds=60))
        if hasattr(self, "world"):
            await client.release(self.world.run)
        policy = await new_policy(client, self.tiny, run=run)
        scalar = await new_policy(client, self.tiny, run=run, stage="1-s", trainable=FullSpec(head="scalar"))
        base = await client.import_model(str(self.tiny), provenance=PROVENANCE)
        batch = commit_batch(open_store(self.server.store_url), policy)
        await client.close()
        parts = (policy, scalar, base, batch, PROVENANCE)
        dumped: list[dict[str, Any]] = [part.model_dump(mode="json") for part in parts]
        self.world = World(TOKEN, run, *dumped)

    async def call(self) -> None:
        """Sends one case after the other until the campaign is over."""
        while not self.over:
            number = next(self.numbers)
            if number % CASES_PER_RUN == 0:
                await self.new_world(number)
            sent = case(self.world, self.options.seed, number)
            self.recent[number] = sent.data
            try:
                status, answer = await exchange(self.server.port, sent)
            except (TimeoutError, OSError) as error:
                status, answer = type(error).__name__, b""
            finally:
                self.recent.pop(number, None)
            self.tally.statuses[sent.route][status] += 1
            if status.startswith("5") and status != "503":
                self.tally.violation(number, f"{sent.route} answered {status}", sent.data)
            if status == "202":
                await self.take_back(answer)
            if self.server.process.poll() is not None:
                self.restart(number)

    async def take_back(self, answer: bytes) -> None:
        """Ends a call that takes long, so that the engine stays free for others."""
        id = re.search(rb"/v1/calls/(\w{32})", answer)
        if id is not None:
            head = f"DELETE /v1/calls/{id[1].decode()} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            request = f"{head}Authorization: Bearer {TOKEN}\r\n\r\n".encode()
            with contextlib.suppress(OSError, TimeoutError):
                await exchange(self.server.port, Case("take back", request))

    def restart(self, number: int) -> None:
        status = self.server.process.returncode
        for other, data in self.recent.items():
            self.tally.violation(other, f"was under way when the process ended with status {status}", data)
        self.tally.violation(number, f"the process ended with status {status}")
        self.server = Server(self.folder)

    async def probe(self) -> None:
        """Requests /health again and again while the campaign runs."""
        health = Case("probe", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        while not self.over:
            started = time.monotonic()
            try:
                async with asyncio.timeout(HEALTH_SECONDS):
                    status, _ = await exchange(self.server.port, health)
            except (TimeoutError, OSError) as error:
                status = type(error).__name__
            self.tally.probes += 1
            self.tally.longest_probe = max(self.tally.longest_probe, time.monotonic() - started)
            if status != "200" and self.server.process.poll() is None:
                self.tally.violation(None, f"/health: {status}")
            self.read_log()
            await asyncio.sleep(0.2)

    def read_log(self) -> None:
        """Counts the exceptions in the complete lines of the log that were written since the last call."""
        with self.server.log.open("rb") as log:
            log.seek(self.tally.log_read)
            lines, _, _ = log.read().rpartition(b"\n")
        self.tally.log_read += len(lines)
        for line in lines.decode("utf-8", "replace").splitlines():
            if re.match(r"\w[\w.]*(Error|Exception|Timeout)\b", line):
                self.tally.violation(None, f"in the log: {line[:200]}")


@contextlib.asynccontextmanager
async def started(campaign: Campaign) -> AsyncIterator[list[asyncio.Task[None]]]:
    await campaign.new_world(campaign.options.first)
    tasks = [asyncio.create_task(campaign.call()) for _ in range(CALLERS)]
    tasks.append(asyncio.create_task(campaign.probe()))
    try:
        yield tasks
    finally:
        campaign.over = True
        _, late = await asyncio.wait(tasks, timeout=ANSWER_SECONDS)
        for task in late:
            task.cancel()


async def run(options: argparse.Namespace, folder: Path, tally: Tally) -> None:
    campaign = Campaign(options, folder, tally)
    try:
        async with started(campaign) as tasks:
            middle: dict[str, int] = {}
            parts = 8
            for part in range(parts):
                done, _ = await asyncio.wait(tasks, timeout=60 * options.minutes / parts, return_when="FIRST_EXCEPTION")
                for task in done:
                    task.result()
                if part == 0:
                    first = campaign.server.sizes()
                if part == parts // 2 - 1:
                    middle = campaign.server.sizes()
                count = sum(map(sum, (c.values() for c in tally.statuses.values())))
                print(f"{part + 1}/{parts}: {count} cases, {campaign.server.sizes()}", flush=True)
        end = campaign.server.sizes()
        print(f"after an eighth {first}\nin the middle {middle}\nat the end, idle {end}")
        if end["RSS MiB"] > GROWTH * middle["RSS MiB"] or end["open files"] > middle["open files"] + 20:
            tally.violation(None, f"the process grew from {middle} to {end}")
    finally:
        campaign.server.end()
        if tally.keep is not None:
            shutil.copy(campaign.server.log, tally.keep / "log")


def report(tally: Tally) -> None:
    columns = sorted({status for counts in tally.statuses.values() for status in counts})
    print("| route | " + " | ".join(columns) + " |\n|---|" + "---:|" * len(columns))
    for route, counts in sorted(tally.statuses.items()):
        print(f"| {route} | " + " | ".join(str(counts[status]) for status in columns) + " |")
    total = sum(sum(counts.values()) for counts in tally.statuses.values())
    print(f"{total} requests; /health asked {tally.probes} times, answered after {tally.longest_probe:.2f} s at most")
    for what, count in tally.violations.most_common():
        print(f"{count} times: {what}")
    print(f"{tally.violations.total()} violations")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--keep", type=Path, help="folder for the requests of violations and the server's log")
    parser.add_argument("--replay", type=Path, help="send the bytes of this file to a new server, and print the answer")
    options = parser.parse_args()
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # which ends the server too
    os.environ["OSTINATO_ENGINE_TOKEN"] = TOKEN  # the client and the server read it there
    tally = Tally(options.keep)
    with tempfile.TemporaryDirectory() as folder:
        if options.replay is not None:
            asyncio.run(replay(options, Path(folder), tally))
            return
        asyncio.run(run(options, Path(folder), tally))
    report(tally)
    sys.exit(1 if tally.violations else 0)


async def replay(options: argparse.Namespace, folder: Path, tally: Tally) -> None:
    campaign = Campaign(options, folder, tally)
    try:
        await campaign.new_world(0)
        print(*await exchange(campaign.server.port, Case("replay", options.replay.read_bytes())), sep="\n")
        print(campaign.server.log.read_text()[-3000:])
    finally:
        campaign.server.end()


if __name__ == "__main__":
    main()
