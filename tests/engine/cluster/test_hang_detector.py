"""When the ranks of a group count as hung. The tests set the clock."""

from __future__ import annotations

import pytest

from engine.cluster.rank_progress import HangDetector, RankPhase
from tests.fixtures.clocks import Clock

IDLE, COMPUTING, FINISHED = RankPhase.IDLE, RankPhase.COMPUTING, RankPhase.FINISHED


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def detector(clock: Clock) -> HangDetector:
    return HangDetector(2, 10.0, clock)


def record(detector: HangDetector, *ranks: tuple[int, RankPhase]) -> None:
    for rank, (counter, phase) in enumerate(ranks):
        if phase is FINISHED:
            detector.record_finish(rank)
        else:
            detector.record_reply(rank, counter, phase)


def hung(detector: HangDetector) -> list[int]:
    return [rank.rank for rank in detector.hung_ranks()]


def test_time_before_the_call_is_not_counted(detector: HangDetector, clock: Clock) -> None:
    record(detector, (1, IDLE), (1, IDLE))
    clock.now += 1e6
    detector.begin_call()
    assert hung(detector) == []


def test_a_rank_that_computes_without_progress_hangs_and_the_other_does_not(
    detector: HangDetector, clock: Clock
) -> None:
    detector.begin_call()
    record(detector, (1, COMPUTING), (1, COMPUTING))
    clock.now += 9.9
    record(detector, (2, COMPUTING), (1, COMPUTING))
    assert hung(detector) == []
    clock.now += 0.1
    assert hung(detector) == [1]


def test_a_rank_may_wait_for_a_rank_that_makes_progress(detector: HangDetector, clock: Clock) -> None:
    detector.begin_call()
    record(detector, (1, COMPUTING), (2, FINISHED))
    for counter in range(2, 12):
        clock.now += 9.0
        detector.record_reply(0, counter, COMPUTING)
        assert hung(detector) == []


def test_without_any_progress_all_unfinished_ranks_hang(detector: HangDetector, clock: Clock) -> None:
    detector.begin_call()
    record(detector, (2, FINISHED), (0, IDLE))  # rank 1 was stopped before it received the call
    detector.record_no_reply(1)
    clock.now += 10.0
    assert hung(detector) == [1]


def test_the_phase_of_the_previous_call_is_not_used(detector: HangDetector, clock: Clock) -> None:
    detector.begin_call()
    record(detector, (2, COMPUTING), (2, COMPUTING))
    detector.begin_call()
    detector.record_reply(0, 2, COMPUTING)  # a reply from before this call: the counter is unchanged
    clock.now += 10.0
    assert [rank.phase for rank in detector.hung_ranks()] == [IDLE, IDLE]


def test_a_rank_that_has_not_begun_the_call_is_not_finished(detector: HangDetector, clock: Clock) -> None:
    detector.begin_call()
    detector.record_reply(1, 4, FINISHED)  # counter and phase of the end of the previous call, not polled then
    for counter in range(2):
        detector.record_reply(0, counter, COMPUTING)
    detector.record_reply(1, 5, COMPUTING)
    clock.now += 9.0
    detector.record_reply(0, 7, COMPUTING)
    clock.now += 1.0
    assert hung(detector) == [1]


def test_ranks_that_do_not_reply_come_first(detector: HangDetector, clock: Clock) -> None:
    detector.begin_call()
    record(detector, (1, COMPUTING), (1, COMPUTING))
    detector.record_no_reply(1)
    clock.now += 10.0
    first, second = detector.hung_ranks()
    assert (first.rank, second.rank) == (1, 0)
    assert first.describe() == "rank 1 made no progress for 10 s (computing; its process does not answer)"
    assert second.describe() == "rank 0 made no progress for 10 s (computing)"


def test_a_reply_without_a_new_counter_is_no_progress(detector: HangDetector) -> None:
    detector.begin_call()
    assert detector.record_reply(0, 1, COMPUTING)
    assert not detector.record_reply(0, 1, COMPUTING)
    assert detector.record_reply(0, 2, COMPUTING)


def silent(detector: HangDetector) -> list[int]:
    return [rank.rank for rank in detector.silent_ranks()]


def test_a_rank_that_starts_hangs_if_its_process_does_not_reply(detector: HangDetector, clock: Clock) -> None:
    # Before the first reply of any rank, the processes may still be on their way.
    clock.now += 1e6
    assert silent(detector) == []
    # Rank 0 replies and makes no progress (it imports), rank 1 never replies.
    for _ in range(3):
        detector.record_reply(0, 1, IDLE)
        detector.record_no_reply(1)
        clock.now += 4.0
    assert silent(detector) == [1]
    detector.record_reply(1, 1, IDLE)
    assert silent(detector) == []
    # Rank 0 is stopped: its last reply was 4 s ago.
    for _ in range(6):
        detector.record_no_reply(0)
        detector.record_reply(1, 1, IDLE)
        clock.now += 1.0
    assert silent(detector) == [0]
    (rank,) = detector.silent_ranks()
    assert rank.describe() == "rank 0 made no progress for 10 s (idle; its process does not answer)"
