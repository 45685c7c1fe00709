"""The faults: the kind, the duration and the time of each. A schedule is drawn from a seed and printed with it.

Each kind is a generator over a world: it breaks something, yields for how many seconds (or until what) it stays so,
and mends it. What died stays dead: the world's supervisor brings it back, as systemd, Kubernetes or Prefect would.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.chaos.proxy import Message, Proxy

if TYPE_CHECKING:
    from tests.chaos.world import World

OPENING_SECONDS = 6.0
"""About how long engine and worker take to start and to open a run."""
Pause = float | Callable[[], bool]
"""Seconds, or a condition to wait for."""


@dataclass(frozen=True)
class Fault:
    """One thing that will go wrong."""

    kind: str
    step: int
    """It happens once this step is made; 0: once the loop has started; -1: while the run is opened."""
    offset: float
    """Seconds after that."""
    seconds: float
    """How long it lasts, for kinds that last."""
    run: int = 0
    """Which of the world's runs, for faults of workers."""

    def __str__(self) -> str:
        when = f"{self.offset:.2f} s after the start" if self.step < 0 else f"at step {self.step} + {self.offset:.2f} s"
        return f"{self.kind} {when}" + (f" for {self.seconds:.1f} s" if self.kind in LASTING else "")


# -- the worker ------------------------------------------------------------------------------------------------


def kill_worker(world: World, fault: Fault) -> Iterator[Pause]:
    world.workers[fault.run].signal(signal.SIGKILL)
    yield 0.0


def term_worker(world: World, fault: Fault) -> Iterator[Pause]:
    worker = world.workers[fault.run]
    worker.signal(signal.SIGTERM)
    yield lambda: not worker.alive


def freeze_worker(world: World, fault: Fault) -> Iterator[Pause]:
    worker = world.workers[fault.run]
    worker.signal(signal.SIGSTOP)
    yield fault.seconds
    worker.signal(signal.SIGCONT)


def zombie_worker(world: World, fault: Fault) -> Iterator[Pause]:
    """Frozen for so long that a successor takes over and moves on; then it wakes, and must end by Fenced."""
    zombie = world.workers[fault.run]
    zombie.signal(signal.SIGSTOP)
    world.zombies.append(zombie)
    world.start_worker(fault.run)
    yield world.moved_on(fault.run)
    zombie.signal(signal.SIGCONT)
    yield lambda: not zombie.alive


def second_worker(world: World, fault: Fault) -> Iterator[Pause]:
    """Another worker is given the same run by mistake. The newer lease wins; the older worker ends by Fenced."""
    first = world.workers[fault.run]
    world.zombies.append(first)
    world.start_worker(fault.run)
    yield lambda: not first.alive


# -- the engine ------------------------------------------------------------------------------------------------


def kill_engine(world: World, fault: Fault) -> Iterator[Pause]:
    world.engine.signal(signal.SIGKILL)
    yield 0.0


def term_engine(world: World, fault: Fault) -> Iterator[Pause]:
    engine = world.engine
    engine.signal(signal.SIGTERM)
    yield lambda: not engine.alive


def freeze_engine(world: World, fault: Fault) -> Iterator[Pause]:
    engine = world.engine
    engine.signal(signal.SIGSTOP)
    yield fault.seconds
    engine.signal(signal.SIGCONT)


def zombie_engine(world: World, fault: Fault) -> Iterator[Pause]:
    """Frozen until it has been replaced. Then it wakes in the middle of its call, while its successor works."""
    zombie = world.engine
    zombie.signal(signal.SIGSTOP)
    world.start_engine()
    yield world.moved_on(fault.run)
    zombie.signal(signal.SIGCONT)
    yield 2.0
    zombie.signal(signal.SIGTERM)
    yield lambda: not zombie.alive


# -- the S3 server ---------------------------------------------------------------------------------------------


def kill_s3(world: World, fault: Fault) -> Iterator[Pause]:
    assert world.s3 is not None
    world.s3.child.signal(signal.SIGKILL)
    yield 0.0


def freeze_s3(world: World, fault: Fault) -> Iterator[Pause]:
    assert world.s3 is not None
    child = world.s3.child
    child.signal(signal.SIGSTOP)
    yield fault.seconds
    child.signal(signal.SIGCONT)


def _answers(status: int) -> Callable[[World, Fault], Iterator[Pause]]:
    def burst(world: World, fault: Fault) -> Iterator[Pause]:
        for proxy in world.s3_lines:
            proxy.line.status = status
        yield fault.seconds
        for proxy in world.s3_lines:
            proxy.line.status = None

    return burst


# -- the lines -------------------------------------------------------------------------------------------------


def _cut(lines: Callable[[World], list[Proxy]]) -> Callable[[World, Fault], Iterator[Pause]]:
    def cut(world: World, fault: Fault) -> Iterator[Pause]:
        """Every connection is reset, and new ones are refused for a while."""
        for proxy in lines(world):
            proxy.line.refuse = True
            proxy.cut()
        yield fault.seconds
        for proxy in lines(world):
            proxy.line.refuse = False

    return cut


