"""`ostinato up` and `ostinato down` run all services of one machine; `ostinato deploy` sets up a Prefect server."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console

from flows.cli.engine import read_token
from flows.cli.output import (
    DEFAULT_STORAGE,
    AsJson,
    add_rows,
    console,
    messages,
    print_json,
    print_plain,
    table,
    usage_error,
)
from flows.configs.overrides import ConfigError
from flows.ops.deployments import POOL, deploy
from flows.ops.processes import ProcessIdentity, open_log, processes_of_up, terminate_all
from flows.ops.services import BUCKET, find_seaweedfs, free_ports, is_free
from flows.ops.state import (
    HOME,
    TOKEN_ENV,
    UpError,
    UpOptions,
    UpState,
    forget_state,
    load_state,
    save_state,
    status,
    supervising,
)
from flows.ops.supervisor import (
    SUPERVISOR_LOG,
    WAIT_MESSAGE_SECONDS,
    Supervisor,
    deploy_by_command,
    describe_log_end,
)

DETACH_TIMEOUT_SECONDS = 600.0
"""Seconds that `up --detach` waits for the services."""
MESSAGE = re.compile(r"\d\d:\d\d:\d\d ")
"""Begin of a line of the supervisor's log that is a message, not the output of a program."""
DOWN_TIMEOUT_SECONDS = 180.0
"""Seconds for the supervisor to end everything: flows release their runs, and the engine writes checkpoints."""


def up(
    storage: Annotated[str, typer.Option("--storage", help="A folder, file:///folder or s3://bucket/prefix.")] = "",
    with_s3: Annotated[bool, typer.Option("--with-s3", help="Also start an S3 server for the artifacts.")] = False,
    database: Annotated[
        str, typer.Option("--database", help="Prefect's database: postgresql+asyncpg://… Default: SQLite.")
    ] = "",
    port: Annotated[int, typer.Option("--port", help="Port of the Prefect UI.", min=1, max=65535)] = 4200,
    engine_config: Annotated[
        Path | None, typer.Option("--engine-config", help="Config file of the engine.", exists=True, dir_okay=False)
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Run in the background; 'ostinato down' ends it.")] = False,
    show: Annotated[bool, typer.Option("--status", help="Only show what is running.")] = False,
    as_json: AsJson = False,
) -> None:
    """Starts the page, a Prefect server, a worker and an engine on this machine, and restarts them when they end. If
    they are running already, shows them. It is safe to kill any of these processes."""
    home = HOME.absolute()
    try:
        if show:
            raise typer.Exit(_print_status(load_state(home), as_json=as_json))
        options = _options(storage, with_s3=with_s3, database=database, port=port, engine_config=engine_config)
        exit_status = _up_detached(home, options) if detach else _up(home, options)
    except UpError as error:
        raise _print_error(error) from None
    raise typer.Exit(exit_status)


def down() -> None:
    """Ends all processes that 'ostinato up' started in this folder, and no others. Runs continue at the next 'up'."""
    home = HOME.absolute()
    try:
        state = load_state(home)
    except UpError as error:
        raise _print_error(error) from None
    if state is None:
        print("no process that 'ostinato up' started in this folder is running")
        return

    # the supervisor ends everything on SIGTERM
    supervisor = state.supervisor.process() if state.supervisor else None
    if supervisor is not None:
        supervisor.terminate()
        _, remaining = psutil.wait_procs([supervisor], timeout=DOWN_TIMEOUT_SECONDS)
        terminate_all(remaining, grace_seconds=0.0)

    # if it was killed, or did not end in time, this process ends the rest
    with supervising(home) as is_only_supervisor:
        if not is_only_supervisor:
            raise usage_error("another 'ostinato up' has just started here; none of its processes was ended")
        if load_state(home) is not None:
            Supervisor(home, state, print, lambda _: None).close()
    remaining = processes_of_up(state.id)
    if remaining:
        raise usage_error(f"processes that did not end: {', '.join(str(process.pid) for process in remaining)}")
    print("all processes have ended")


def deploy_command(
    storage: Annotated[str, typer.Option("--storage", help="Default store of deployed flows. Empty: unchanged.")] = "",
    engine: Annotated[str, typer.Option("--engine", help="Url of the default engine of deployed flows.")] = "",
    token_file: Annotated[
        Path | None, typer.Option(help=f"File with the engine's token; else ${TOKEN_ENV}.", exists=True, dir_okay=False)
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="Another prefect.yaml than the one here.", exists=True, dir_okay=False)
    ] = None,
    pool: Annotated[
        str, typer.Option("--pool", help="Work pool. It is created with type process if it does not exist.")
    ] = POOL,
    server: Annotated[str, typer.Option("--server", help="Prefect API url; else $PREFECT_API_URL.")] = "",
) -> None:
    """Creates or updates the deployments of prefect.yaml, their store and engine, and the automations for crashed
    runs."""
    url = server or os.environ.get("PREFECT_API_URL", "")
    if not url:
        raise usage_error(
            "no Prefect server was given: give --server http://host:4200/api, or set PREFECT_API_URL; 'ostinato up' "
            "starts one and deploys to it"
        )
    # set before `deploy` imports Prefect, which reads it once
    os.environ["PREFECT_API_URL"] = url
    try:
        token = read_token(token_file) or ""
        names, paused = deploy(
            file, pool=pool, storage=storage, engine_url=engine, token=token, on_created=_show_created()
        )
    except ConfigError as error:
        raise usage_error(str(error)) from error
    except UpError as error:
        raise _print_error(error) from None
    print(f"deployed to {url}: {', '.join(names)}")
    for line in paused:
        print_plain(messages(), line)


