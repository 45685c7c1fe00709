"""Two lanes change no result: with `max_staleness` of 1, a run whose engine samples while it trains ends with the bytes
of a run whose engine does one after the other, also after `kill -9` at the places where weights change lanes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_kill_nine import STEPS, Folder, make_folder

ONE_STEP_OFF: dict[str, Any] = {"rules__max_staleness": 1, "regularisation__importance_cap": 2.0}
TWO_LANES: dict[str, Any] = {**ONE_STEP_OFF, "engine__sampler": {"kind": "torch", "own_lane": True}}
KILLS = (
    "publish.staged:1", "publish.staged:3", "publish.loaded:2", "step.before_commit:2", "step.after_commit:2",
    "rollout.before_data:5",
)  # fmt: skip


@pytest.fixture(scope="module")
def one_lane(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, prefect_server: str) -> Folder:
    folder = make_folder(tmp_path_factory.mktemp("one-lane"), tiny_folder, prefect_server, **ONE_STEP_OFF)
    status, output = folder.run()
    assert status == 0, output
    assert len(set(folder.digests())) == STEPS
    return folder


def assert_same(folder: Folder, other: Folder) -> None:
    assert folder.states() == other.states()
    assert folder.digests() == other.digests()
    assert folder.weights() == other.weights()


@pytest.mark.slow
def test_two_lanes_end_with_the_same_bytes(
    tmp_path: Path, tiny_folder: Path, prefect_server: str, one_lane: Folder
) -> None:
    folder = make_folder(tmp_path, tiny_folder, prefect_server, **TWO_LANES)
    status, output = folder.run()
    assert status == 0, output
    assert_same(folder, one_lane)
    # The policies 0 to 2 were loaded once each. Restored were the trained policy and the reference of the KL term, and
    # none to be sampled.
    assert [event["step"] for event in folder.events("sync")] == list(range(STEPS - 1))
    assert [event["step"] for event in folder.events("restore")] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("place", KILLS)
def test_a_kill_between_the_lanes_changes_nothing(
    place: str, tmp_path: Path, tiny_folder: Path, prefect_server: str, one_lane: Folder
) -> None:
    folder = make_folder(tmp_path, tiny_folder, prefect_server, **TWO_LANES)
    status, output = folder.run(place)
    assert status == -signal.SIGKILL, f"{place} was not hit:\n{output}"
    status, output = folder.run()
    assert status == 0, output
    assert_same(folder, one_lane)
    assert len(folder.events("step")) <= STEPS + 1
