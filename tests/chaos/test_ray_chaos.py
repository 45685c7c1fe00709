"""Tests of faults of a Ray cluster during whole runs: actors that die or hang, a lost node, and a lost head.

The run goes on by itself (after the head was lost: when the cluster and the engine are started again), makes each step
once, and verifies.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from tests.chaos.campaign import Stage, print_life, stage
from tests.chaos.faults import Fault
from tests.chaos.world import RANKS, REPLICAS, Mode

ON_RANKS = [["kill -9 rank", "freeze rank", "lose node"], ["lose head", "kill -9 rank"]]
ON_REPLICAS = [["kill -9 replica", "freeze replica", "lose node"], ["lose head", "kill -9 replica"]]
_numbers = count()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("chaos"), s3=False) as ready:
        yield ready


@pytest.mark.parametrize(
    ("mode", "kinds"),
    [
        *(pytest.param(RANKS, kinds, marks=pytest.mark.slow) for kinds in ON_RANKS),
        *(pytest.param(REPLICAS, kinds, marks=[pytest.mark.slow, pytest.mark.vllm]) for kinds in ON_REPLICAS),
    ],
)
def test_a_run_on_a_ray_cluster_goes_on_whatever_is_lost(
    mode: Mode, kinds: list[str], shared: Stage
) -> None:
    schedule = [Fault(kind, step=2 * number + 1, offset=0.3, seconds=0) for number, kind in enumerate(kinds)]
    life = shared.live(next(_numbers), mode, schedule)
    print_life(life, 1)
    assert not life.problems, "\n".join(life.problems)
    assert [happening.fault.kind for happening in life.happenings] == kinds
