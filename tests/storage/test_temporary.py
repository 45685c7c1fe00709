"""Temporary folders of killed processes are swept, and those of live processes are not."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from storage.store.tables import TableWriter
from storage.temporary import LOCK_NAME, mark_in_use, process_folder, sweep_unused

OPEN_TABLE = """
import signal
from storage.store.tables import TableWriter
writer = TableWriter("threads")
print(writer.path, flush=True)
signal.pause()
"""


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes that write a table each, with `tmp_path` as their folder for temporary files."""
    started = []
    for _ in range(2):
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", OPEN_TABLE], stdout=subprocess.PIPE, text=True,
                env=os.environ | {"TMPDIR": str(tmp_path)},
            )
        )  # fmt: skip
    yield started
    for process in started:
        process.kill()
        process.communicate()


def table_path(process: subprocess.Popen[str]) -> Path:
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


def test_only_the_folder_of_the_killed_process_is_swept(
    processes: list[subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, frozen = processes
    lost, kept = table_path(killed), table_path(frozen)
    killed.kill()
    killed.wait()
    frozen.send_signal(signal.SIGSTOP)  # it looks dead, and may go on
    stranger = tmp_path / "ostinato-process-of-another-program"
    stranger.mkdir()
    assert lost.is_relative_to(tmp_path) and lost.parent.is_dir()

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with TableWriter("threads") as writer:
        assert not lost.parent.exists()
        assert kept.parent.is_dir() and stranger.is_dir()
        assert writer.path.is_relative_to(tmp_path)
    # nothing of the killed process is left: the folders of the live ones and of the other program
    assert len(list(tmp_path.iterdir())) == 3


def test_a_sweep_that_was_interrupted_is_finished_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "used"
    (folder / "table").mkdir(parents=True)
    mark = f"from pathlib import Path; from storage.temporary import mark_in_use; mark_in_use(Path({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", mark], check=True)

    def fail(path: Path) -> None:
        raise OSError("the disk is away")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", fail)
        sweep_unused(tmp_path, "*")
    assert folder.is_dir()
    sweep_unused(tmp_path, "*")
    assert not folder.exists()


def test_the_own_folder_is_in_use(tmp_path: Path) -> None:
    folder = tmp_path / "used"
    folder.mkdir()
    mark_in_use(folder)
    sweep_unused(tmp_path, "*")
    assert folder.is_dir()


def test_a_process_that_ends_removes_its_folder(tmp_path: Path) -> None:
    program = OPEN_TABLE.replace("signal.pause()", "")
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"TMPDIR": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_sweep_is_open_for_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS refuses an exclusive lock on a file that is only open for reading."""
    folder = tmp_path / "used"
    folder.mkdir()
    (folder / LOCK_NAME).touch()

    def flock(file: IO[bytes], operation: int) -> None:
        if not file.writable():
            raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr("fcntl.flock", flock)
    sweep_unused(tmp_path, "*")
    assert not folder.exists()


@pytest.mark.parametrize("killed_in", ["pathlib.Path.mkdir", "os.replace"])
def test_a_folder_of_a_process_that_was_killed_before_the_mark_is_swept(tmp_path: Path, killed_in: str) -> None:
    module, _, name = killed_in.rpartition(".")
    program = f"""
import os, pathlib
from storage.temporary import process_folder
{module}.{name} = lambda *_, **__: os._exit(9)
process_folder(pathlib.Path({str(tmp_path)!r}))
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == 9
    assert list(tmp_path.iterdir())
    folder = process_folder(tmp_path)
    assert list(tmp_path.iterdir()) == [folder]
