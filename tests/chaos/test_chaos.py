"""Tests of ten seeds of mixed faults over whole runs (`make chaos`). The same seed gives the same schedule.

Under `deterministic` a run ends at the bytes of the run without faults, also where two take turns in the room for one.
Without it (two runs on one engine, whose generations are drawn together) the chains verify. Either way every prompt is
accounted for once, nothing is torn, and nothing lies about that garbage collection would not take.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.campaign import MODES, Stage, kinds_of, print_life, schedule_of, stage
from tests.chaos.faults import KINDS, Deck, Fault, draw_schedule
from tests.chaos.outcome import problems
from tests.chaos.world import G1_FILE, G2_FILE, G2_S3, NOISY, Mode, World

SEEDS = 10


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("chaos"), s3=True) as ready:
        yield ready


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_nothing_is_lost_whatever_dies(seed: int, shared: Stage) -> None:
    mode = MODES[seed % len(MODES)]
    schedule = schedule_of(seed, mode, Deck(seed, kinds_of(mode)))
    print("\n".join(map(str, schedule)))
    life = shared.live(seed, mode, schedule)
    print_life(life, 1)
    assert not life.problems, "\n".join(life.problems)
    assert life.happenings


@pytest.mark.slow
@pytest.mark.parametrize("seed", [200, 201])
def test_on_a_device_that_does_not_repeat_every_redo_is_a_proven_rebase(seed: int, shared: Stage) -> None:
    life = shared.live(seed, NOISY, schedule_of(seed, NOISY, Deck(seed, kinds_of(NOISY))))
    print_life(life, 1)
    assert not life.problems, "\n".join(life.problems)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zombie worker", "zombie engine", "second worker"])
@pytest.mark.parametrize("mode", [G2_FILE, G1_FILE], ids=["deterministic", "coalesced"])
def test_who_was_replaced_changes_nothing(kind: str, mode: Mode, shared: Stage) -> None:
    number = 100 + 10 * list(KINDS).index(kind) + mode.runs
    life = shared.live(number, mode, [Fault(kind, step=1, offset=0.1, seconds=0)])
    print_life(life, 1)
    assert not life.problems, "\n".join(life.problems)
    assert [happening.fault.kind for happening in life.happenings] == [kind]


@pytest.mark.slow
def test_a_broken_promise_is_seen(shared: Stage) -> None:
    """The suite can fail: a lost record, a torn artifact and other weights are each found."""
    with World(
        shared.folder / "broken", G2_FILE, tiny_folder=shared.tiny_folder, prefect=shared.prefect, s3=None
    ) as world:
        world.live([])
        assert problems(world, shared.reference(world.mode)) == []
    data = shared.folder / "broken" / "data"
    (weights,) = data.glob("models/toy-0/*/model.safetensors")
    (record,) = data.glob("runs/chaos-0/stages/0-grpo/chains/policy/*3.json")
    for path in (weights, record):
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert problems(world, shared.reference(world.mode))
        path.write_bytes(whole)
    record.unlink()
    assert any("steps" in problem for problem in problems(world, None))
    (data / "runs" / "chaos-0" / "result.json").unlink()
    assert any("no result" in problem for problem in problems(world, None))


def test_a_seed_is_a_schedule(tmp_path: Path) -> None:
    def drawn(seed: int) -> list[Fault]:
        deck = Deck(seed, kinds_of(G2_S3))
        faults: list[Fault] = []
        for number in range(5):
            faults += draw_schedule(seed + number, faults=5, steps=6, runs=1, step_seconds=1.0, deck=deck)
        return faults

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)
    assert {fault.kind for fault in drawn(3)} == set(KINDS)  # each kind comes once before one comes twice
    assert {fault.step for fault in drawn(3)} >= {-1, 0, 6}
