"""Placement of ranks on two machines, and the loss of a machine. Two Ray nodes on this machine simulate them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from engine.cluster.rank_group import RankGroup
from engine.errors import EngineBusy, WorkerDied
from engine.specs.engine import ClusterSpec
from tests.engine.cluster.helpers import rank_group
from tests.fixtures.ray_nodes import ray_nodes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Two machines with a CPU each: a group of two ranks needs both."""
    with ray_nodes(cpus=1) as cluster:
        yield cluster


def node_ids(group: RankGroup) -> set[str]:
    """The Ray nodes of the ranks."""
    return set(group.call("ray_nodes"))


def call_with_retries(call: Callable[[], Any]) -> Any:
    """Repeats the call while it raises WorkerDied, ten times at most."""
    for _ in range(9):
        with suppress(WorkerDied):
            return call()
    return call()


def test_after_the_loss_of_a_machine_the_group_runs_on_another(nodes: Any) -> None:
    with rank_group(cluster=ClusterSpec(address=nodes.address)) as group:
        assert len(node_ids(group)) == 2
        assert group.call("count", "before") == ("before", 2)
        lost_node = next(node for node in nodes.worker_nodes)
        nodes.remove_node(lost_node, allow_graceful=False)
        with pytest.raises(WorkerDied, match="rank [01] died"):
            while True:  # a call may still succeed before the machine is gone
                group.call("count", "lost")
        nodes.add_node(num_cpus=1)
        # Ray notices the loss of the machine a few seconds after the loss of its processes; a task retries until then
        assert call_with_retries(lambda: group.call("count", "again")) == ("again", 2)  # new ranks
        assert len(node_ids(group)) == 2


def test_the_error_of_a_group_without_room_names_the_holders(nodes: Any) -> None:
    spec = ClusterSpec(address=nodes.address)
    with rank_group(cluster=spec) as first:
        first.start()
        with rank_group(cluster=spec, start_seconds=2.0) as second:
            message = r"trainer ranks \(\d+\) needs 2 CPUs, and there are 0 CPUs free after 2 s; resources are held by "
            with pytest.raises(EngineBusy, match=message + r"trainer ranks \(\d+\)"):
                second.start()
    with rank_group(cluster=spec) as third:  # the first group freed its resources
        assert third.call("count", "now") == ("now", 2)
