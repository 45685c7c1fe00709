"""Ranks that die or hang, and starts that fail. No process may be left afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.cluster.rank_group import RankGroup
from engine.errors import BadSpec, PermanentEngineError, WorkerDied
from tests.engine.cluster.helpers import TARGET, rank_group, running, wait_for, wait_until_gone, when_all_compute

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    """Restarted by most tests."""
    with rank_group() as group:
        yield group


def start(group: RankGroup) -> dict[int, int]:
    """Starts the ranks if needed, and returns their pids."""
    group.start()
    return dict(group.pids)


def test_ranks_yield_to_no_other_process(group: RankGroup) -> None:
    start(group)
    assert group.call("niceness") <= os.nice(0), "Ray gives its workers 15 by default"


@pytest.mark.parametrize("ranks", [[0], [0, 1]])
def test_killed_during_a_call(group: RankGroup, ranks: list[int], tmp_path: Path) -> None:
    pids = start(group)
    before = group.start_number

    def kill(running: dict[int, int]) -> None:
        for rank in ranks:
            os.kill(running[rank], signal.SIGKILL)

    when_all_compute(tmp_path, 2, kill)
    # if two die at once, the error names the first that Ray reports, or both
    with pytest.raises(WorkerDied, match=f"^rank [{''.join(map(str, ranks))}] died"):
        group.call("mark_and_wait", str(tmp_path))
    wait_until_gone(pids.values())
    assert group.call("count", "new") == ("new", 2)
    assert group.start_number == before + 1


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
def test_killed_between_calls(group: RankGroup, ranks: list[int]) -> None:
    pids = start(group)
    before = group.start_number
    for rank in ranks:
        os.kill(pids[rank], signal.SIGKILL)
    wait_for(lambda: not group.alive, "the death to be noticed")
    with pytest.raises(WorkerDied, match=f"rank [{''.join(map(str, ranks))}] died"):
        group.call_unless_restarted(before, "count", "lost")
    wait_until_gone(pids.values())
    assert group.call("count", "new") == ("new", 2)
    assert group.start_number == before + 1


def test_the_error_names_the_rank_that_exits_and_not_its_peer(group: RankGroup) -> None:
    pids = start(group)
    with pytest.raises(WorkerDied) as caught:
        group.call("exit", 1, 3)  # rank 0 waits for it in a collective
    first_line = str(caught.value).splitlines()[0]
    assert first_line.startswith("rank 1 died") and "rank 0" not in first_line
    wait_until_gone(pids.values())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_with_a_stopped_rank_is_killed_and_shows_stacks(rank: int) -> None:
    with rank_group(hang_seconds=2.0) as group:
        pids = start(group)
        with pytest.raises(WorkerDied) as caught:
            group.call("stop_self", rank)
        assert str(caught.value).startswith(f"rank {rank} made no progress for")
        assert "its process does not answer" in str(caught.value)
        assert "in stop_self" in str(caught.value)  # the stack of the other rank, which waits
        wait_until_gone(pids.values())
        assert group.call("slow", 12, 0.25) == 12  # longer than hang_seconds in all


def test_a_rank_stopped_between_calls_fails_the_next_one() -> None:
    with rank_group(hang_seconds=2.0) as group:
        pids = start(group)
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(WorkerDied, match="rank 1 made no progress"):
            group.call("who")
        wait_until_gone(pids.values())


def test_children_of_a_killed_rank_end(group: RankGroup) -> None:
    pids = start(group)
    child = group.call("spawn_child")
    assert running(child)
    os.kill(pids[0], signal.SIGKILL)
    wait_for(lambda: not group.alive, "the death to be noticed")
    wait_for(lambda: not running(child), "the child of the dead rank to end")


def test_children_of_a_closed_rank_end() -> None:
    with rank_group() as group:
        child = group.call("spawn_child")
        group.close()
        wait_for(lambda: not running(child), "the child of the closed rank to end")


def test_large_options_arrive() -> None:
    with rank_group({"large": "x" * 5_000_000}) as group:
        assert group.call("option_size", "large") == 5_000_000


def test_a_listener_that_raises_ends_the_group(group: RankGroup) -> None:
    pids = start(group)

    def listener() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), group.progress_callback(listener):
        group.call("slow", 1000, 0.1)
    assert not group.alive
    wait_until_gone(pids.values())


ENGINE = f"""
import sys, threading
from engine.cluster.rank_group import RankGroup
group = RankGroup({TARGET!r}, {{}}, ranks=2, start_seconds=60, hang_seconds=60)
print(*group.call("pids"), flush=True)
threading.Event().wait() if sys.argv[1] == "idle" else group.call("mark_and_wait", sys.argv[1])
"""


@pytest.mark.parametrize("busy", [False, True])
def test_an_engine_that_is_killed_takes_its_ranks_along(busy: bool, tmp_path: Path) -> None:
    argument = str(tmp_path) if busy else "idle"
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, argument], stdout=subprocess.PIPE, text=True)
    try:
        assert engine.stdout is not None
        pids = [int(pid) for pid in engine.stdout.readline().split()]
        assert len(pids) == 2
        if busy:
            wait_for(lambda: len(list(tmp_path.iterdir())) == 2, "the call to run")
        else:
            os.kill(pids[1], signal.SIGSTOP)  # a stopped rank cannot end itself
    finally:
        engine.kill()
        engine.communicate()
    wait_for(lambda: not any(running(pid) for pid in pids), "the ranks to end")


def test_close_lets_every_rank_close_and_leaves_none(tmp_path: Path) -> None:
    with rank_group({"closed": str(tmp_path)}) as group:
        pids = start(group)
        group.close()
        wait_until_gone(pids.values())
        assert sorted(path.name for path in tmp_path.iterdir()) == ["closed-0", "closed-1"]
        with pytest.raises(WorkerDied, match="closed"):
            group.call("who")


def test_close_ends_the_call_of_another_thread(tmp_path: Path) -> None:
    with rank_group() as group:
        raised: list[BaseException] = []

        def call() -> None:
            try:
                group.call("mark_and_wait", str(tmp_path))
            except WorkerDied as error:
                raised.append(error)

        caller = threading.Thread(target=call)
        caller.start()
        when_all_compute(tmp_path, 2, lambda pids: group.close()).join()
        caller.join()
        assert "closed" in str(raised[0])


def test_an_engine_error_during_the_start_is_raised_each_time() -> None:
    with rank_group({"bad_start": "spec"}) as group:
        for start_number in (1, 2):
            with pytest.raises(BadSpec, match="no such model"):
                group.call("who")
            assert group.start_number == start_number and not group.alive
            wait_until_gone(group.pids.values())


@pytest.mark.parametrize(
    ("bad_start", "message"), [("exit", "rank 1 died"), ("raise", "RuntimeError: no luck")]
)
def test_the_third_failed_start_in_a_row_is_permanent_and_shows_the_log(bad_start: str, message: str) -> None:
    with rank_group({"bad_start": bad_start}) as group:
        for error_class in (WorkerDied, WorkerDied, PermanentEngineError):
            with pytest.raises(error_class, match=message) as caught:
                group.call("who")
            assert type(caught.value) is error_class
            assert "about to fail the start" in str(caught.value)
            wait_until_gone(group.pids.values())


def test_the_error_of_a_slow_start_shows_the_missing_rank_and_its_stack() -> None:
    options: dict[str, Any] = {"bad_start": "sleep"}
    with rank_group(options, start_seconds=15.0) as group:
        with pytest.raises(WorkerDied, match=r"start_seconds=15: ranks \[1\]") as caught:
            group.call("who")
        assert "in __init__" in str(caught.value)
        wait_until_gone(group.pids.values())


def test_a_rank_that_is_stopped_while_it_starts_is_found_after_hang_seconds() -> None:
    """Without the watch, the start would take all of its 60 s."""
    with rank_group({"bad_start": "stop"}, hang_seconds=3.0) as group:
        began = time.monotonic()
        with pytest.raises(WorkerDied, match=r"rank 1 made no progress for [3-9] s \(idle; its process does not"):
            group.call("who")
        assert time.monotonic() - began < 40
        wait_until_gone(group.pids.values())
