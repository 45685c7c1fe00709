"""The gauges of /metrics that tell of a Ray cluster."""

from __future__ import annotations

from engine.http.service import Metrics
from engine.protocol import ActorCount, ClusterInfo


def gauges(metrics: Metrics) -> dict[str, float]:
    lines = [line for line in metrics.render().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_an_engine_without_ray_has_no_gauges_of_a_cluster() -> None:
    metrics = Metrics()
    metrics.show_cluster(None)
    assert not [name for name in gauges(metrics) if "cluster" in name or "ranks" in name or "replicas" in name]


def test_a_cluster_is_shown_with_who_is_alive_and_started_again() -> None:
    metrics = Metrics()
    info = ClusterInfo(
        nodes=2, gpus=16, free_gpus=3, ranks=ActorCount(wanted=8, alive=8, restarts=1),
        replicas=ActorCount(wanted=5, alive=4, restarts=2),
    )  # fmt: skip
    metrics.show_cluster(info)
    expected = {
        "ostinato_cluster_nodes": 2, "ostinato_cluster_gpus": 16, "ostinato_cluster_gpus_free": 3,
        "ostinato_ranks": 8, "ostinato_ranks_alive": 8, "ostinato_ranks_restarts": 1,
        "ostinato_replicas": 5, "ostinato_replicas_alive": 4, "ostinato_replicas_restarts": 2,
    }  # fmt: skip
    assert gauges(metrics).items() >= expected.items()
    metrics.show_cluster(None)  # the connection was closed
    assert gauges(metrics)["ostinato_cluster_nodes"] == gauges(metrics)["ostinato_ranks_alive"] == 0
