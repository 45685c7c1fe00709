"""Prometheus metrics of one server, in a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from engine.protocol import ClusterInfo, Completion

SECONDS = (0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """What /metrics shows. Labels are verbs and statuses only: runs would be without bound."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.calls = Counter("ostinato_calls", "Finished calls.", ["verb", "status"], registry=registry)
        self.seconds = Histogram(
            "ostinato_call_seconds", "From acceptance to result.", ["verb"], buckets=SECONDS, registry=registry
        )
        self.requests = Counter("ostinato_http_requests", "HTTP answers.", ["method", "status"], registry=registry)
        self.waiting = Gauge("ostinato_calls_waiting", "Calls that are not finished.", registry=registry)
        self.tokens = Counter("ostinato_generated_tokens", "Tokens sampled.", registry=registry)
        self.steps = Counter(
            "ostinato_gradient_steps", "Calls of take_gradient_step that ended with a record.", registry=registry
        )
        self.memory_used = Gauge(
            "ostinato_memory_used_bytes", "Weights, moments and gradients held by the engine.", registry=registry
        )
        self.memory = Gauge("ostinato_memory_bytes", "What the engine may fill with them.", registry=registry)
        self.cluster: dict[str, Gauge] = {}

    def show_cluster(self, cluster: ClusterInfo | None) -> None:
        """The gauges of the Ray cluster. They are there from the first connection on."""
        if cluster is None:
            for gauge in self.cluster.values():
                gauge.set(0)
            return
        self._gauge("ostinato_cluster_nodes", "Machines of the Ray cluster.").set(cluster.nodes)
        self._gauge("ostinato_cluster_gpus", "GPUs of the Ray cluster.").set(cluster.gpus)
        self._gauge("ostinato_cluster_gpus_free", "GPUs that nothing holds.").set(cluster.free_gpus)
        for name, what, actors in (
            ("ranks", "Trainer ranks", cluster.ranks),
            ("replicas", "Replicas of vLLM", cluster.replicas),
        ):
            self._gauge(f"ostinato_{name}", f"{what} that the engine wants.").set(actors.wanted)
            self._gauge(f"ostinato_{name}_alive", f"{what} that are up.").set(actors.alive)
            self._gauge(f"ostinato_{name}_restarts", f"{what}: starts after the first.").set(actors.restarts)

    def _gauge(self, name: str, what: str) -> Gauge:
        if name not in self.cluster:
            self.cluster[name] = Gauge(name, what, registry=self.registry)
        return self.cluster[name]

    def finished(self, verb: str, status: int, seconds: float) -> None:
        self.calls.labels(verb, str(status)).inc()
        self.seconds.labels(verb).observe(seconds)

    def generated(self, completions: list[Completion]) -> None:
        self.tokens.inc(sum(len(completion.token_ids) for completion in completions))

    def render(self) -> bytes:
        return generate_latest(self.registry)
