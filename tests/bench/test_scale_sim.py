"""Tests of the scale simulation: a small one from beginning to end, and the virtual store against its limits."""

from __future__ import annotations

from pathlib import Path

import pytest

import storage.store.tables
from bench.scale_sim import Size, simulate
from bench.scale_sim_engine import EngineModel
from bench.scale_sim_store import Clock, Meter, S3Model, SimulatedS3, VirtualRetry
from storage.errors import StorageUnavailable
from storage.store.objects import ObjectStore
from storage.store.tables import RecentTables

ENGINE = EngineModel(new_tokens=4, nominal_tokens=4)


def simulated(folder: Path, **model: float) -> tuple[SimulatedS3, Clock, Meter]:
    clock, meter = Clock(), Meter()
    s3 = S3Model(p50_seconds=0.01, p99_seconds=0.010001, **model)  # type: ignore[arg-type]
    return SimulatedS3(folder, s3, clock=clock, meter=meter, seed=0, bytes_scale={}), clock, meter


def test_a_partition_takes_so_many_requests_a_second(tmp_path: Path) -> None:
    backend, clock, meter = simulated(tmp_path / "s", reads_per_second=3)
    backend.quiet = True
    backend.put("a/x", b"1")
    backend.put("b/x", b"1")
    backend.quiet = False
    for _ in range(3):
        backend.get("a/x")
    with pytest.raises(StorageUnavailable, match="SlowDown"):
        backend.get("a/x")
    backend.get("b/x")  # another partition
    assert (meter.throttled, meter.requests["a", "GET"], meter.requests["b", "GET"]) == (1, 3, 1)
    clock.advance(1.0)
    assert backend.get("a/x") == b"1"


def test_who_is_throttled_waits_as_the_store_retries(tmp_path: Path) -> None:
    backend, clock, meter = simulated(tmp_path / "s", reads_per_second=1)
    store = ObjectStore(backend, retry=VirtualRetry(clock, meter))
    store.put("a/x", b"1")
    for _ in range(4):
        store.get("a/x")
    assert clock.now > 3.0 and meter.throttled > 3 and 0 < meter.backoff_seconds < clock.now


def test_seconds_of_a_transfer(tmp_path: Path) -> None:
    backend, clock, _ = simulated(tmp_path / "s", bytes_per_second=1000.0)
    backend.put("a/x", b"x" * 500)
    assert clock.now == pytest.approx(0.51, abs=1e-3)


def test_a_small_run_adds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the tables are read, as with workers in processes of their own
    monkeypatch.setattr(storage.store.tables, "RECENT", RecentTables(max_bytes=0))
    size = Size(steps=2, prompts=12, completions=4, per_shard=4, workers=2, real_every=2, rows=20)
    shown: list[str] = []
    reports = simulate(size, S3Model(), ENGINE, folder=tmp_path / "store", show=shown.append, processes=False)
    assert [report.rows for report in reports] == [48, 48] and len(shown) == 2
    for report in reports:
        assert (len(report.workers.rollouts), len(report.workers.graded), report.workers.real_shards) == (3, 3, 2)
        # of each shard: data and manifest of its rollouts and of its grades
        assert report.workers.meter.requests["runs", "PUT"] == 3 * 4
        # the batch and its manifest; each shard of both kinds is a manifest and a file; its own absence is one look
        batch = next(phase for phase in report.phases if phase.name == "batch")
        assert (batch.meter.requests["runs", "PUT"], batch.meter.requests["runs", "GET"]) == (2, 1 + 6 * 2)
        assert report.workers.task_retries == report.workers.tasks_failed == 0
