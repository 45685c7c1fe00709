"""Spreading of work over replicas, and completions that are drawn again, with stand-ins for the processes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from engine.backends.vllm.serving.drawing import Drawing
from engine.backends.vllm.serving.replica import Replica
from engine.backends.vllm.serving.routing import Work, affinity
from engine.backends.vllm.serving.spreading import FAILURES, spread
from engine.errors import BadSpec, SamplerOutOfSync, WorkerDied


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


# -- spreading ----------------------------------------------------------------------------------------------------


class Process:
    """Stands for an actor; `kill` is all that is called."""

    async def kill(self) -> None:
        return None


async def nothing(replica: Replica) -> None:
    return None


def replicas_of(count: int) -> list[Replica]:
    made = [Replica(f"replica-{n}", Process, {}, nothing, 1, phase="up") for n in range(count)]  # type: ignore[arg-type]
    for replica in made:
        replica.held, replica.actor = "state", replica.make()
    return made


WORKS = [Work(affinity([n]), 10) for n in range(24)]


def test_work_of_a_replica_that_dies_is_done_again_by_others() -> None:
    replicas, did = replicas_of(3), dict[int, str]()

    async def send(replica: Replica, numbers: list[int]) -> None:
        await asyncio.sleep(0)
        if replica is replicas[0]:
            raise WorkerDied("gone")
        did.update(dict.fromkeys(numbers, replica.name))

    async def ready() -> list[Replica]:
        return [replica for replica in replicas if replica.phase == "up"]

    async def main() -> None:
        assert await spread(WORKS, send, ready) == {replicas[1].actor, replicas[2].actor}

    run(main())
    assert sorted(did) == list(range(24)) and replicas[0].phase == "down"
    assert [(replica.outstanding, replica.needed) for replica in replicas] == [(0, 0)] * 3


def test_work_of_a_replica_that_ends_after_it_was_done_is_done_again() -> None:
    replicas, first = replicas_of(2), asyncio.Event()
    did: list[tuple[str, list[int]]] = []

    async def send(replica: Replica, numbers: list[int]) -> None:
        did.append((replica.name, numbers))
        if replica is replicas[0]:
            first.set()
            return
        await first.wait()
        await asyncio.sleep(0.01)  # the first is done by now
        replicas[0].actor, replicas[0].phase = None, "down"

    async def ready() -> list[Replica]:
        return [replica for replica in replicas if replica.phase == "up"]

    async def main() -> None:
        assert await spread(WORKS, send, ready) == {replicas[1].actor}

    run(main())
    assert [name for name, _ in did] == ["replica-0", "replica-1", "replica-1"] and did[2][1] == did[0][1]
    assert [(replica.outstanding, replica.needed) for replica in replicas] == [(0, 0)] * 2


def test_a_request_that_kills_every_replica_fails_the_call() -> None:
    replicas, sent = replicas_of(2), list[str]()

    async def send(replica: Replica, numbers: list[int]) -> None:
        sent.append(replica.name)
        raise WorkerDied("gone")

    async def ready() -> list[Replica]:
        return replicas

    with pytest.raises(WorkerDied, match="gone"):
        run(spread(WORKS[:1], send, ready))  # type: ignore[arg-type]
    assert len(sent) == FAILURES + 1


def test_a_refused_request_ends_the_call_and_cancels_the_rest() -> None:
    replicas, cancelled = replicas_of(2), list[str]()

    async def send(replica: Replica, numbers: list[int]) -> None:
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
        run(spread(WORKS, send, ready))  # type: ignore[arg-type]
    assert cancelled == ["replica-1"]
    assert [(replica.outstanding, replica.needed) for replica in replicas] == [(0, 0)] * 2


def test_a_replica_with_other_weights_gets_nothing_more() -> None:
    replicas = replicas_of(2)

    async def send(replica: Replica, numbers: list[int]) -> None:
        if replica is replicas[1]:
            raise SamplerOutOfSync("it holds None")

    async def ready() -> list[Replica]:
        return [replica for replica in replicas if replica.held]

    run(spread(WORKS, send, ready))  # type: ignore[arg-type]
    assert replicas[1].held is None and replicas[1].phase == "up"


# -- completions --------------------------------------------------------------------------------------------------


def test_a_redrawn_completion_is_told_once() -> None:
    drawing, told = Drawing(), list[int]()
    told += [token for token, _ in drawing.take([1, 2, 3], [-1.0, -1.0, -1.0], None)]
    drawing.begin()
    told += [token for token, _ in drawing.take([1, 2], [-1.0, -1.0], None)]
    told += [token for token, _ in drawing.take([3, 4], [-1.0, -2.0], "eos")]
    assert told == [1, 2, 3, 4]
    assert (drawing.completion().token_ids, drawing.completion().logprobs) == ([1, 2, 3, 4], [-1.0, -1.0, -1.0, -2.0])


def test_a_redraw_that_contradicts_what_was_told_is_refused() -> None:
    drawing = Drawing()
    list(drawing.take([1, 2], [-1.0, -1.0], None))
    drawing.begin()
    with pytest.raises(WorkerDied, match="told"):
        list(drawing.take([1, 3], [-1.0, -1.0], "length"))
