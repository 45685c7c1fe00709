"""What a program, `python my_recipe.py`, needs around its flow: a Prefect server, a log file, and errors of one line.

The `ostinato` command has its own: flows.cli.runner."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Coroutine
from functools import cache
from types import TracebackType
from typing import Any, TypeVar

from prefect.context import refresh_global_settings_context
from prefect.logging import get_logger
from prefect.settings import PREFECT_API_URL

from flows.display.log_file import log_failure, log_file
from flows.ops.local_server import SERVER_HOME, local_prefect_server, use_server
from flows.runs.expected_errors import EXPECTED_ERRORS

R = TypeVar("R")


async def with_server(call: Coroutine[Any, Any, R]) -> R:
    """Awaits a call of a flow. If no Prefect server is configured, one is started that ends with this process.

    Prefect would start a server that outlives a process which is killed.
    """
    # Linux counts the end of the thread that started a server as the end of the process
    if PREFECT_API_URL.value() or threading.current_thread() is not threading.main_thread():
        return await call
    with use_server(_server_of_this_process()):
        return await call


@cache
def _server_of_this_process() -> str:
    """Starts a Prefect server for the rest of this process, and returns the url of its API."""
    server = contextlib.ExitStack()
    handle = server.enter_context(local_prefect_server(SERVER_HOME.absolute()))
    atexit.register(server.close)
    # two flows may run at once, and the end of the first one must not take the server from the other
    os.environ["PREFECT_API_URL"] = handle.api_url
    refresh_global_settings_context()
    get_logger().info("Prefect UI while this runs: %s", handle.ui_url)
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