def _freeze(lines: Callable[[World], list[Proxy]]) -> Callable[[World, Fault], Iterator[Pause]]:
    def freeze(world: World, fault: Fault) -> Iterator[Pause]:
        """No byte moves and no error is reported. Later the connections turn out to be dead."""
        for proxy in lines(world):
            proxy.line.frozen = True
        yield fault.seconds
        for proxy in lines(world):
            proxy.cut()
            proxy.line.frozen = False

    return freeze


def _delay(lines: Callable[[World], list[Proxy]], seconds: float) -> Callable[[World, Fault], Iterator[Pause]]:
    def delay(world: World, fault: Fault) -> Iterator[Pause]:
        for proxy in lines(world):
            proxy.line.delay_seconds = seconds
        yield fault.seconds
        for proxy in lines(world):
            proxy.line.delay_seconds = 0.0

    return delay


def _lose(
    lines: Callable[[World], list[Proxy]], losable: Callable[[Message], bool]
) -> Callable[[World, Fault], Iterator[Pause]]:
    def lose(world: World, fault: Fault) -> Iterator[Pause]:
        """The next acknowledgements are lost: what was asked for happened, and the caller cannot know."""
        for proxy in lines(world):
            proxy.line.losable = losable
            proxy.line.lose_answers = 2
        yield lambda: world.over or any(proxy.line.lose_answers == 0 for proxy in lines(world))
        for proxy in lines(world):
            proxy.line.lose_answers = 0

    return lose


def _is_post(request: Message) -> bool:
    return request.first[0] == "POST" or "/v1/calls/" in request.first[1]


def _is_write(request: Message) -> bool:
    """A PUT of an object, not of the store's own probes."""
    return request.first[0] == "PUT" and "~" not in request.first[1] and "%7E" not in request.first[1]


def _engine_line(world: World) -> list[Proxy]:
    return [world.engine_line]


def _prefect_line(world: World) -> list[Proxy]:
    return [world.prefect_line]


def _s3_of_engine(world: World) -> list[Proxy]:
    return world.s3_lines[:1]


def _s3_of_workers(world: World) -> list[Proxy]:
    return world.s3_lines[1:]


KINDS: dict[str, Callable[[World, Fault], Iterator[Pause]]] = {
    "kill -9 worker": kill_worker,
    "SIGTERM worker": term_worker,
    "freeze worker": freeze_worker,
    "zombie worker": zombie_worker,
    "second worker": second_worker,
    "kill -9 engine": kill_engine,
    "SIGTERM engine": term_engine,
    "freeze engine": freeze_engine,
    "zombie engine": zombie_engine,
    "cut worker-engine": _cut(_engine_line),
    "freeze worker-engine": _freeze(_engine_line),
    "delay worker-engine": _delay(_engine_line, 0.3),
    "lose ack worker-engine": _lose(_engine_line, _is_post),
    "cut worker-Prefect": _cut(_prefect_line),
    "kill -9 S3": kill_s3,
    "freeze S3": freeze_s3,
    "503 burst S3": _answers(503),
    "500 burst S3": _answers(500),
    "cut engine-S3": _cut(_s3_of_engine),
    "cut workers-S3": _cut(_s3_of_workers),
    "delay S3": _delay(lambda world: world.s3_lines, 0.1),
    "lose ack engine-S3": _lose(_s3_of_engine, _is_write),
    "lose ack workers-S3": _lose(_s3_of_workers, _is_write),
}
OF_S3 = frozenset(kind for kind in KINDS if "S3" in kind)
LASTING = frozenset(
    kind for kind in KINDS if kind.split()[0] in ("freeze", "503", "500", "cut", "delay")
)
OF_WORKER = frozenset({"kill -9 worker", "SIGTERM worker", "freeze worker", "zombie worker", "second worker"})
OF_ENGINE = frozenset({"kill -9 engine", "SIGTERM engine", "freeze engine", "zombie engine"})


class Deck:
    """Kinds in a seeded order that takes each as often as any other."""

    def __init__(self, seed: int, kinds: list[str]) -> None:
        self._random, self._kinds, self._left = random.Random(seed), kinds, list[str]()

    def take(self) -> str:
        if not self._left:
            self._left = self._random.sample(self._kinds, len(self._kinds))
        return self._left.pop()


def draw_schedule(
    seed: int, *, faults: int, steps: int, runs: int, step_seconds: float, deck: Deck
) -> list[Fault]:
    """Faults by moment. Opening and publishing are hit too: they are part of a run."""
    generator = random.Random(f"schedule-{seed}")
    drawn = []
    for _ in range(faults):
        step = generator.randint(-1, steps)
        drawn.append(
            Fault(
                kind=deck.take(),
                step=step,
                offset=round(generator.uniform(0, step_seconds if step >= 0 else OPENING_SECONDS), 3),
                seconds=round(generator.choice((0.3, 1.5, 1.5, 5.5)), 1),
                run=generator.randrange(runs),
            )
        )
    return sorted(drawn, key=lambda fault: (fault.step, fault.offset))