def _show_created() -> Callable[[int, int], None]:
    """A function that prints how many deployments are created, at most once in some seconds."""
    shown = time.monotonic()

    def show(created: int, total: int) -> None:
        nonlocal shown
        if time.monotonic() - shown >= WAIT_MESSAGE_SECONDS:
            shown = time.monotonic()
            print_plain(messages(), f"{created} of {total} deployments are created")

    return show


def _up(home: Path, options: UpOptions) -> int:
    """Runs the supervisor in this process until a signal arrives."""
    log = _log_to(messages())
    with supervising(home) as is_only_supervisor:
        if not is_only_supervisor:
            return _show_running(home, options)
        state = _take_over(home, options, log) or _new_state(options)
        save_state(home, state)
        supervisor = Supervisor(home, state, log, lambda state: deploy_by_command(state, log))
        _stop_on_signals(supervisor.stop)
        # a signal or an error ends the services, too
        try:
            supervisor.start()
            _print_ready(supervisor.state)
            print(f"artifacts in {options.storage}; Ctrl-C or 'ostinato down' ends everything", flush=True)
            supervisor.watch()
        finally:
            log("ending all services; the runs continue at the next 'up'")
            supervisor.close()
    return 0


def _print_ready(state: UpState) -> None:
    print(f"Ostinato is up: {state.page_url}")
    print(f"Prefect: {state.url}", flush=True)
    if Path("examples").is_dir():
        print("examples/*.yaml have values for the form", flush=True)
    else:
        print("'ostinato demo --only-model' writes examples with values for the form, and a small model", flush=True)


def _up_detached(home: Path, options: UpOptions) -> int:
    """Runs the same command without --detach in a new process, and returns when its services are ready."""
    with supervising(home) as is_only_supervisor:
        if not is_only_supervisor:
            return _show_running(home, options)

    # start the process
    command = [sys.executable, "-m", "flows.cli.main", "up", "--storage", options.storage, "--port", str(options.port)]
    if options.with_s3:
        command += ["--with-s3"]
    if options.database:
        command += ["--database", options.database]
    if options.engine_config:
        command += ["--engine-config", options.engine_config]
    home.mkdir(parents=True, exist_ok=True)
    log = home / SUPERVISOR_LOG
    with open_log(log) as output:
        shown = log.stat().st_size
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )

    # wait until it reports in the state file that it is ready
    deadline = time.monotonic() + DETACH_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        shown = _show_progress(log, shown)
        if child.poll() is not None:
            raise UpError(f"'ostinato up' ended while it was starting; {describe_log_end(log)}")
        state = load_state(home)
        if state is not None and state.ready and state.supervisor == ProcessIdentity.of(child.pid):
            _print_ready(state)
            return 0
        time.sleep(0.3)
    raise UpError(f"'ostinato up' is not ready after {DETACH_TIMEOUT_SECONDS:.0f} s; {describe_log_end(log)}")


