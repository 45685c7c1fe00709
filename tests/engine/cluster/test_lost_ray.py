"""A private Ray whose raylet or gcs_server is killed, and the sessions that killed engines leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.cluster import connection
from engine.cluster.connection import PRIVATE_CPUS, Cluster, connect
from engine.cluster.placement import Bundle, Placement
from engine.cluster.rank_group import RankGroup
from engine.errors import BadSpec, WorkerDied
from engine.specs.engine import ClusterSpec
from tests.engine.cluster.helpers import rank_group, wait_for, wait_until_gone

pytestmark = pytest.mark.slow


@pytest.fixture
def group() -> Iterator[RankGroup]:
    with rank_group() as group:
        group.start()
        yield group


def current_cluster() -> Cluster:
    assert connection._current is not None
    return connection._current


def kill(process: str) -> None:
    """Kills a process of the private Ray, and returns when the kernel has ended it."""
    victim = current_cluster().processes[process]
    victim.kill()
    victim.wait()


@pytest.mark.parametrize("process", ["raylet", "gcs_server"])
def test_a_private_ray_that_is_lost_between_calls_is_started_again(group: RankGroup, process: str) -> None:
    before = dict(group.pids)
    kill(process)
    assert not group.alive
    assert group.call("count", "new") == ("new", 2)
    wait_until_gone(before.values())
    assert group.start_number == 2


def test_a_raylet_that_is_killed_during_a_call_is_a_transient_error(group: RankGroup) -> None:
    killer = threading.Timer(1.0, kill, ["raylet"])
    killer.start()
    with pytest.raises(WorkerDied, match="the private Ray of this process is gone: its raylet ended with status -9"):
        group.call("slow", 600, 0.1)
    assert group.call("count", "new") == ("new", 2)


def test_only_a_complete_private_ray_that_is_too_small_is_a_bad_spec(group: RankGroup) -> None:
    cluster = current_cluster()
    bundles = [Bundle()] * (PRIVATE_CPUS + 1)
    too_large = Placement(cluster, "a test", bundles)
    with pytest.raises(BadSpec, match=f"needs {PRIVATE_CPUS + 1} CPUs, and there are {PRIVATE_CPUS} CPUs in all"):
        too_large.wait(10)
    kill("raylet")
    with pytest.raises(WorkerDied, match="its raylet ended"):
        too_large.wait(10)


def test_a_private_ray_without_resources_is_a_fault(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray counts a node that did not answer its health checks as dead, while its processes still run."""
    placement = Placement(current_cluster(), "a test", [Bundle()])
    monkeypatch.setattr("ray.cluster_resources", dict)
    with pytest.raises(WorkerDied, match=f"it reports 0 CPUs, not {PRIVATE_CPUS}; the next call starts another"):
        placement.wait(10)
    monkeypatch.undo()
    assert group.call("count", "new") == ("new", 2)
    assert group.start_number == 2


ENGINE = """
import signal, sys
import ray
from engine.cluster.connection import connect
from engine.specs.engine import ClusterSpec
cluster = connect(ClusterSpec())
print(ray._private.worker._global_node.get_session_dir_path(), flush=True)
if sys.argv[1] == "uses a dead raylet":
    raylet = cluster.processes["raylet"]
    raylet.kill()
    raylet.wait()
    ray.put("x")
elif sys.argv[1] == "waits":
    signal.pause()
"""


def run_engine(what: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", ENGINE, what]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_last_line_of_a_process_that_ray_ends_says_why() -> None:
    engine = run_engine("uses a dead raylet")
    _, errors = engine.communicate(timeout=120)
    assert engine.returncode == 1
    last_line = errors.strip().splitlines()[-1]
    assert last_line.startswith(f"Ray ended this process ({engine.pid}): ")
    assert "The connection to the plasma store is failed" in last_line


def test_a_process_that_ends_by_itself_says_nothing() -> None:
    engine = run_engine("ends")
    _, errors = engine.communicate(timeout=120)
    assert (engine.returncode, errors) == (0, "")


def test_the_session_of_a_killed_engine_is_swept_at_the_next_start_and_that_of_a_live_one_is_not() -> None:
    engines = [run_engine("waits") for _ in range(2)]
    try:
        sessions = []
        for engine in engines:
            assert engine.stdout is not None
            sessions.append(Path(engine.stdout.readline().strip()))
        killed, frozen = engines
        os.kill(frozen.pid, signal.SIGSTOP)
        killed.kill()
        killed.wait()
        assert sessions[0].is_dir()
        connect(ClusterSpec()).release()
        assert not sessions[0].exists()
        assert (sessions[1] / "logs").is_dir()
    finally:
        for engine in engines:
            engine.kill()
            engine.communicate()
    wait_for(lambda: connection._current is None, "the connection to be closed")
