"""Runs one flow from a terminal: its config, its run key, its Prefect server, and its result or error at the end.

A run without a key gets one. The keys of unfinished runs are kept in a file, so that the same command again resumes
the run instead of starting another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

from rich.console import Console

from flows.catalogue import TRAININGS, Training
from flows.cli.output import print_plain
from flows.configs.common import TrainingConfig
from flows.configs.overrides import ConfigError, parse_config
from flows.display.log_file import log_failure, log_file
from flows.ops.local_server import SERVER_HOME, ServerError, use_server
from flows.ops.warm_server import warm_prefect_server
from flows.runs.expected_errors import EXPECTED_ERRORS
from storage.serialization import canonical_json, digest
from tasks.evaluation.statistics import PairedDifference

UNFINISHED_RUNS = Path(".ostinato") / "unfinished.json"
"""The keys of unfinished runs: digest of flow, config and store -> run key."""

QUIET_ENVIRONMENT = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Environment variables that keep libraries from printing between our lines. Values that are set already stay."""

KNOWN_ERRORS = (*EXPECTED_ERRORS, ServerError, ValueError)
"""Errors whose message says what was given, what was expected and what to do. Any other error is a defect."""


def run_flow(
    training: Training, config_file: Path, sets: list[str], *, run_key: str = "", new: bool = False, server: str = ""
) -> int:
    """Runs a flow with the config of a file; returns the exit status.

    0 done, 1 failed, 2 config refused, 130 interrupted, 143 ended by SIGTERM.
    """
    console = Console()
    try:
        config = parse_config(training.config, config_file, sets)
    except ConfigError as error:
        console.print(f"[red]{config_file} is not a usable {training.name} config[/red]", highlight=False)
        console.print(str(error), markup=False, highlight=False)
        return 2
    return run_config(config, console, run_key=run_key, new=new, server=server)


def run_config(
    config: TrainingConfig, console: Console, *, run_key: str = "", new: bool = False, server: str = ""
) -> int:
    """Runs a flow with a validated config; returns the exit status of `run_flow`."""
    # a run without a given key has a remembered one
    is_remembered = not (run_key or config.run)
    if is_remembered:
        run_key, unfinished = find_or_create_run_key(config, new=new)
        if unfinished:
            console.print(f"resuming the unfinished run [bold]{run_key}[/bold] (--new starts another)")
    config_with_key = config.model_copy(update={"run": run_key or config.run})
    run = config_with_key.run
    console.print(f"run [bold]{run}[/bold], artifacts in {config_with_key.storage.url}", highlight=False)

    status, result = run_with_server(
        lambda: _call_flow(config_with_key), console, what=f"run [bold]{run}[/bold]", log_name=str(run), server=server
    )
    if status == 0:
        # a run that a budget or patience ended may go on by the same command with other rules
        if is_remembered and "ending" not in result:
            forget_run_key(config)
        _print_result(result, console)
    return status


def run_with_server(
    call: Callable[[], Coroutine[Any, Any, dict[str, Any]]],
    console: Console,
    *,
    what: str,
    log_name: str,
    server: str = "",
) -> tuple[int, dict[str, Any]]:
    """Runs a flow with a Prefect server and a log file; returns (exit status of `run_flow`, result of the flow).

    `what` names what the same command would resume, for the message after an interruption. `log_name` names the log
    file.
    """
    for name, value in QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # each way to end has its own message and exit status
    with log_file(log_name) as log_path:
        try:
            with _raise_on_sigterm(), _prefect_server(server, console), asyncio.Runner() as runner:
                runner.get_loop().set_exception_handler(_handle_task_error)
                return 0, runner.run(call())
        except BaseException as error:
            if _is_interruption(error):
                console.print(f"\ninterrupted; the same command resumes {what}")
                return 130, {}
            if _is_termination(error):
                console.print(f"\nended by SIGTERM; the same command resumes {what}")
                return 128 + signal.SIGTERM, {}
            # SystemExit and the like are not failures of the flow
            if not isinstance(error, Exception):
                raise
            log_failure(error)
            _print_failure(error, console, log_path)
            return 1, {}


