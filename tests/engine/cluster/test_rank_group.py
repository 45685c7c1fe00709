"""Calls on two real ranks, and the death of one: the quick part of the tests of rank groups."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.cluster.rank_group import PartialFailure, RankGroup
from engine.errors import OutOfMemory, PermanentEngineError, WorkerDied
from tests.engine.cluster.helpers import rank_group, wait_until_gone, when_all_compute


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    """Started in a thread that ends. The ranks must not take its end for the end of their parent."""
    with rank_group(environment={"COLOUR": "blue"}) as group:
        thread = threading.Thread(target=group.start)
        thread.start()
        thread.join()
        yield group


def test_rank_numbers_and_environment(group: RankGroup) -> None:
    assert group.call("who") == (0, 2, group.pids[0])
    assert group.call("pids") == [group.pids[0], group.pids[1]]
    assert group.call("environment", "COLOUR") == "blue"
    assert group.call("environment", "LOCAL_RANK") == "0"
    assert group.start_number == 1


def test_every_rank_runs_every_call_in_order(group: RankGroup) -> None:
    _, before = group.call("count", "first")
    # each rank counts its own calls, and the sum over two ranks grows by two with each
    assert [group.call("count", str(n)) for n in range(5)] == [(str(n), before + 2 * n + 2) for n in range(5)]


def test_arguments_of_their_own_reach_their_ranks(group: RankGroup) -> None:
    assert group.scatter(group.start_number, "echo", [("first",), ("second",)]) == ["first", "second"]
    assert group.scatter(group.start_number, "who", [()]) == [(0, 2, group.pids[0])]


def test_large_values_survive_a_round_trip(group: RankGroup) -> None:
    value = {"ids": [list(range(n, n + 1024)) for n in range(64)], "logprobs": [-0.1] * 65536, "none": None}
    assert group.call("echo", value=value) == value


def test_the_listener_runs_in_the_calling_thread(group: RankGroup) -> None:
    thread_ids: list[int] = []
    with group.progress_callback(lambda: thread_ids.append(threading.get_ident())):
        assert group.call("slow", 8, 0.25) == 8
        assert len(thread_ids) > 1 and set(thread_ids) == {threading.get_ident()}
        thread_ids.clear()
        assert group.call("slow", 1, 0.0) == 1
        assert len(thread_ids) == 1  # at least once, even in a short call
    group.call("slow", 1, 0.0)
    assert len(thread_ids) == 1


@pytest.mark.parametrize("on", [[0], [1], [0, 1]])
def test_an_engine_error_of_any_rank_is_raised_unchanged(group: RankGroup, on: list[int]) -> None:
    group.partial_failure = None
    with pytest.raises(OutOfMemory) as caught:
        group.call("fail", on, "memory")
    assert type(caught.value) is OutOfMemory and str(caught.value) == "half a micro-batch"
    finished = tuple(rank for rank in (0, 1) if rank not in on)
    assert group.partial_failure == (PartialFailure("fail", finished, tuple(on)) if finished else None)
    assert any("undefined" in note for note in getattr(caught.value, "__notes__", [])) == bool(finished)
    assert group.call("fail", [], "memory") == "fine"  # the group lives on
    assert group.start_number == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_other_exceptions_are_permanent_and_name_the_rank(group: RankGroup, rank: int) -> None:
    with pytest.raises(PermanentEngineError, match=f"rank {rank}: ValueError: seven is no prime") as caught:
        group.call("fail", [rank], "value")
    assert "targets.py" in str(caught.value)


def test_unserializable_values_and_unknown_methods_kill_no_rank(group: RankGroup) -> None:
    with pytest.raises(PermanentEngineError, match="pickle"):
        group.call("unsendable")
    with pytest.raises(PermanentEngineError, match="AttributeError"):
        group.call("no_such_method")
    with pytest.raises(TypeError):
        group.call("echo", threading.Lock())  # fails before it is sent to a rank
    assert group.call("echo", 1) == 1 and group.start_number == 1


def test_a_killed_rank_ends_all_and_the_next_call_restarts_them(group: RankGroup, tmp_path: Path) -> None:
    pids = dict(group.pids)
    killer = when_all_compute(tmp_path, 2, lambda pids: os.kill(pids[1], signal.SIGKILL))
    with pytest.raises(WorkerDied, match=r"rank 1 died: "):
        group.call("mark_and_wait", str(tmp_path))
    killer.join()
    assert not group.alive
    wait_until_gone(pids.values())
    with pytest.raises(WorkerDied, match="start 1 are gone"):
        group.call_unless_restarted(1, "count", "lost")
    assert group.start_number == 1  # `call_unless_restarted` starts nothing
    assert group.call("count", "new") == ("new", 2)  # ranks that have counted nothing yet
    assert group.alive and group.start_number == 2
    assert group.call_unless_restarted(2, "count", "again") == ("again", 4)


def test_a_call_beside_the_computation_returns_the_results_of_all_ranks(group: RankGroup, tmp_path: Path) -> None:
    beside: list[dict[int, tuple[int, int, int]]] = []

    def call(pids: dict[int, int]) -> None:
        beside.append(group.call_beside("who"))
        beside.append(group.call_beside("fail", [1], "value"))
        for rank in pids:
            (tmp_path / f"go-on-{rank}").touch()

    thread = when_all_compute(tmp_path, 2, call)
    group.call("mark_and_wait_for_file", str(tmp_path))
    thread.join()
    assert beside == [{rank: (rank, 2, group.pids[rank]) for rank in (0, 1)}, {0: "fine"}]


def test_a_rank_that_dies_beside_the_computation_ends_the_group() -> None:
    with rank_group() as group:
        assert group.call_beside("who") == {}  # nothing runs, and nothing is started
        group.start()
        assert 1 not in group.call_beside("exit_alone", 1)
        assert not group.alive
        assert group.call("who")[:2] == (0, 2)
