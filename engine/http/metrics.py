"""Prometheus metrics of one server. Each server has its own registry."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from engine.protocol import ClusterInfo, Completion

SECONDS = (0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)
"""Buckets of the histogram of call times."""
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The metrics of /metrics. Labels are verbs, methods and statuses, but not runs, whose number is unbounded."""

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
        """Sets the gauges of the Ray cluster. They exist from the first connection to a cluster on."""
        if cluster is None:
            for gauge in self.cluster.values():
                gauge.set(0)
            return
        self._gauge("ostinato_cluster_nodes", "Machines of the Ray cluster.").set(cluster.nodes)
        self._gauge("ostinato_cluster_gpus", "GPUs of the Ray cluster.").set(cluster.gpus)
        self._gauge("ostinato_cluster_gpus_free", "GPUs that nothing holds.").set(cluster.free_gpus)
        for name, description, actors in (
            ("ranks", "Trainer ranks", cluster.ranks),
            ("replicas", "Replicas of vLLM", cluster.replicas),
        ):
            self._gauge(f"ostinato_{name}", f"{description} that the engine wants.").set(actors.wanted)
            self._gauge(f"ostinato_{name}_alive", f"{description} that are up.").set(actors.alive)
            self._gauge(f"ostinato_{name}_restarts", f"{description}: starts after the first.").set(actors.restarts)

    def _gauge(self, name: str, description: str) -> Gauge:
        if name not in self.cluster:
            self.cluster[name] = Gauge(name, description, registry=self.registry)
        return self.cluster[name]

    def count_call(self, verb: str, status: int, seconds: float) -> None:
        self.calls.labels(verb, str(status)).inc()
        self.seconds.labels(verb).observe(seconds)

    def count_tokens(self, completions: list[Completion]) -> None:
        self.tokens.inc(sum(len(completion.token_ids) for completion in completions))

    def render(self) -> bytes:
        return generate_latest(self.registry)
