"""When a group counts as hung, by a clock of the test's own."""

from __future__ import annotations

import pytest

from engine.backends.group.progress import Activity, Phase, ProgressFile
from engine.backends.group.watch import ProgressWatch

IDLE, COMPUTING, FINISHED = Phase.IDLE, Phase.COMPUTING, Phase.FINISHED


class Hands:
    """A clock that is set by hand, seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Hands:
    return Hands()


@pytest.fixture
def watch(clock: Hands) -> ProgressWatch:
    return ProgressWatch(2, 10.0, clock)


def saw(watch: ProgressWatch, *ranks: tuple[int, Phase], stopped: int | None = None) -> None:
    watch.saw([Activity(rank, counter, phase, rank == stopped) for rank, (counter, phase) in enumerate(ranks)])


def stuck(watch: ProgressWatch) -> list[int]:
    return [one.rank for one in watch.stuck()]


def test_between_calls_nobody_is_stuck(watch: ProgressWatch, clock: Hands) -> None:
    saw(watch, (1, IDLE), (1, IDLE))
    clock.now += 1e6
    assert stuck(watch) == []
    watch.begin()
    assert stuck(watch) == []  # an idle day before the call is not counted
    clock.now += 1e6
    watch.end()
    assert stuck(watch) == []


def test_the_rank_that_computes_without_progress_is_stuck_and_the_other_not(
    watch: ProgressWatch, clock: Hands
) -> None:
    watch.begin()
    saw(watch, (1, COMPUTING), (1, COMPUTING))
    clock.now += 9.9
    saw(watch, (2, COMPUTING), (1, COMPUTING))
    assert stuck(watch) == []
    clock.now += 0.1
    assert stuck(watch) == [1]


def test_a_rank_may_wait_for_one_that_gets_further(watch: ProgressWatch, clock: Hands) -> None:
    watch.begin()
    saw(watch, (1, COMPUTING), (2, FINISHED))
    for counter in range(2, 12):
        clock.now += 9.0
        saw(watch, (counter, COMPUTING), (2, FINISHED))
        assert stuck(watch) == []


def test_a_group_in_which_nobody_gets_further_is_stuck_in_whatever_phase(watch: ProgressWatch, clock: Hands) -> None:
    watch.begin()
    saw(watch, (2, FINISHED), (0, IDLE), stopped=1)  # stopped before it heard of the call
    clock.now += 10.0
    assert stuck(watch) == [1]
    saw(watch, (2, FINISHED), (2, FINISHED), stopped=1)  # it got further: stopped after its part
    assert stuck(watch) == []
    clock.now += 10.0
    assert stuck(watch) == [1]


def test_the_stopped_rank_is_named_first(watch: ProgressWatch, clock: Hands) -> None:
    watch.begin()
    saw(watch, (1, COMPUTING), (1, COMPUTING), stopped=1)
    clock.now += 10.0
    first, second = watch.stuck()
    assert (first.rank, second.rank) == (1, 0)
    assert first.describe() == "rank 1 got no further for 10 s (computing; a signal has stopped it)"
    assert second.describe() == "rank 0 got no further for 10 s (computing)"


def test_progress_is_seen_through_the_file_of_another_process() -> None:
    file = ProgressFile.create(2)
    other = ProgressFile(file.fileno(), 2)
    other.write(1, 2**40, COMPUTING)
    assert file.read(1) == (2**40, COMPUTING)
    assert file.read(0) == (0, IDLE)
