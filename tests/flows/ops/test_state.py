"""Tests of the state file of `ostinato up`: only its user can read it, it is never partial, and it identifies its
processes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from flows.cli import up
from flows.ops import deployments, processes, supervisor
from flows.ops.processes import UP_ID_ENV, ProcessIdentity, processes_of_up, reap, spawn, terminate_all
from flows.ops.services import services
from flows.ops.state import (
    TOKEN_FILE_ENV,
    Ports,
    UpError,
    UpOptions,
    UpState,
    forget_state,
    load_state,
    save_state,
    state_file,
    status,
    supervising,
)

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)",
]


def some_state(**changes: object) -> UpState:
    options = UpOptions(storage="/data", port=4210)
    state = UpState(id="abc", options=options, ports=Ports(engine=1, worker=2), token="secret")
    return state.model_copy(update=changes)


def test_the_state_comes_back_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    assert load_state(tmp_path) is None
    state = some_state(services={"engine": ProcessIdentity(pid=3, created=4.5)}, ready=True)
    save_state(tmp_path, state)
    assert load_state(tmp_path) == state
    assert stat.S_IMODE(state_file(tmp_path).stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
    forget_state(tmp_path)
    assert load_state(tmp_path) is None


def test_a_state_of_something_else_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    state_file(tmp_path).write_text('{"id": 3}')
    with pytest.raises(UpError, match=r"state\.json is not a state of 'ostinato up'.*remove the file"):
        load_state(tmp_path)


def test_differences_name_options_and_hide_what_may_hold_a_password() -> None:
    options = UpOptions(storage="/a", database="postgresql+asyncpg://me:hidden@db/prefect")
    assert options.differences(options) == []
    differences = options.differences(UpOptions(storage="/b"))
    assert differences == ["storage: '/a' -> '/b'", "database: changed"]


def test_there_is_one_supervisor_of_a_folder(tmp_path: Path) -> None:
    with supervising(tmp_path) as first, supervising(tmp_path) as second:
        assert (first, second) == (True, False)
    with supervising(tmp_path) as again:
        assert again


def test_a_pid_that_is_anothers_by_now_is_not_ours() -> None:
    mine = ProcessIdentity.of(os.getpid())
    assert mine is not None
    assert mine.alive
    assert not mine.model_copy(update={"created": mine.created - 5}).alive


def test_all_processes_of_an_up_are_found_and_killed_if_they_ignore_sigterm(tmp_path: Path) -> None:
    identity = f"test-{os.getpid()}"
    parent = [sys.executable, "-c", f"import subprocess; subprocess.Popen({STUBBORN!r}).wait()"]
    mark = spawn(parent, environment=dict(os.environ) | {UP_ID_ENV: identity}, log=tmp_path / "log", folder=tmp_path)
    stranger = subprocess.Popen(SLEEP)
    try:
        while (tmp_path / "log").read_text() != "ready\n":
            assert mark.alive
        processes = processes_of_up(identity)
        assert len(processes) == 2
        assert mark.pid in {process.pid for process in processes}
        terminate_all(processes, grace_seconds=0.2)
        assert processes_of_up(identity) == []
        reap(mark)
        assert not psutil.pid_exists(mark.pid)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_dead_child_that_was_not_reaped_is_not_alive(tmp_path: Path) -> None:
    mark = spawn([sys.executable, "-c", ""], environment=dict(os.environ), log=tmp_path / "log", folder=tmp_path)
    while mark.alive:
        pass
    assert psutil.Process(mark.pid).status() == psutil.STATUS_ZOMBIE
    reap(mark)
    reap(mark)
    assert not psutil.pid_exists(mark.pid)


@pytest.mark.parametrize(
    ("command", "how"), [("kill -KILL $$", "by SIGKILL"), ("exit 3", "with exit code 3"), ("true", "with exit code 0")]
)
def test_how_a_process_ended(command: str, how: str, tmp_path: Path) -> None:
    process = spawn(["sh", "-c", command], environment=dict(os.environ), log=tmp_path / "log", folder=tmp_path)
    while process.alive:
        time.sleep(0.01)
    assert reap(process) == how
    assert reap(process) == ""  # it is no child any more


def test_another_users_environment_is_empty_and_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: psutil.Process) -> dict[str, str]:
        raise psutil.AccessDenied(1)

    monkeypatch.setattr(psutil.Process, "environ", refused)
    assert processes.process_environment(psutil.Process()) == {}


def test_status_says_who_lives() -> None:
    me, gone = ProcessIdentity.of(os.getpid()), ProcessIdentity(pid=2**22 - 1, created=1.0)
    state = some_state(supervisor=me, services={"engine": gone}, restarts={"engine": 2})
    assert status(state) == {
        "supervisor": {"pid": os.getpid(), "alive": True, "restarts": 0},
        "engine": {"pid": gone.pid, "alive": False, "restarts": 2},
    }


def test_only_the_worker_of_the_services_has_the_path_of_the_token(tmp_path: Path) -> None:
    with_path = {each.name: each.environment.get(TOKEN_FILE_ENV) for each in services(some_state(), tmp_path)}
    assert with_path == {"server": None, "engine": None, "worker": str(tmp_path / "engine-token"), "page": None}


def test_only_the_worker_sends_the_log_of_flows_to_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Flow runs inherit it from the worker. Prefect warns at each line of a logger that no flow run writes."""
    monkeypatch.delenv("PREFECT_LOGGING_EXTRA_LOGGERS", raising=False)
    specs = services(some_state(), tmp_path)
    assert [each.name for each in specs if "PREFECT_LOGGING_EXTRA_LOGGERS" in each.environment] == ["worker"]


def test_a_command_is_followed_line_by_line(tmp_path: Path) -> None:
    seen: list[str] = []
    command = ["sh", "-c", "pwd; echo bad >&2; exit 3"]
    status, printed = processes.run_and_follow(
        command, environment=dict(os.environ), folder=tmp_path, on_line=seen.append
    )
    assert (status, seen) == (3, [f"{tmp_path}\n", "bad\n"])
    assert printed == f"{tmp_path}\nbad"


def test_up_says_how_many_deployments_are_created(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The lines are those of `prefect deploy` 3.8, which breaks its boxes at 80 characters."""
    printed = """\
╭──────────────────────────────────────────────────────────────────────────────╮
│ Deploying grpo                                                               │
│ Deployment 'grpo/grpo' successfully created with id                          │
│ '0f9bd87e-2b3a-4bd4-8a06-1d7ddc3a4ab5'.                                      │
        $ prefect deployment run 'grpo/grpo'
│ Deployment 'sft_to_gspo/sft_to_gspo' successfully created with id            │
"""

    def follow(
        command: Sequence[str], *, environment: Mapping[str, str], folder: Path, on_line: Callable[[str], None]
    ) -> tuple[int, str]:
        for line in printed.splitlines():
            on_line(line)
        return 0, printed

    monkeypatch.setattr(deployments, "run_and_follow", follow)
    monkeypatch.setattr(up, "WAIT_MESSAGE_SECONDS", 0.0)
    show = up._show_created()
    deployments._deploy_all(tmp_path / "prefect.yaml", "pool", tmp_path, lambda created: show(created, 18))
    lines = capfd.readouterr().err.splitlines()
    assert lines == ["1 of 18 deployments are created", "2 of 18 deployments are created"]
    # the supervisor, which reads them, passes them on
    assert all(supervisor.PROGRESS.match(line) for line in lines)
