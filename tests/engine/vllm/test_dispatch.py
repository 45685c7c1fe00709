"""Distribution of work over replicas, and completions that are sampled again. Stand-ins replace the processes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from engine.backends.replicas.dispatch import MAX_FAILURES, WorkItem, affinity_key, dispatch_work
from engine.backends.replicas.partial_completions import PartialCompletion, run_unless_interrupted
from engine.backends.replicas.replica import Replica
from engine.errors import BadSpec, CompletionDiverged, SamplerOutOfSync, WorkerDied
from engine.protocol import Completion
from tests.fixtures.worklog import events


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


# -- dispatch ----------------------------------------------------------------------------------------------------


class FakeActor:
    """Stands for an actor. Only `kill` is called."""

    async def kill(self) -> None:
        return None


async def nothing(replica: Replica) -> None:
    return None


def replicas_of(count: int) -> list[Replica]:
    replicas = [Replica(f"replica-{n}", FakeActor, {}, nothing, 1, phase="up") for n in range(count)]  # type: ignore[arg-type]
    for replica in replicas:
        replica.loaded_state, replica.actor = "state", replica.start_process()
    return replicas


ITEMS = [WorkItem(affinity_key([n]), 10) for n in range(24)]


def test_work_of_a_replica_that_dies_is_done_again_by_others() -> None:
    replicas, done_by = replicas_of(3), dict[int, str]()

    async def send(replica: Replica, indices: list[int]) -> None:
        await asyncio.sleep(0)
        if replica is replicas[0]:
            raise WorkerDied("gone")
        done_by.update(dict.fromkeys(indices, replica.name))

    async def ready() -> list[Replica]:
        return [replica for replica in replicas if replica.phase == "up"]

    async def main() -> None:
        assert await dispatch_work(ITEMS, send, ready) == {replicas[1].actor, replicas[2].actor}

    run(main())
    assert sorted(done_by) == list(range(24)) and replicas[0].phase == "down"
    assert [(replica.outstanding_tokens, replica.active_calls) for replica in replicas] == [(0, 0)] * 3


def test_work_of_a_replica_that_ends_after_it_was_done_is_done_again() -> None:
    replicas, first = replicas_of(2), asyncio.Event()
    calls: list[tuple[str, list[int]]] = []

    async def send(replica: Replica, indices: list[int]) -> None:
        calls.append((replica.name, indices))
        if replica is replicas[0]:
            first.set()
            return
        await first.wait()
        await asyncio.sleep(0.01)  # the first is done by now
        replicas[0].actor, replicas[0].phase = None, "down"

    async def ready() -> list[Replica]:
        return [replica for replica in replicas if replica.phase == "up"]

    async def main() -> None:
        assert await dispatch_work(ITEMS, send, ready) == {replicas[1].actor}

    run(main())
    assert [name for name, _ in calls] == ["replica-0", "replica-1", "replica-1"] and calls[2][1] == calls[0][1]
    assert [(replica.outstanding_tokens, replica.active_calls) for replica in replicas] == [(0, 0)] * 2


def test_a_request_that_kills_every_replica_fails_the_call() -> None:
    replicas, sent = replicas_of(2), list[str]()

    async def send(replica: Replica, indices: list[int]) -> None:
        sent.append(replica.name)
        raise WorkerDied("gone")

    async def ready() -> list[Replica]:
        return replicas

    with pytest.raises(WorkerDied, match="gone"):
        run(dispatch_work(ITEMS[:1], send, ready))  # type: ignore[arg-type]
    assert len(sent) == MAX_FAILURES + 1


def test_a_refused_request_ends_the_call_and_cancels_the_rest() -> None:
    replicas, cancelled = replicas_of(2), list[str]()

    async def send(replica: Replica, indices: list[int]) -> None:
        if replica is replicas[0]:
            raise BadSpec("no")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(replica.name)
            raise

    async def ready() -> list[Replica]:
        return replicas

    with pytest.raises(BadSpec):
        run(dispatch_work(ITEMS, send, ready))  # type: ignore[arg-type]
    assert cancelled == ["replica-1"]
    assert [(replica.outstanding_tokens, replica.active_calls) for replica in replicas] == [(0, 0)] * 2


def test_a_replica_with_other_weights_gets_nothing_more() -> None:
    replicas = replicas_of(2)

    async def send(replica: Replica, indices: list[int]) -> None:
        if replica is replicas[1]:
            raise SamplerOutOfSync("it holds None")

    async def ready() -> list[Replica]:
        return [replica for replica in replicas if replica.loaded_state]

    run(dispatch_work(ITEMS, send, ready))  # type: ignore[arg-type]
    assert replicas[1].loaded_state is None and replicas[1].phase == "up"


# -- completions --------------------------------------------------------------------------------------------------


def test_a_repeated_completion_is_reported_once(worklog: Path) -> None:
    completion, reported = PartialCompletion(), list[int]()
    reported += [token for token, _ in completion.add_chunk([1, 2, 3], [-1.0, -1.0, -1.0], None)]
    completion.restart()
    reported += [token for token, _ in completion.add_chunk([1, 2], [-1.0, -1.0], None)]
    reported += [token for token, _ in completion.add_chunk([3, 4], [-1.0, -2.0], "eos")]
    assert reported == [1, 2, 3, 4]
    assert [event["tokens"] for event in events(worklog, "restart")] == [3]
    finished = completion.completion()
    assert (finished.token_ids, finished.logprobs) == ([1, 2, 3, 4], [-1.0, -1.0, -1.0, -2.0])


def test_a_repetition_that_contradicts_delivered_tokens_is_refused() -> None:
    completion = PartialCompletion()
    list(completion.add_chunk([1, 2], [-1.0, -1.0], None))
    completion.restart()
    with pytest.raises(CompletionDiverged, match="token id 3 at position 1, where 2 was already delivered"):
        list(completion.add_chunk([1, 3], [-1.0, -1.0], "length"))


def test_an_interrupted_completion_has_the_tokens_so_far_and_an_ended_one_its_end() -> None:
    for stop, expected in ((None, "interrupted"), ("eos", "eos")):
        completion = PartialCompletion()
        list(completion.add_chunk([1, 2], [-1.0, -2.0], stop))  # type: ignore[arg-type]
        completion.interrupt()
        assert completion.completion() == Completion([1, 2], [-1.0, -2.0], expected)  # type: ignore[arg-type]


def test_an_interruption_ends_the_work_before_the_call_returns() -> None:
    events: list[str] = []

    async def work(end: asyncio.Event) -> str:
        try:
            await end.wait()
            return "done"
        finally:
            await asyncio.sleep(0)
            events.append("ended")

    async def failing() -> str:
        raise WorkerDied("gone")

    async def main() -> None:
        never, now = asyncio.Event(), asyncio.Event()
        now.set()
        looks = iter([False, False, True])
        assert await run_unless_interrupted(work(never), lambda: next(looks)) is None
        assert events == ["ended"]
        assert await run_unless_interrupted(work(now), lambda: False) == "done"
        assert await run_unless_interrupted(work(now), None) == "done"
        with pytest.raises(WorkerDied):
            await run_unless_interrupted(failing(), lambda: False)
        # A caller that is cancelled ends the work, too.
        running = asyncio.create_task(run_unless_interrupted(work(never), lambda: False))
        await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert running.cancelled() and len(events) == 4

    run(main())


def test_a_replica_that_contradicts_delivered_tokens_is_not_ended() -> None:
    """The first replica dies after two tokens. The second one samples other tokens, and stays up."""
    replicas, completion, sends = replicas_of(2), PartialCompletion(), list[str]()

    async def send(replica: Replica, indices: list[int]) -> None:
        sends.append(replica.name)
        completion.restart()
        is_first = len(sends) == 1
        list(completion.add_chunk([1, 2] if is_first else [1, 3], [-1.0, -1.0], None))
        if is_first:
            raise WorkerDied("gone")

    async def ready() -> list[Replica]:
        return [replica for replica in replicas if replica.phase == "up"]

    with pytest.raises(CompletionDiverged):
        run(dispatch_work(ITEMS[:1], send, ready))  # type: ignore[arg-type]
    phases = {replica.name: replica.phase for replica in replicas}
    assert len(sends) == 2 and (phases[sends[0]], phases[sends[1]]) == ("down", "up")
    assert [(replica.outstanding_tokens, replica.active_calls) for replica in replicas] == [(0, 0)] * 2
