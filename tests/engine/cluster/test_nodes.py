"""Ranks on a cluster of two machines, both played by this one: where they are placed, and what the loss of one does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from engine.cluster.rank_group import RankGroup
from engine.errors import EngineBusy, WorkerDied
from engine.specs.cluster import ClusterSpec
from tests.engine.cluster.helpers import a_group
from tests.fixtures.ray_nodes import ray_nodes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Two machines with a CPU each: a group of two ranks needs both."""
    with ray_nodes(cpus=1) as cluster:
        yield cluster


def machines(group: RankGroup) -> set[str]:
    """The Ray nodes of the ranks."""
    return set(group.call("ray_nodes"))


def retried(call: Callable[[], Any]) -> Any:
    """What the call returns once it does not raise WorkerDied, after ten tries at most."""
    for _ in range(9):
        with suppress(WorkerDied):
            return call()
    return call()


def test_the_loss_of_a_machine_ends_the_generation_and_another_machine_takes_its_place(nodes: Any) -> None:
    with a_group(cluster=ClusterSpec(address=nodes.address)) as group:
        assert len(machines(group)) == 2
        assert group.call("count", "before") == ("before", 2)
        lost = next(node for node in nodes.worker_nodes)
        nodes.remove_node(lost, allow_graceful=False)
        with pytest.raises(WorkerDied, match="rank [01] died"):
            while True:  # a call may still come through before the machine is gone
                group.call("count", "lost")
        nodes.add_node(num_cpus=1)
        # Ray notices the loss of the machine some seconds after that of its processes: a task tries again until then
        assert retried(lambda: group.call("count", "again")) == ("again", 2)  # ranks that have counted nothing yet
        assert len(machines(group)) == 2


def test_a_group_without_room_says_what_it_needs_and_who_has_it(nodes: Any) -> None:
    spec = ClusterSpec(address=nodes.address)
    with a_group(cluster=spec) as first:
        first.start()
        with a_group(cluster=spec, start_seconds=2.0) as second:
            needs = r"trainer ranks \(\d+\) needs 2 CPUs, and there are 0 CPUs free after 2 s; resources are held by "
            with pytest.raises(EngineBusy, match=needs + r"trainer ranks \(\d+\)"):
                second.start()
    with a_group(cluster=spec) as third:  # the first one gave its places back
        assert third.call("count", "now") == ("now", 2)
