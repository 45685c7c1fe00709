"""Tests of the log file of a command: it holds the tracebacks, the terminal shows one line. tests/e2e/test_bad_input.py
tests whole runs."""

from __future__ import annotations

import asyncio
import gc
import io
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prefect  # before any test: its import sets the handlers up
import pytest
from prefect.exceptions import TerminationSignal
from rich.console import Console

from flows.cli.runner import Terminated, run_with_server
from flows.display.log_file import log_file


@pytest.fixture
def terminal() -> io.StringIO:
    """Stands for stderr, which pytest replaces while a test runs."""
    return io.StringIO()


@pytest.fixture
def logger(terminal: io.StringIO) -> Iterator[logging.Logger]:
    """A logger that writes to the terminal."""
    logger = logging.getLogger("tests.log_file")
    logger.propagate = False
    handler = logging.StreamHandler(terminal)
    logger.addHandler(handler)
    yield logger
    logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def log_an_error(logger: logging.Logger) -> None:
    try:
        raise KeyError("the cause")
    except KeyError:
        logger.exception("it failed")


def test_a_traceback_goes_to_the_file_and_its_line_to_the_terminal(
    logger: logging.Logger, terminal: io.StringIO
) -> None:
    with log_file("a/run") as path:
        log_an_error(logger)
    assert terminal.getvalue() == "it failed\n"
    assert path == Path(".ostinato/logs/a-run.log")
    assert "Traceback" in path.read_text() and "KeyError: 'the cause'" in path.read_text()


def test_after_the_block_logging_is_as_it_was(logger: logging.Logger, terminal: io.StringIO) -> None:
    hooks = threading.excepthook, sys.unraisablehook
    with log_file("run") as path:
        pass
    log_an_error(logger)
    assert "Traceback" in terminal.getvalue()
    assert path.read_text() == ""
    assert (threading.excepthook, sys.unraisablehook) == hooks


def test_an_error_that_ends_a_thread_is_in_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise KeyError("the cause")

    with log_file("run") as path:
        thread = threading.Thread(target=fails, name="worker")
        thread.start()
        thread.join()
    assert "Traceback" not in capsys.readouterr().err
    assert "thread worker ended: KeyError('the cause')" in path.read_text() and "Traceback" in path.read_text()


def test_errors_of_prefect_runs_are_in_the_file_only(terminal: io.StringIO) -> None:
    """The command says itself why its run failed."""
    handler = logging.StreamHandler(terminal)
    task_runs = logging.getLogger(f"{prefect.__name__}.task_runs")
    task_runs.addHandler(handler)
    try:
        with log_file("run") as path:
            task_runs.error("Finished in state Failed()", extra={"task_run_name": "grade"})
            task_runs.warning("a warning", extra={"task_run_name": "grade"})
    finally:
        task_runs.removeHandler(handler)
    assert terminal.getvalue() == "a warning\n"
    assert "Finished in state Failed()" in path.read_text()


def test_a_folder_that_cannot_be_written_is_no_obstacle(folder: Path) -> None:
    (folder / ".ostinato").write_text("no folder")
    with log_file("run") as path:
        pass
    assert path.is_file() and folder not in path.parents


def test_a_long_log_is_rotated_and_two_earlier_files_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.display.log_file.MAX_BYTES", 1000)
    with log_file("run") as path:
        for number in range(100):
            logging.getLogger().warning("line %03d %s", number, "x" * 60)
    files = sorted(path.parent.iterdir())
    assert [file.name for file in files] == ["run.log", "run.log.1", "run.log.2"]
    assert all(file.stat().st_size <= 1000 for file in files)
    assert "line 099" in path.read_text()


def test_a_full_disk_is_said_once_and_ends_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / ".ostinato/logs").mkdir(parents=True)
    (folder / ".ostinato/logs/run.log").symlink_to("/dev/full")
    with log_file("run"):
        for _ in range(3):
            logging.getLogger().warning("a line")
    assert capsys.readouterr().err.count("run.log cannot be written: No space left on device") == 1


def test_a_defect_ends_in_one_line_and_the_file(prefect_server: str) -> None:
    async def fails() -> dict[str, Any]:
        raise KeyError("steps")

    screen = Console(file=io.StringIO(), width=40)
    status, _ = run_with_server(fails, screen, what="it", log_name="run", server=prefect_server)
    assert status == 1
    assert screen.file.getvalue() == (  # type: ignore[attr-defined]
        "unexpected KeyError: 'steps'\nthe traceback is in .ostinato/logs/run.log\n"
    )
    text = Path(".ostinato/logs/run.log").read_text()
    assert "Traceback" in text and "test_log_file.py" in text


@pytest.mark.parametrize("ends", [TerminationSignal(signal=15), Terminated(143)], ids=["in a flow", "outside"])
def test_a_sigterm_ends_in_one_line_also_where_a_task_is_not_awaited(
    prefect_server: str, ends: BaseException
) -> None:
    async def ended() -> dict[str, Any]:
        async def end() -> None:
            raise ends

        task = asyncio.get_running_loop().create_task(end())
        await asyncio.sleep(0)
        # the task is not awaited, because the signal ends the event loop first
        del task
        raise ends

    screen = Console(file=io.StringIO(), width=80)
    status, _ = run_with_server(ended, screen, what="it", log_name="run", server=prefect_server)
    gc.collect()
    assert status == 143
    assert screen.file.getvalue() == "\nended by SIGTERM; the same command resumes it\n"  # type: ignore[attr-defined]
    assert "never retrieved" not in Path(".ostinato/logs/run.log").read_text()


@pytest.mark.slow
def test_warnings_reach_the_terminal_when_the_block_is_the_first_to_load_prefect(tmp_path: Path) -> None:
    """`import prefect` alone installs no handlers: Prefect sets logging up when its flows are first imported."""
    program = """if True:
        import logging
        from flows.display.log_file import log_file
        with log_file("run"):
            import flows.sft
            logging.getLogger("ostinato.graders").warning("3 of 10 grades were masked")
    """
    environment = os.environ | {"PREFECT_LOGGING_EXTRA_LOGGERS": "ostinato", "PREFECT_LOGGING_LEVEL": "INFO"}
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert "3 of 10 grades were masked" in ended.stderr
    assert "3 of 10 grades were masked" in (tmp_path / ".ostinato" / "logs" / "run.log").read_text()
