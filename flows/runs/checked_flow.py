"""The decorator of every flow. If the config is invalid, or an error explains itself, the flow run fails with only that
message as its state. A flow that has ended returns its result although no Prefect server records the end.

Plain Prefect puts its own words before the message and a traceback into the log, does not log the message of an
invalid config, and raises the error of its connection in place of the result.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import httpx
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext, refresh_global_settings_context
from prefect.flows import Flow
from prefect.logging import get_logger
from prefect.logging.loggers import get_run_logger
from prefect.settings import PREFECT_API_URL
from prefect.states import Completed, Failed
from prefect.utilities.hashing import file_hash
from pydantic import BaseModel, ValidationError

from flows.configs.overrides import WHOLE, ConfigError, validation_lines
from flows.display.log_file import log_failure, log_file
from flows.ops.hooks import ON_END
from flows.ops.local_server import SERVER_HOME, use_server
from flows.ops.run_names import flow_run_title
from flows.ops.termination import TooManyAttempts
from flows.ops.warm_server import warm_prefect_server
from flows.runs.expected_errors import EXPECTED_ERRORS

Config = TypeVar("Config")
R = TypeVar("R")
Function = Callable[[Config], Coroutine[Any, Any, R]]
log = logging.getLogger(__name__)


START_PATIENCE = 600.0
"""Seconds that the start of a child run waits for a Prefect server that does not answer."""
START_INTERVAL = 5.0
"""Seconds between tries to start a child run."""


@dataclass
class FlowOutcome:
    """How far the function of a flow has come, for a caller that Prefect does not tell."""

    has_begun: bool = False
    state: State[Any] | None = None
    """The state in which the function ended: Completed with its result, or Failed with its exception."""


_outcome: ContextVar[FlowOutcome | None] = ContextVar("flow_outcome", default=None)
"""The outcome of the flow that runs in this context."""


class InvalidConfig:
    """Takes the place of an invalid config, until the flow run has begun and can fail with the reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __getattr__(self, name: str) -> str:
        # the name of the flow run is made of fields of the config; copy and pickle look for methods
        if name.startswith("__"):
            raise AttributeError(name)
        return "(config refused)"


class CheckedFlow(Flow[[Config], Coroutine[Any, Any, R]]):
    """A flow with one parameter, `config`, whose errors name the field."""

    @property
    def is_of_program(self) -> bool:
        """Whether the flow is defined in the program that this process runs."""
        return self.fn.__module__ == "__main__"

    if not TYPE_CHECKING:  # the types of the call are those of Flow

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            make_call = partial(super().__call__, *args, **kwargs)
            call = _survive_outage(make_call, self.name, return_state=kwargs.get("return_state", False))
            return with_server(with_log_file(call, self.name) if self.is_of_program else call)

    def validate_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
        config_type: type[BaseModel] = get_type_hints(self.fn)["config"]
        config = parameters.get("config")
        if not isinstance(config, config_type):
            try:
                config = config_type.model_validate(config)
            except ValidationError as error:
                lines = validation_lines(error, config_type, config, remedy="give it")
                reasons = [line.removeprefix(f"{WHOLE}: ") for line in lines]
                return {"config": InvalidConfig("the config does not fit: " + "\n".join(reasons))}
        return super().validate_parameters(parameters | {"config": config})


async def _survive_outage(make_call: Callable[[], Coroutine[Any, Any, Any]], name: str, *, return_state: bool) -> Any:
    """Calls a flow. Returns its result even if the server never heard that it ended.

    A child run that the server could not be told of at its start is started again; a flow run without a parent fails
    at once. By then, Prefect's client has tried for about a minute.
    """
    outcome = FlowOutcome()
    token = _outcome.set(outcome)
    deadline = time.monotonic() + START_PATIENCE
    try:
        while True:
            try:
                return await make_call()
            except httpx.HTTPError as error:
                is_child = FlowRunContext.get() is not None
                if outcome.state is None and (outcome.has_begun or not is_child or time.monotonic() > deadline):
                    raise
                if outcome.state is not None and outcome.state.data is error:
                    raise  # an error of the flow's own requests
                log.warning("the Prefect server does not record flow run %r: %s: %s", name, type(error).__name__, error)
                if outcome.state is not None:
                    return outcome.state if return_state else await outcome.state.aresult()
                await asyncio.sleep(START_INTERVAL)
    finally:
        _outcome.reset(token)


def checked_flow(
    *, name: str | None = None, flow_run_name: str | Callable[[], str] | None = None
) -> Callable[[Function[Config, R]], CheckedFlow[Config, R]]:
    """Makes a flow of an async function with one parameter, `config`, a pydantic model. Without a `name` the flow has
    that of the function, and its runs have the title of their config.

    A caller of the flow gets the error itself, as from any other flow.
    """

    def decorate(function: Function[Config, R]) -> CheckedFlow[Config, R]:
        async def run(config: Any) -> Any:
            outcome = _outcome.get() or FlowOutcome()
            outcome.has_begun = True
            try:
                if isinstance(config, InvalidConfig):
                    raise ConfigError(config.reason)
                result = await function(config)
                outcome.state = Completed(data=result)
                return result
            except (*EXPECTED_ERRORS, TooManyAttempts) as error:
                logger = get_run_logger()
                logger.error(str(error))
                logger.debug("the error in full", exc_info=error)
                outcome.state = Failed(message=str(error), data=error)
                return outcome.state
            except Exception as error:
                outcome.state = Failed(message=f"{type(error).__name__}: {error}", data=error)
                raise

        # Prefect shows the name, the docstring and the parameter of the function, and takes the version from its file
        for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(run, attribute, getattr(function, attribute))
        run.__annotations__ = get_type_hints(function)
        source = inspect.getsourcefile(function)
        version = file_hash(source) if source else None
        title = flow_run_title if name is None else flow_run_name
        flow = CheckedFlow(run, name=name or run.__name__, flow_run_name=title, version=version, **ON_END)
        if flow.is_of_program:
            print_expected_errors()
        return flow

    return decorate


async def with_server(call: Coroutine[Any, Any, R]) -> R:
    """Awaits a call of a flow. If no Prefect server is configured, that of the working directory is used.

    Prefect would start a server that outlives a process which is killed.
    """
    if PREFECT_API_URL.value():
        return await call
    with use_server(_server_of_this_process()):
        return await call


@cache
def _server_of_this_process() -> str:
    """Uses a Prefect server for the rest of this process, and returns the url of its API."""
    server = contextlib.ExitStack()
    handle = server.enter_context(warm_prefect_server(SERVER_HOME))
    atexit.register(server.close)
    # two flows may run at once, and the end of the first one must not take the server from the other
    os.environ["PREFECT_API_URL"] = handle.api_url
    refresh_global_settings_context()
    get_logger().info("Prefect UI: %s", handle.ui_url)
    return handle.api_url


async def with_log_file(call: Coroutine[Any, Any, R], name: str) -> R:
    """Awaits a call of a flow. The tracebacks of its tasks go into a log file and not to the terminal."""
    with log_file(name) as path:
        try:
            return await call
        except EXPECTED_ERRORS as error:
            log_failure(error)
            error.add_note(f"the traceback is in {path}")
            raise


def print_expected_errors() -> None:
    """Makes this process end with one line, without a traceback, for an error whose message says what to do."""
    if sys.excepthook is not _print_error:
        sys.excepthook = _print_error


def _print_error(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if not isinstance(error, EXPECTED_ERRORS):
        sys.__excepthook__(kind, error, traceback)
        return
    print("\n".join([f"{kind.__name__}: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
