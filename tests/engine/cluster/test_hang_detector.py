"""When a group counts as hung, by a clock of the test's own."""

from __future__ import annotations

import pytest

from engine.cluster.hang_detector import HangDetector
from engine.cluster.rank_progress import RankPhase

IDLE, COMPUTING, FINISHED = RankPhase.IDLE, RankPhase.COMPUTING, RankPhase.FINISHED


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
def watch(clock: Hands) -> HangDetector:
    return HangDetector(2, 10.0, clock)


def saw(watch: HangDetector, *ranks: tuple[int, RankPhase]) -> None:
    for rank, (counter, phase) in enumerate(ranks):
        if phase is FINISHED:
            watch.finished(rank)
        else:
            watch.saw(rank, counter, phase)


def stuck(watch: HangDetector) -> list[int]:
    return [one.rank for one in watch.stuck()]


def test_time_before_the_call_is_not_counted(watch: HangDetector, clock: Hands) -> None:
    saw(watch, (1, IDLE), (1, IDLE))
    clock.now += 1e6
    watch.begin()
    assert stuck(watch) == []


def test_the_rank_that_computes_without_progress_is_stuck_and_the_other_not(
    watch: HangDetector, clock: Hands
) -> None:
    watch.begin()
    saw(watch, (1, COMPUTING), (1, COMPUTING))
    clock.now += 9.9
    saw(watch, (2, COMPUTING), (1, COMPUTING))
    assert stuck(watch) == []
    clock.now += 0.1
    assert stuck(watch) == [1]


def test_a_rank_may_wait_for_one_that_makes_progress(watch: HangDetector, clock: Hands) -> None:
    watch.begin()
    saw(watch, (1, COMPUTING), (2, FINISHED))
    for counter in range(2, 12):
        clock.now += 9.0
        watch.saw(0, counter, COMPUTING)
        assert stuck(watch) == []


def test_a_group_without_any_progress_is_stuck_where_it_has_not_finished(watch: HangDetector, clock: Hands) -> None:
    watch.begin()
    saw(watch, (2, FINISHED), (0, IDLE))  # rank 1 was stopped before it heard of the call
    watch.heard_nothing(1)
    clock.now += 10.0
    assert stuck(watch) == [1]


def test_the_phase_of_the_call_before_is_not_the_phase_of_this_one(watch: HangDetector, clock: Hands) -> None:
    watch.begin()
    saw(watch, (2, COMPUTING), (2, COMPUTING))
    watch.begin()
    watch.saw(0, 2, COMPUTING)  # an answer from before this call: the counter is the same
    clock.now += 10.0
    assert [one.phase for one in watch.stuck()] == [IDLE, IDLE]


def test_a_rank_that_has_not_begun_this_call_is_not_taken_for_finished(watch: HangDetector, clock: Hands) -> None:
    watch.begin()
    watch.saw(1, 4, FINISHED)  # the last counter and phase of the call before, which nobody had asked for
    for counter in range(2):
        watch.saw(0, counter, COMPUTING)
    watch.saw(1, 5, COMPUTING)
    clock.now += 9.0
    watch.saw(0, 7, COMPUTING)
    clock.now += 1.0
    assert stuck(watch) == [1]


def test_the_rank_that_does_not_answer_is_named_first(watch: HangDetector, clock: Hands) -> None:
    watch.begin()
    saw(watch, (1, COMPUTING), (1, COMPUTING))
    watch.heard_nothing(1)
    clock.now += 10.0
    first, second = watch.stuck()
    assert (first.rank, second.rank) == (1, 0)
    assert first.describe() == "rank 1 made no progress for 10 s (computing; its process does not answer)"
    assert second.describe() == "rank 0 made no progress for 10 s (computing)"


def test_progress_is_told_apart_from_an_answer(watch: HangDetector) -> None:
    watch.begin()
    assert watch.saw(0, 1, COMPUTING)
    assert not watch.saw(0, 1, COMPUTING)
    assert watch.saw(0, 2, COMPUTING)
