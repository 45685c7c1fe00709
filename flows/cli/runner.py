"""Running one flow from a terminal: config, run key, Prefect server, and what is said at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from engine.errors import EngineError
from flows.cli.log_file import log_failure, log_file
from flows.cli.memory import find_or_create_run_key, forget_run_key
from flows.configs.common import FlowConfig, GRPOConfig, SFTConfig
from flows.configs.env_ppo import ENVPPOConfig
from flows.configs.environments import ENVGRPOConfig, ENVGSPOConfig
from flows.configs.gspo import GSPOConfig
from flows.configs.overrides import ConfigError, parse_config
from flows.configs.ppo import PPOConfig
from flows.configs.preferences import DPOConfig, RewardModelConfig
from flows.configs.sft_to_gspo import SFTToGSPOConfig
from flows.configs.sweep import TrialsFailed
from flows.ops.local_server import ServerError, local_prefect_server, use_server
from storage.errors import StorageError
from tasks.datasets.errors import DatasetError
from tasks.environments.spec import EnvironmentSpecError
from tasks.evaluation.statistics import PairedDifference
from tasks.graders.spec import GraderSpecError
from tasks.sampling.grading import TooManyMasked

QUIET = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""What others would print between our lines, unless the environment already says otherwise."""

CONFIGS: dict[str, type[FlowConfig]] = {
    "sft": SFTConfig, "dpo": DPOConfig, "reward_model": RewardModelConfig, "grpo": GRPOConfig, "gspo": GSPOConfig,
    "ppo": PPOConfig,
    "sft_to_gspo": SFTToGSPOConfig, "env_grpo": ENVGRPOConfig, "env_gspo": ENVGSPOConfig, "env_ppo": ENVPPOConfig,
}  # fmt: skip

REFUSED = (
    ConfigError, EngineError, StorageError, DatasetError, GraderSpecError,
    EnvironmentSpecError, TooManyMasked, ServerError, TrialsFailed, ValueError,
)  # fmt: skip
"""Errors whose message says what was given, what was expected and what to do. Any other error is a defect."""


def run_flow(
    flow: str, config_file: Path, sets: list[str], *, run_key: str = "", new: bool = False, server: str = ""
) -> int:
    """Runs a flow to its end; returns the exit status: 0 done, 1 failed, 2 refused config, 130 interrupted, 143 ended
    by SIGTERM."""
    console = Console()
    try:
        config = parse_config(CONFIGS[flow], config_file, sets)
    except ConfigError as error:
        console.print(f"[red]{config_file} is not a usable {flow} config[/red]", highlight=False)
        console.print(str(error), markup=False, highlight=False)
        return 2
    return run_config(flow, config, console, run_key=run_key, new=new, server=server)


def run_config(
    flow: str, config: FlowConfig, console: Console, *, run_key: str = "", new: bool = False, server: str = ""
) -> int:
    """Runs a validated config. See `run_flow`."""
    remembered = not (run_key or config.run)
    if remembered:
        run_key, unfinished = find_or_create_run_key(flow, config, new=new)
        if unfinished:
            console.print(f"resuming the unfinished run [bold]{run_key}[/bold] (--new starts another)")
    keyed = config.model_copy(update={"run": run_key or config.run})
    console.print(f"run [bold]{keyed.run}[/bold], artifacts in {config.storage.url}", highlight=False)
    what = f"run [bold]{keyed.run}[/bold]"
    status, result = run_with_server(lambda: _call(flow, keyed), console, what=what, log_name=keyed.run, server=server)
    if status == 0:
        if remembered:
            forget_run_key(flow, config)
        _say(result, console)
    return status


def run_with_server(
    call: Callable[[], Coroutine[Any, Any, dict[str, Any]]],
    console: Console,
    *,
    what: str,
    log_name: str,
    server: str = "",
) -> tuple[int, dict[str, Any]]:
    """Runs a flow to its end, with a Prefect server; (exit status as of `run_flow`, what it returned). `what` is what
    the same command goes on with, `log_name` names the log file."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    with log_file(log_name) as log_path:
        try:
            with _sigterm_raises(), _prefect_server(server, console):
                return 0, asyncio.run(call())
        except KeyboardInterrupt:
            console.print(f"\ninterrupted; the same command resumes {what}")
            return 130, {}
        except BaseException as error:
            if _is_termination(error):
                console.print(f"\nended by SIGTERM; the same command resumes {what}")
                return 128 + signal.SIGTERM, {}
            if not isinstance(error, Exception):
                raise
            log_failure(error)
            _say_failure(error, console, log_path)
            return 1, {}


def _say_failure(error: Exception, console: Console, log_path: Path) -> None:
    """One line about the error, and one that names the log file."""
    kind = type(error).__name__ if isinstance(error, REFUSED) else f"unexpected {type(error).__name__}"
    console.print(f"[red]{kind}[/red]: ", end="")
    console.print(str(error), markup=False, highlight=False, soft_wrap=True)
    console.print(f"the traceback is in {log_path}", markup=False, highlight=False, soft_wrap=True)


class Terminated(SystemExit):
    """SIGTERM, outside a flow or passed on by Prefect."""


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Prefect passes SIGTERM on to whoever handled it before the flow. The system's default would end this process
    there and then, and leave the local server behind."""

    def end(number: int, frame: object) -> None:
        raise Terminated(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _is_termination(error: BaseException) -> bool:
    """Whether it is SIGTERM: a spot instance is taken back, a pod moved, a run cancelled from outside. By then the
    flow's blocks were left: what moved is checkpointed, the lease released."""
    from prefect.exceptions import TerminationSignal

    return isinstance(error, Terminated | TerminationSignal)


async def _call(flow: str, config: FlowConfig) -> dict[str, Any]:
    """A flow's function has its module's name."""
    # imported here: Prefect costs seconds, and a refused config should answer at once
    run = getattr(import_module(f"flows.{flow}"), flow)
    return await run(config)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _prefect_server(server: str, console: Console) -> Iterator[None]:
    """The server the flow reports to: the one given or configured, else one of our own for this run."""
    url = server if server not in ("", "local") else os.environ.get("PREFECT_API_URL", "")
    if url and server != "local":
        with use_server(url):
            yield
        return
    home = Path(".ostinato") / "prefect"
    with console.status("starting a local Prefect server"):
        stack = contextlib.ExitStack()
        handle = stack.enter_context(local_prefect_server(home.absolute()))
    with stack, use_server(handle.api_url):
        console.print(f"Prefect UI while this runs: {handle.ui_url}", highlight=False)
        yield


def _say(result: dict[str, Any], console: Console) -> None:
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
