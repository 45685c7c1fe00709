"""The log file of a command that runs a flow. It gets every log record with its traceback. The terminal gets the
records without their tracebacks, and not those that say again why the run failed.

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
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

LOG_FOLDER = Path(".ostinato") / "logs"
MAX_BYTES = 20 * 2**20
"""Size of a log file. A longer one is renamed to NAME.log.1, and that one to NAME.log.2."""

RUN_LOGGERS = ("prefect.flow_runs", "prefect.task_runs")
"""Prefect's loggers of runs. Their errors say that a run failed, which the command itself says at its end."""
FAILURE_LOGGER = f"{__name__}.failure"
"""What ended the command. The command says it itself, in one line."""

log = logging.getLogger(__name__)


@contextlib.contextmanager
def log_file(name: str) -> Iterator[Path]:
    """Writes this process's log records to a log file within the block, and gives its path.

    Within the block, handlers that write to the terminal leave out tracebacks. Errors that end a thread or that a
    finaliser raises are logged; Python would print them.
    """
    import prefect.main  # noqa: F401 - its import sets up the handlers that are changed here

    path = _writable_path(name)
    to_file = _LogFileHandler(path, maxBytes=MAX_BYTES, backupCount=2, encoding="utf-8")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    with contextlib.ExitStack() as undo:
        undo.callback(to_file.close)
        # records of loggers that do not propagate reach no handler of the root
        for logger in _all_loggers():
            terminal_handlers = [handler for handler in logger.handlers if _writes_to_the_terminal(handler)]
            for handler in terminal_handlers:
                undo.enter_context(_shortened_output(handler))
            if logger is logging.root or (terminal_handlers and not logger.propagate):
                logger.addHandler(to_file)
                undo.callback(logger.removeHandler, to_file)
        # Python would print these errors on the terminal
        undo.enter_context(_log_uncaught_errors())
        yield path


def log_failure(error: BaseException) -> None:
    """Logs the error that ended the command, with its traceback, for the log file only. Call it within `log_file`."""
    logging.getLogger(FAILURE_LOGGER).error("the command failed", exc_info=error)


class _LogFileHandler(RotatingFileHandler):
    """A file of at most MAX_BYTES, of which two earlier ones are kept.

    A run does not end because its log cannot be written, for example on a full disk. The terminal is told once."""

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._told:
            self._told = True
            print(f"the log file {self.baseFilename} cannot be written: {error.strerror}", file=sys.stderr)

    def close(self) -> None:
        # closing writes the buffer, which fails on a full disk
        with contextlib.suppress(OSError):
            super().close()


def _writable_path(name: str) -> Path:
    """In the working directory, like the command's other files, or else in the system's folder for temporary files."""
    file_name = re.sub(r"[^A-Za-z0-9._-]+", "-", name) + ".log"
    try:
        # the working directory may be read-only
        LOG_FOLDER.mkdir(parents=True, exist_ok=True)
        LOG_FOLDER.chmod(0o700)  # logs hold prompts and addresses
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
def _shortened_output(handler: logging.Handler) -> Iterator[None]:
    """Within the block, the handler leaves out tracebacks, and the records that do not belong on the terminal."""
    original_formatter = handler.formatter
    handler.setFormatter(_FormatterWithoutTraceback(original_formatter))
    handler.addFilter(_belongs_on_the_terminal)
    try:
        yield
    finally:
        handler.setFormatter(original_formatter)
        handler.removeFilter(_belongs_on_the_terminal)


def _belongs_on_the_terminal(record: logging.LogRecord) -> bool:
    if record.name == FAILURE_LOGGER:
        return False
    return record.levelno < logging.ERROR or not record.name.startswith(RUN_LOGGERS)


class _FormatterWithoutTraceback(logging.Formatter):
    """Formats a record as another formatter does, without its traceback."""

    def __init__(self, inner: logging.Formatter | None) -> None:
        super().__init__()
        self._inner = inner or logging.Formatter()

    def format(self, record: logging.LogRecord) -> str:
        # the other handlers of the record still need its traceback
        bare = copy.copy(record)
        bare.exc_info = bare.exc_text = bare.stack_info = None
        return self._inner.format(bare)


@contextlib.contextmanager
def _log_uncaught_errors() -> Iterator[None]:
    """Within the block, errors that end a thread or that a finaliser raises are logged. Python would print them."""

    def log_thread_error(failure: threading.ExceptHookArgs) -> None:
        # SystemExit ends a thread without an error
        if failure.exc_type is not SystemExit:
            name = failure.thread.name if failure.thread else "unknown"
            log.error("thread %s ended: %r", name, failure.exc_value, exc_info=failure.exc_value)

    def log_unraisable_error(failure: Any) -> None:
        log.error("ignored in %r: %r", failure.object, failure.exc_value, exc_info=failure.exc_value)

    # the hooks belong to the process, so they are restored
    original_hooks = threading.excepthook, sys.unraisablehook
    threading.excepthook, sys.unraisablehook = log_thread_error, log_unraisable_error
    try:
        yield
    finally:
        threading.excepthook, sys.unraisablehook = original_hooks
