"""The processes of a world. Each has its own process group, receives signals by its pid, and writes its output to a
file."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.fixtures.stores.s3 import KEY, SECRET, make_bucket

ROOT = Path(__file__).resolve().parents[2]
BUCKET = "chaos"
TAIL_BYTES = 3000


@dataclass
class Child:
    """One process of a world."""

    name: str
    command: list[str]
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    frozen: bool = False
    terminated: bool = False
    """It was sent SIGTERM."""

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def status(self) -> int | None:
        return None if self.process is None else self.process.poll()

    def start(self) -> Child:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                cwd=self.folder,
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.frozen, self.terminated = False, False
        return self

    def signal(self, number: int) -> bool:
        """To its whole group; False when it is not there any more."""
        if not self.alive:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)
            self.terminated |= number == signal.SIGTERM
            self.frozen = {signal.SIGSTOP: True, signal.SIGCONT: False}.get(number, self.frozen)
            return True
        return False

    def end(self) -> None:
        """Kills what is left of it."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def tail(self) -> str:
        return f"--- {self.name} (status {self.status}):\n{self.text()[-TAIL_BYTES:]}"


_ERROR = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Z]\w*(?:Error|Busy|Unreachable|Unavailable|Fenced|Conflict|Full|Died|"
                    r"Diverged|Spec|NotFound|Mismatch|Artifact|Policy|Denied|Refused|Masked|Filesystem|Key|Call)|"
                    r"Fenced): ", re.MULTILINE)  # fmt: skip


def error_of(text: str) -> str:
    """The class of the error that a log ends with; "" when it names none."""
    errors = _ERROR.findall(text)
    return errors[-1] if errors else ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def free_port_pair() -> int:
    """A port that is free, and so is the one 10,000 above: seaweedfs puts gRPC there."""
    while True:
        port = free_port() % 20_000 + 10_000
        with contextlib.suppress(OSError), socket.socket() as low, socket.socket() as high:
            low.bind(("127.0.0.1", port))
            high.bind(("127.0.0.1", port + 10_000))
            return port


class S3Server:
    """seaweedfs over a folder: killed, it comes back with what it had acknowledged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        identity = {
            "name": "admin",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        master, volume, filer, self.port = (free_port_pair() for _ in range(4))
        self.endpoint = f"http://127.0.0.1:{self.port}"
        command = [
            str(Path(sys.executable).with_name("weed")), "-logtostderr", "server", f"-dir={folder}",
            "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false", "-master.volumeSizeLimitMB=256",
            "-volume.max=20", f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}",
            "-filer", "-s3", f"-s3.port={self.port}", "-s3.ip.bind=127.0.0.1", f"-s3.config={folder}/s3.json",
            "-s3.iam=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false",
        ]  # fmt: skip
        self.child = Child("s3", command, folder)

    def start(self) -> S3Server:
        """Returns when it takes objects."""
        from botocore.exceptions import BotoCoreError, ClientError

        self.child.start()
        deadline = time.monotonic() + 90
        while True:
            try:
                make_bucket(self.endpoint, BUCKET)
                return self
            except (BotoCoreError, ClientError) as error:
                if "BucketAlready" in str(error):
                    return self
                if not self.child.alive or time.monotonic() > deadline:
                    raise RuntimeError(f"seaweedfs did not start\n{self.child.tail()}") from error
                time.sleep(0.3)


def s3_environment(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
