"""The log file of a command that runs a flow: it gets every record with its traceback, the terminal gets lines.

Prefect logs the traceback of a failure once per task and once per flow. A person needs one line, and the place where
the rest is. Logs that go to a Prefect server are not changed.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOG_FOLDER = Path(".ostinato") / "logs"

RUN_LOGGERS = ("prefect.flow_runs", "prefect.task_runs")
"""Prefect's loggers of runs. Their errors say that a run failed, which the command itself says at its end."""
RANK_LOGGER = "engine.backends.group.local_ranks"
"""What the ranks of a trainer print, tracebacks included. A failed call raises its error in this process, too."""

log = logging.getLogger(__name__)


@contextlib.contextmanager
def log_file(name: str) -> Iterator[Path]:
    """The path of the log file, to which this process's log records go within the block.

    Handlers that write to the terminal leave tracebacks out meanwhile. What ends a thread, and what Python cannot raise
    to a caller, is logged instead of printed.
    """
    import prefect  # noqa: F401 - its import sets up the handlers that are changed here

    path = _writable_path(name)
    to_file = logging.FileHandler(path, encoding="utf-8")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    with contextlib.ExitStack() as undo:
        undo.callback(to_file.close)
        for logger in _all_loggers():
            terminal_handlers = [handler for handler in logger.handlers if _writes_to_the_terminal(handler)]
            for handler in terminal_handlers:
                undo.enter_context(_without_tracebacks(handler))
            if logger is logging.root or (terminal_handlers and not logger.propagate):
                logger.addHandler(to_file)
                undo.callback(logger.removeHandler, to_file)
        undo.enter_context(_logged_hooks())
        yield path


def log_failure(error: BaseException) -> None:
    """Writes the traceback of what ended the command. Within `log_file`."""
    log.error("the command failed", exc_info=error)


def _writable_path(name: str) -> Path:
    """In the working directory, like the command's other files, or else in the system's folder for temporary files."""
    file_name = re.sub(r"[^A-Za-z0-9._-]+", "-", name) + ".log"
    try:
        LOG_FOLDER.mkdir(parents=True, exist_ok=True)
        path = LOG_FOLDER / file_name
        path.open("ab").close()
    except OSError:
        return Path(tempfile.mkdtemp(prefix="ostinato-")) / file_name
    return path


def _all_loggers() -> list[logging.Logger]:
    known = list(logging.root.manager.loggerDict.values())
    return [logging.getLogger(), *(logger for logger in known if isinstance(logger, logging.Logger))]


def _writes_to_the_terminal(handler: logging.Handler) -> bool:
    return isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler)


@contextlib.contextmanager
def _without_tracebacks(handler: logging.Handler) -> Iterator[None]:
    before = handler.formatter
    handler.setFormatter(_OneLine(before))
    handler.addFilter(_belongs_on_the_terminal)
    try:
        yield
    finally:
        handler.setFormatter(before)
        handler.removeFilter(_belongs_on_the_terminal)


def _belongs_on_the_terminal(record: logging.LogRecord) -> bool:
    if record.name == RANK_LOGGER:
        return False
    return record.levelno < logging.ERROR or not record.name.startswith(RUN_LOGGERS)


class _OneLine(logging.Formatter):
    """Formats a record as another formatter does, without its traceback."""

    def __init__(self, inner: logging.Formatter | None) -> None:
        super().__init__()
        self._inner = inner or logging.Formatter()

    def format(self, record: logging.LogRecord) -> str:
        bare = copy.copy(record)  # the other handlers of the record still need its traceback
        bare.exc_info = bare.exc_text = bare.stack_info = None
        return self._inner.format(bare)


@contextlib.contextmanager
def _logged_hooks() -> Iterator[None]:
    """Python prints the traceback of an error that ends a thread, or that a finaliser raises; here it is logged."""

    def in_thread(failure: threading.ExceptHookArgs) -> None:
        if failure.exc_type is not SystemExit:
            name = failure.thread.name if failure.thread else "unknown"
            log.error("thread %s ended: %r", name, failure.exc_value, exc_info=failure.exc_value)

    def unraisable(failure: Any) -> None:
        log.error("ignored in %r: %r", failure.object, failure.exc_value, exc_info=failure.exc_value)

    before = threading.excepthook, sys.unraisablehook
    threading.excepthook, sys.unraisablehook = in_thread, unraisable
    try:
        yield
    finally:
        threading.excepthook, sys.unraisablehook = before