def _handle_task_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs an error of a task that was not awaited, as asyncio does, but not the end of a flow by a signal, which
    ends the event loop first: the command itself says how it ended."""
    error = context.get("exception")
    if not (_is_interruption(error) or _is_termination(error)):
        loop.default_exception_handler(context)


def _print_failure(error: Exception, console: Console, log_path: Path) -> None:
    """Prints one line about the error, and one that names the log file."""
    kind = type(error).__name__
    if not isinstance(error, KNOWN_ERRORS):
        kind = f"unexpected {kind}"
    console.print(f"[red]{kind}[/red]: ", end="")
    print_plain(console, str(error))
    print_plain(console, f"the traceback is in {log_path}")


class Terminated(SystemExit):
    """SIGTERM arrived outside a flow, or Prefect passed it on."""


@contextlib.contextmanager
def _raise_on_sigterm() -> Iterator[None]:
    """Raises Terminated on SIGTERM within the block.

    Prefect passes a SIGTERM on to the handler that was installed before the flow. The system's default handler would
    end this process at once, and the local server would keep running.
    """

    def end(number: int, frame: object) -> None:
        raise Terminated(128 + number)

    original_handler = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, original_handler)


def _is_termination(error: BaseException | None) -> bool:
    """Whether the error stands for SIGTERM. By then the flow has written its checkpoints and released its lease."""
    from prefect.exceptions import TerminationSignal

    return isinstance(error, Terminated | TerminationSignal)


def _is_interruption(error: BaseException | None) -> bool:
    """Whether the error stands for Ctrl-C."""
    from flows.ops.termination import FlowRunCancelled

    return isinstance(error, KeyboardInterrupt | FlowRunCancelled)


async def _call_flow(config: TrainingConfig) -> dict[str, Any]:
    # imported here, because the import of Prefect takes seconds, and a refused config should be reported at once
    return await TRAININGS[config.flow].import_flow()(config)


@contextlib.contextmanager
def _prefect_server(server: str, console: Console) -> Iterator[None]:
    """Uses the given or configured Prefect server within the block, or else that of this folder."""
    # a given url comes before the environment's; "local" ignores both
    url = server if server not in ("", "local") else os.environ.get("PREFECT_API_URL", "")
    if url and server != "local":
        with use_server(url):
            yield
        return
    with console.status("starting a local Prefect server"):
        stack = contextlib.ExitStack()
        handle = stack.enter_context(warm_prefect_server(SERVER_HOME))
    with stack, use_server(handle.api_url):
        console.print(f"Prefect UI: {handle.ui_url}", highlight=False)
        yield


def _print_result(result: dict[str, Any], console: Console) -> None:
    heldout = result.get("heldout")
    if heldout:
        console.print(
            f"held-out reward on {heldout['n']} prompts: before {heldout['before_mean']:.3f}, after "
            f"{heldout['after_mean']:.3f}; paired difference {PairedDifference(**heldout)}",
            highlight=False,
            soft_wrap=True,
        )
    for name in ("model", "model_folder", "report"):
        if result.get(name):
            console.print(f"{name.replace('_', ' ')}: {result[name]}", highlight=False, soft_wrap=True)


# -- keys of unfinished runs -----------------------------------------------------------------------------------


def find_or_create_run_key(config: TrainingConfig, *, new: bool) -> tuple[str, bool]:
    """Returns (run key, whether it belongs to an unfinished run with an equal config).

    A new key is stored until `forget_run_key`.
    """
    run_keys = _read_run_keys()
    command = _command_digest(config)
    if not new and command in run_keys:
        return run_keys[command], True
    run = f"{config.flow}-{uuid4().hex[:8]}"
    _write_run_keys(run_keys | {command: run})
    return run, False


def forget_run_key(config: TrainingConfig) -> None:
    """Removes the key of a finished run, so that the same command starts a new run."""
    run_keys = _read_run_keys()
    run_keys.pop(_command_digest(config), None)
    _write_run_keys(run_keys)


def _command_digest(config: TrainingConfig) -> str:
    """Digest of the flow, its semantic config and its store. The run key is not part of it."""
    return digest(canonical_json([config.flow, config.semantic(), config.storage.url]))[:16]


def _read_run_keys() -> dict[str, str]:
    if not UNFINISHED_RUNS.is_file():
        return {}
    return dict(json.loads(UNFINISHED_RUNS.read_text()))


def _write_run_keys(run_keys: dict[str, str]) -> None:
    UNFINISHED_RUNS.parent.mkdir(exist_ok=True)
    # replaced by a rename, so that a kill during the write does not lose the keys of other runs
    temporary = UNFINISHED_RUNS.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(run_keys, indent=1))
    temporary.replace(UNFINISHED_RUNS)