def _show_progress(log: Path, shown: int) -> int:
    """Prints the supervisor's messages after the first `shown` bytes of its log; returns the number of bytes read."""
    with log.open("rb") as file:
        file.seek(shown)
        # a line that is not complete yet is printed by the next call
        lines, line_end, _ = file.read().rpartition(b"\n")
    for line in lines.decode(errors="replace").splitlines():
        if MESSAGE.match(line):
            print_plain(messages(), line)
    return shown + len(lines) + len(line_end)


def _show_running(home: Path, options: UpOptions) -> int:
    """Shows the services that run already. Raises UpError if they were started with other options."""
    state = load_state(home)
    if state is None:
        raise UpError("another 'ostinato up' has just started here; check again with 'ostinato up --status'")
    if differences := state.options.differences(options):
        raise UpError(
            f"the running services were started with other options ({'; '.join(differences)}); run 'ostinato down' "
            "first, or give the same options"
        )
    print("Ostinato is running already; nothing was changed")
    return _print_status(state, as_json=False)


def _take_over(home: Path, options: UpOptions, log: Callable[[str], None]) -> UpState | None:
    """Returns the state that a killed supervisor left, if its options are the same; else ends its services."""
    state = load_state(home)
    if state is None:
        return None
    if not state.options.differences(options):
        log("an earlier supervisor was killed; this one takes over its services")
        return state
    log("an earlier supervisor with other options was killed; its services are ended")
    Supervisor(home, state, log, lambda _: None).close()
    forget_state(home)
    return None


def _options(storage: str, *, with_s3: bool, database: str, port: int, engine_config: Path | None) -> UpOptions:
    """Checks the options and makes their paths absolute. Raises UpError."""
    # the S3 server has one bucket, which is the default store
    if with_s3:
        find_seaweedfs()
        if storage and not f"{storage}/".startswith(f"s3://{BUCKET}/"):
            raise UpError(f"--with-s3 serves s3://{BUCKET}, not {storage!r}; leave --storage out, or --with-s3")
        storage = storage or f"s3://{BUCKET}/data"
    storage = storage or DEFAULT_STORAGE
    if "://" not in storage:
        # flows have other working directories
        storage = str(Path(storage).expanduser().absolute())
    if database.startswith("postgresql://"):
        raise UpError("Prefect uses asyncpg for PostgreSQL: write --database postgresql+asyncpg://…")
    config = str(engine_config.absolute()) if engine_config else ""
    return UpOptions(storage=storage, with_s3=with_s3, database=database, port=port, engine_config=config)


def _new_state(options: UpOptions) -> UpState:
    ports = free_ports(with_s3=options.with_s3)
    # fixed ports keep bookmarks, and the links to reports in Prefect's history, valid after a restart
    wanted = {"engine": options.port + 1, "page": options.port + 2}
    ports = ports.model_copy(update={name: port for name, port in wanted.items() if is_free(port)})
    return UpState(
        id=secrets.token_hex(6),
        options=options,
        ports=ports,
        token=secrets.token_hex(32),
        s3_key=secrets.token_hex(8),
        s3_secret=secrets.token_hex(20),
    )


def _stop_on_signals(stop: threading.Event) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())


def _print_status(state: UpState | None, *, as_json: bool) -> int:
    """Prints the services. Returns 0 if `up` is ready and all services run, else 1."""
    services = status(state) if state else {}
    all_alive = bool(services) and all(service["alive"] for service in services.values())
    is_up = state is not None and state.ready and all_alive
    if as_json:
        body: dict[str, Any] = {"up": is_up}
        if state:
            body |= {"page": state.page_url, "url": state.url, "storage": state.options.storage}
        print_json(body | {"services": services})
    elif state is None:
        print("no services are running in this folder; 'ostinato up' starts them")
    else:
        service_table = table(f"ostinato up: {state.page_url}", "service", "pid>", "alive", "restarts>")
        for name, service in services.items():
            alive = "yes" if service["alive"] else "NO"
            add_rows(service_table, [(name, service["pid"], alive, service["restarts"])])
        console().print(service_table)
    return 0 if is_up else 1


def _log_to(to: Console) -> Callable[[str], None]:
    """A function that prints lines with the time."""
    return lambda text: print_plain(to, f"{time.strftime('%H:%M:%S')} {text}")


def _print_error(error: UpError) -> typer.Exit:
    print_plain(messages(), str(error))
    return typer.Exit(1)
