"""The table of calls: one effect per id, bounded in every direction."""

from __future__ import annotations

import asyncio

import pytest

from engine.http.calls import CallLimits, CallResult, CallTable, SubmittedCall
from engine.http.errors import BodyTooLarge, CallConflict, NotAdmitted, UnknownCall
from tests.fixtures.clocks import Clock

A, B, C = "a" * 32, "b" * 32, "c" * 32


class Work:
    """Counts how often it is begun; ends when `gate` opens."""

    def __init__(self, answer: CallResult | None = None) -> None:
        self.begun, self.cancelled, self.gate = 0, 0, asyncio.Event()
        self.result = answer or CallResult(200, b"{}")

    async def __call__(self) -> CallResult:
        self.begun += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.result


def submit(table: CallTable, id: str, work: Work, *, digest: str = "d", size: int = 1) -> SubmittedCall:
    return table.submit(id, work, verb="generate", digest=digest, run="r", size=size)


async def test_one_id_is_one_effect_however_often_it_is_submitted() -> None:
    table, work = CallTable(), Work()
    first = submit(table, A, work)
    assert submit(table, A, work) is first
    assert await table.wait(first, 0) is None
    work.gate.set()
    assert await table.wait(first, 5) == CallResult(200, b"{}")
    assert submit(table, A, work) is first  # the acknowledgement was lost: the answer is still there
    assert work.begun == 1


async def test_an_id_with_another_body_or_verb_is_a_conflict() -> None:
    table, work = CallTable(), Work()
    submit(table, A, work)
    with pytest.raises(CallConflict):
        submit(table, A, work, digest="e")
    with pytest.raises(CallConflict):
        table.submit(A, work, verb="logprobs", digest="d", run="r", size=1)


async def test_a_permanent_failure_is_joined_and_a_transient_one_is_tried_again() -> None:
    for status, begun in ((422, 1), (503, 2), (500, 2)):
        table, work = CallTable(), Work(CallResult(status, b"{}"))
        work.gate.set()
        await table.wait(submit(table, A, work), 5)
        await table.wait(submit(table, A, work), 5)
        assert work.begun == begun


async def test_calls_and_bytes_that_wait_are_bounded() -> None:
    table, work = CallTable(CallLimits(waiting=2, waiting_bytes=10)), Work()
    first = submit(table, A, work, size=6)
    assert table.has_room(4)
    assert not table.has_room(5)
    submit(table, B, work, size=4)
    with pytest.raises(NotAdmitted, match="2 calls"):
        submit(table, C, work)
    assert submit(table, A, work, size=6) is first  # joining costs nothing
    with pytest.raises(BodyTooLarge):
        submit(CallTable(CallLimits(waiting_bytes=10)), C, work, size=11)
    with pytest.raises(NotAdmitted, match="0 of 0 MiB"):
        submit(CallTable(table.limits, reserved_bytes=5), C, work, size=6)
    work.gate.set()
    await table.wait(first, 5)
    await asyncio.sleep(0)
    assert table.has_room(10)


async def test_no_verb_of_a_run_keeps_the_others_out() -> None:
    table, work = CallTable(CallLimits(waiting_of_verb=1)), Work()
    submit(table, A, work)
    with pytest.raises(NotAdmitted, match="1 generate calls of run r"):
        submit(table, B, work)
    table.submit(B, work, verb="take_gradient_step", digest="d", run="r", size=1)
    table.submit(C, work, verb="generate", digest="d", run="another", size=1)
    assert table.waiting() == 3
    work.gate.set()


async def test_a_dropped_call_is_cancelled_and_forgotten() -> None:
    table, work = CallTable(), Work()
    call = submit(table, A, work)
    await asyncio.sleep(0)
    table.drop(A)
    table.drop(A)
    with pytest.raises(UnknownCall):
        await table.wait(call, 5)
    with pytest.raises(UnknownCall):
        table.find(A)
    assert work.cancelled == 1


async def test_an_asker_that_hears_of_the_drop_while_it_waits_submits_again() -> None:
    table = CallTable()
    call = submit(table, A, Work())
    asking = asyncio.create_task(table.wait(call, 60))
    await asyncio.sleep(0)
    table.drop(A)
    with pytest.raises(UnknownCall):
        await asking


async def test_old_answers_and_abandoned_calls_go() -> None:
    clock = Clock()
    table, done, stuck = CallTable(CallLimits(finished_seconds=10, abandoned_seconds=20), clock), Work(), Work()
    done.gate.set()
    await table.wait(submit(table, A, done), 5)
    submit(table, B, stuck)
    watched = submit(table, C, Work())
    asking = asyncio.create_task(table.wait(watched, 60))
    await asyncio.sleep(0)
    clock.now = 10
    table.sweep()
    assert set(table.calls) == {A, B, C}
    clock.now = 10.5
    table.sweep()
    assert set(table.calls) == {B, C}
    clock.now = 20.5
    table.sweep()
    await asyncio.sleep(0)
    assert set(table.calls) == {C}  # somebody waits for it
    assert stuck.cancelled == 1
    asking.cancel()


@pytest.mark.parametrize("limits", [CallLimits(finished=2), CallLimits(finished_bytes=2)])
async def test_too_many_answers_go_oldest_first_and_those_handed_out_before_others(limits: CallLimits) -> None:
    clock = Clock()
    table = CallTable(limits, clock)
    work = Work(CallResult(200, b"x"))
    work.gate.set()
    for number, id in enumerate((A, B, C)):
        clock.now = number
        call = submit(table, id, work)
        await asyncio.wait({call.task})
    await table.wait(table.find(B), 0)
    table.sweep()
    assert set(table.calls) == {A, C}


async def test_an_answer_larger_than_the_bound_is_kept_until_another_comes() -> None:
    table = CallTable(CallLimits(finished_bytes=2))
    work = Work(CallResult(200, b"xxx"))
    work.gate.set()
    call = submit(table, A, work)
    await asyncio.wait({call.task})
    table.sweep()
    assert table.find(A).result == CallResult(200, b"xxx")
