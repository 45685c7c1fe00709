"""Two nodes of one rank each, on this machine: `ostinato engine join` follows the head through its generations."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from engine.backends.group.group import Group
from engine.errors import BadSpec, WorkerDied
from tests.engine.group.helpers import a_group, once_all_compute, running, wait_for

TOKEN = "an example of a token, long enough"


def join(address: str, *, node: int = 1, token: str = TOKEN) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "flows.cli.main", "engine", "join", "--head", address, "--node-rank", str(node)]
    env = {**os.environ, "OSTINATO_GROUP_TOKEN": token}
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)


@contextmanager
def joined(address: str) -> Iterator[subprocess.Popen[str]]:
    process = join(address)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    monkeypatch.setenv("OSTINATO_GROUP_TOKEN", TOKEN)
    with a_group(ranks=1, nodes=2, hang_seconds=3.0) as group:
        yield group


@pytest.fixture
def address(group: Group) -> str:
    assert group.address is not None
    return group.address


def test_a_node_that_may_not_join_ends_with_the_reason(address: str) -> None:
    wrong_token = join(address, token="another token of that length")
    wrong_node = join(address, node=2)
    assert "wrong token" in wrong_token.communicate(timeout=60)[1] and wrong_token.returncode == 2
    assert "node rank 2 is not in 1..1" in wrong_node.communicate(timeout=60)[1] and wrong_node.returncode == 2


def test_a_group_whose_nodes_do_not_join_says_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_group(ranks=1, nodes=2, start_seconds=0.2) as group:
        for _ in range(4):  # never permanent: the node may come yet
            with pytest.raises(WorkerDied, match=f"ostinato engine join --head {group.address} --node-rank N"):
                group.call("who")


@pytest.mark.slow
def test_the_rank_of_another_node_is_one_of_the_group(group: Group, address: str) -> None:
    with joined(address) as node:
        first, second = group.call("pids")
        assert psutil.Process(first).ppid() == os.getpid() and psutil.Process(second).ppid() == node.pid
        assert group.call("count", "both") == ("both", 2)
        group.close()
        assert not psutil.pid_exists(first)
        wait_for(lambda: not psutil.pid_exists(second), "the node's rank to end")
        assert node.poll() is None  # it waits for another head


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kill", "said"),
    [
        (lambda ranks, node: os.kill(ranks[1], signal.SIGKILL), "rank 1 was killed by SIGKILL"),
        (lambda ranks, node: os.kill(ranks[0], signal.SIGKILL), "rank 0 was killed by SIGKILL"),
        (lambda ranks, node: os.kill(ranks[1], signal.SIGSTOP), "rank 1 got no further"),
        (lambda ranks, node: os.kill(node, signal.SIGSTOP), "node 1 is gone: it said nothing for 3 s"),
        (lambda ranks, node: os.kill(node, signal.SIGKILL), "node 1 is gone"),
    ],
    ids=["its rank killed", "the head's rank killed", "its rank stopped", "the node stopped", "the node killed"],
)
def test_a_death_on_either_node_ends_both_and_the_next_call_finds_both(
    group: Group, address: str, kill: Callable[[dict[int, int], int], None], said: str, tmp_path: Path
) -> None:
    with joined(address) as node:
        pids = group.call("pids")
        once_all_compute(tmp_path, 2, lambda ranks: kill(ranks, node.pid))
        with pytest.raises(WorkerDied, match=said):
            group.call("mark_and_wait", str(tmp_path), 600.0 if "no further" not in said else 1.0)
        assert not psutil.pid_exists(pids[0])
        if running(node.pid) and psutil.Process(node.pid).status() == psutil.STATUS_STOPPED:
            os.kill(node.pid, signal.SIGCONT)  # it finds that it was given up, and joins anew
        wait_for(lambda: not running(pids[1]), "the node's rank to end")
        if node.poll() is not None:
            with joined(address):
                assert group.call("count", "again") == ("again", 2)
        else:
            assert group.call("count", "again") == ("again", 2)
        assert group.generation == 2


@pytest.mark.slow
def test_a_node_outlives_its_head_and_ends_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_GROUP_TOKEN", TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with joined(address) as node:  # before there is a head at all
        for _ in range(2):
            with a_group(ranks=1, nodes=2, listen=address) as group:
                assert group.call("count", "up") == ("up", 2)
                rank = group.call("pids")[1]
                with pytest.raises(BadSpec, match="cannot be listened on"):
                    Group("a:B", {}, ranks=1, nodes=2, listen=address, start_seconds=1, hang_seconds=1)
            wait_for(lambda rank=rank: not running(rank), "the node's rank to end with the head")
        with a_group(ranks=1, nodes=2, listen=address) as group:
            rank = group.call("pids")[1]
            node.terminate()
            assert node.wait(timeout=60) == 0
            assert not psutil.pid_exists(rank)
