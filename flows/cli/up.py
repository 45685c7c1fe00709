"""`ostinato up` and `ostinato down`: everything for one machine, kept alive, at one address."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console

from flows.cli.output import DEFAULT_STORAGE, AsJson, console, fill, messages, print_json, table, usage_error
from flows.ops.processes import ProcessIdentity, processes_of_up, terminate_all
from flows.ops.services import BUCKET, find_seaweedfs, free_ports, is_free
from flows.ops.state import HOME, UpError, UpOptions, UpState, forget_state, load_state, save_state, status, supervising
from flows.ops.supervisor import Supervisor, deploy_by_command, tail

DETACH_SECONDS = 600.0
DOWN_SECONDS = 180.0
"""How long the supervisor may take to end everything: flows leave their runs, the engine writes checkpoints."""


def up(
    storage: Annotated[str, typer.Option("--storage", help="A folder, file:///folder or s3://bucket/prefix.")] = "",
    with_s3: Annotated[bool, typer.Option("--with-s3", help="An S3 server, too, for the artifacts.")] = False,
    database: Annotated[
        str, typer.Option("--database", help="Of Prefect: postgresql+asyncpg://…; SQLite without one.")
    ] = "",
    port: Annotated[int, typer.Option("--port", help="Of the page to open.", min=1, max=65535)] = 4200,
    engine_config: Annotated[
        Path | None, typer.Option("--engine-config", help="The engine's keys: a file.", exists=True, dir_okay=False)
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Go on in the background; `ostinato down` ends it.")] = False,
    show: Annotated[bool, typer.Option("--status", help="Say what runs, and do nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Starts Prefect server, work pool, worker and engine for this machine, and keeps them alive. Again: says what
    runs. Killing any of it, at any moment, is safe."""
    home = HOME.absolute()
    try:
        if show:
            raise typer.Exit(_show(load_state(home), as_json=as_json))
        options = _options(storage, with_s3=with_s3, database=database, port=port, engine_config=engine_config)
        status_code = _up_detached(home, options) if detach else _up(home, options)
    except UpError as error:
        raise _refused(error) from None
    raise typer.Exit(status_code)


def down() -> None:
    """Ends what `ostinato up` started here, and only that. Runs go on at the next `up`."""
    home = HOME.absolute()
    try:
        state = load_state(home)
    except UpError as error:
        raise _refused(error) from None
    if state is None:
        print("nothing runs here that `ostinato up` started")
        return
    supervisor = state.supervisor.process() if state.supervisor else None
    if supervisor is not None:
        supervisor.terminate()
        _, lingering = psutil.wait_procs([supervisor], timeout=DOWN_SECONDS)
        terminate_all(lingering, grace_seconds=0.0)
    with supervising(home) as alone:
        if not alone:
            raise usage_error("another `ostinato up` has just begun here; nothing of it was ended")
        if load_state(home) is not None:  # the supervisor is dead, or was killed while it ended the others
            Supervisor(home, state, print, lambda _: None).close()
    left = processes_of_up(state.id)
    if left:
        raise usage_error(f"processes that did not end: {', '.join(str(process.pid) for process in left)}")
    print("all ended")


def _up(home: Path, options: UpOptions) -> int:
    say = _say(messages())
    with supervising(home) as alone:
        if not alone:
            return _already(home, options)
        state = _taken_over(home, options, say) or _new_state(options)
        save_state(home, state)
        supervisor = Supervisor(home, state, say, deploy_by_command)
        _on_signals(supervisor.stop)
        try:
            supervisor.start()
            _say_ready(supervisor.state)
            print(f"artifacts in {options.storage}; Ctrl-C or `ostinato down` ends everything", flush=True)
            supervisor.watch()
        finally:
            say("ending everything: runs are left where they stand, and go on at the next `up`")
            supervisor.close()
    return 0


def _say_ready(state: UpState) -> None:
    print(f"Ostinato is up: {state.url}")
    print("to begin: Deployments, a flow, Run, Custom run; examples/*.yaml have values for the forms", flush=True)


