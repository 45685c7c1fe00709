"""A restart reads the metrics that a logger does not have yet, and reads several of them at the same time."""

from __future__ import annotations

import threading
from pathlib import Path

from storage.chain.records import PolicyRef
from storage.store import keys
from storage.store.objects import ObjectStore, open_store
from tasks.loggers.base import SentLog
from tasks.loggers.stage_loggers import Loggers
from tasks.reports.metrics import StepMetrics
from tasks.reports.step_metrics import read_metrics, write_metrics

POLICY = PolicyRef(run="r", stage="0-sft", model="policy", step=40, state="s")


class Sink:
    """Keeps the steps that it gets."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log(self, step: int, figures: object) -> None:
        self.steps.append(step)


class Counted(ObjectStore):
    """Notes the keys that are read, and lets the first reads wait until several are in progress."""

    def __init__(self, store: ObjectStore, at_once: int = 1) -> None:
        super().__init__(store.backend)
        self.read: list[str] = []
        self._together = threading.Barrier(at_once)
        self._waiting = at_once

    def get(self, key: str) -> bytes:
        self.read.append(key)
        if len(self.read) <= self._waiting:
            self._together.wait(timeout=60)
        return super().get(key)


def filled(folder: Path) -> ObjectStore:
    """A store with the metrics of all steps but the fourth."""
    store = open_store(folder / "store")
    for step in range(POLICY.step):
        if step != 3:
            write_metrics(store, POLICY, StepMetrics(step=step, loss=1.0, grad_norm=1.0, learning_rate=1.0))
    return store


def test_only_the_steps_that_were_not_sent_are_read(tmp_path: Path) -> None:
    store = Counted(filled(tmp_path))
    sent = SentLog(store, "r", "0-sft", "wandb")
    sent.mark_step(37)
    store.read.clear()
    loggers, sink = Loggers.__new__(Loggers), Sink()
    loggers._stage = "0-sft"
    loggers._send_stored(store, POLICY, sink, sent)  # type: ignore[arg-type]
    assert sink.steps == [38, 39, 40]
    assert sorted(store.read) == [keys.step_metrics("r", "0-sft", step) for step in (37, 38, 39)]


def test_several_steps_are_read_at_the_same_time(tmp_path: Path) -> None:
    store = Counted(filled(tmp_path), at_once=8)
    metrics = read_metrics(store, "r", "0-sft", steps=POLICY.step)
    assert [step.step for step in metrics] == [step for step in range(40) if step != 3]
