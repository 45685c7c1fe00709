"""The connection to Ray. An address at which no cluster listens is refused at once, before Ray itself tries it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from pydantic import ValidationError

from engine.backends import factory
from engine.cluster import connection
from engine.cluster.connection import connect, hold_connection
from engine.errors import EngineUnreachable
from engine.specs.engine import ClusterSpec, DeepSpeedSpec, LocalEngineSpec, VllmSpec


@pytest.fixture
def dead_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hides clusters that run on this machine, and their tokens."""
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_address_without_a_cluster_is_named_in_the_error(host: str, dead_port: int) -> None:
    with pytest.raises(EngineUnreachable, match=f"no Ray cluster answers at {host}:{dead_port}.*RAY_AUTH_TOKEN"):
        connect(ClusterSpec(address=f"{host}:{dead_port}"))


def test_auto_takes_the_address_of_the_environment(dead_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{dead_port}")
    with pytest.raises(EngineUnreachable, match="no Ray cluster answers at auto"):
        connect(ClusterSpec(address="auto"))


def test_auto_takes_the_cluster_that_was_started_last(dead_port: int, tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{dead_port}")
    with pytest.raises(EngineUnreachable, match="ConnectionRefusedError"):
        connect(ClusterSpec(address="auto"))


@pytest.mark.parametrize("address", ["head:6379", "10.0.0.1:6379", "[::1]:6379", "auto"])
def test_addresses_of_head_nodes(address: str) -> None:
    assert ClusterSpec(address=address).address == address


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "http://head:6379", ":6379", "local", ""])
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValidationError, match="give HOST:PORT of its head node"):
        ClusterSpec(address=address)


@pytest.mark.parametrize("replicas", [0, 2])
def test_backends_connect_at_their_first_use_and_not_before(replicas: int) -> None:
    spec = LocalEngineSpec(trainer=DeepSpeedSpec(ranks=2), sampler=VllmSpec(replicas=replicas), device="cpu")
    trainers = factory.create_trainer_backend(spec)
    samplers = factory.create_sampler_backend(spec, trainers)
    try:
        with hold_connection() as connected:
            assert not connected
    finally:
        samplers.close()
        trainers.close()


def test_a_ray_that_cannot_be_used_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(spec: ClusterSpec) -> None:
        raise OSError(28, "No space left on device")

    calls: list[str] = []
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "init", lambda **_: calls.append("init"))
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    monkeypatch.setattr(connection, "_opened_cluster", fail)
    with pytest.raises(EngineUnreachable, match="cannot use it: OSError: .*No space left on device. Free disk space"):
        connect(ClusterSpec())
    assert calls == ["init", "shutdown"] and connection._current is None