def _up_detached(home: Path, options: UpOptions) -> int:
    """The same command again without --detach, as a process of its own; returns when that is ready, or has ended."""
    with supervising(home) as alone:
        if not alone:
            return _already(home, options)
    command = [sys.executable, "-m", "flows.cli.main", "up", "--storage", options.storage, "--port", str(options.port)]
    command += ["--with-s3"] if options.with_s3 else []
    command += ["--database", options.database] if options.database else []
    command += ["--engine-config", options.engine_config] if options.engine_config else []
    home.mkdir(parents=True, exist_ok=True)
    log = home / "supervisor.log"
    with log.open("ab") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    deadline = time.monotonic() + DETACH_SECONDS
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise UpError(f"it did not come up; {tail(log)}")
        state = load_state(home)
        if state is not None and state.ready and state.supervisor == ProcessIdentity.of(child.pid):
            _say_ready(state)
            return 0
        time.sleep(0.3)
    raise UpError(f"it is not up after {DETACH_SECONDS:.0f} s; {tail(log)}")


def _already(home: Path, options: UpOptions) -> int:
    state = load_state(home)
    if state is None:
        raise UpError("another `ostinato up` has just begun here; look again with `ostinato up --status`")
    if changed := state.options.differences(options):
        raise UpError(
            f"what runs here was started with other options ({'; '.join(changed)}); `ostinato down` first, or give the "
            "same ones"
        )
    print("it runs already; nothing is changed")
    return _show(state, as_json=False)


def _taken_over(home: Path, options: UpOptions, say: Callable[[str], None]) -> UpState | None:
    """What a supervisor that was killed has left, when it is what is asked for; else its processes are ended."""
    left = load_state(home)
    if left is None:
        return None
    if not left.options.differences(options):
        say("the supervisor before this one was killed; this one takes its services over")
        return left
    say("the supervisor before this one was killed, and had other options; its services are ended")
    Supervisor(home, left, say, lambda _: None).close()
    forget_state(home)
    return None


def _options(
    storage: str, *, with_s3: bool, database: str, port: int, engine_config: Path | None
) -> UpOptions:
    if with_s3:
        find_seaweedfs()
        if storage and not f"{storage}/".startswith(f"s3://{BUCKET}/"):
            raise UpError(f"--with-s3 serves s3://{BUCKET}, not {storage!r}; leave --storage out, or --with-s3")
        storage = storage or f"s3://{BUCKET}/data"
    storage = storage or DEFAULT_STORAGE
    if "://" not in storage:
        storage = str(Path(storage).expanduser().absolute())  # flows have other working directories
    if database.startswith("postgresql://"):
        raise UpError("Prefect speaks to PostgreSQL by asyncpg: write --database postgresql+asyncpg://…")
    config = str(engine_config.absolute()) if engine_config else ""
    return UpOptions(storage=storage, with_s3=with_s3, database=database, port=port, engine_config=config)


def _new_state(options: UpOptions) -> UpState:
    ports, beside = free_ports(with_s3=options.with_s3), options.port + 1
    if is_free(beside):  # the same at every `up`: links to reports, in Prefect's history, go on working
        ports = ports.model_copy(update={"engine": beside})
    return UpState(
        id=secrets.token_hex(6),
        options=options,
        ports=ports,
        token=secrets.token_hex(32),
        s3_key=secrets.token_hex(8),
        s3_secret=secrets.token_hex(20),
    )


def _on_signals(stop: threading.Event) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())


def _show(state: UpState | None, *, as_json: bool) -> int:
    """Prints what runs; 0 when all of it lives."""
    found = status(state) if state else {}
    well = bool(found) and all(service["alive"] for service in found.values()) and state is not None and state.ready
    if as_json:
        body = {"up": well, "url": state.url, "storage": state.options.storage} if state else {"up": False}
        print_json(body | {"services": found})
    elif state is None:
        print("nothing runs here; `ostinato up` starts it")
    else:
        rows = ((name, of["pid"], "yes" if of["alive"] else "NO", of["restarts"]) for name, of in found.items())
        console().print(fill(table(f"ostinato up: {state.url}", "service", "pid>", "alive", "restarts>"), rows))
    return 0 if well else 1


def _say(to: Console) -> Callable[[str], None]:
    return lambda text: to.print(
        f"{time.strftime('%H:%M:%S')} {text}", markup=False, highlight=False, soft_wrap=True
    )


def _refused(error: UpError) -> typer.Exit:
    messages().print(str(error), markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(1)
