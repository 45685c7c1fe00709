"""A step, a checkpoint and the end of a run make no call to the store in the event loop, which other work shares."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flows.training.finish as finish
import flows.training.step_reporter as step_reporter
from flows.configs.common import CheckpointConfig
from flows.training.checkpointing import CheckpointSchedule, CheckpointWriter, Due
from storage.chain.records import Chain, CommitRecord, Numerics, OptimizerSpec, PolicyRef, Root, StepRequest
from storage.chain.retention import Retention
from storage.store import keys
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore, open_store
from tasks.reports.advice import Advisor
from tasks.reports.metrics import StepMetrics
from tasks.task_runs import work_of
from tasks.train import save_checkpoint

VERBS = ("get", "open", "exists", "list", "folder", "put", "put_file", "put_if_absent", "delete", "fetch", "now")


class GuardedStore(ObjectStore):
    """Refuses calls in a thread whose event loop is running, and counts the others."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store.backend)
        self.calls = 0
        for verb in VERBS:
            setattr(self, verb, self._guarded(verb, getattr(self, verb)))

    def _guarded(self, verb: str, call: Any) -> Any:
        def guarded(*arguments: Any, **named: Any) -> Any:
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                self.calls += 1
                return call(*arguments, **named)
            raise AssertionError(f"{verb} {arguments[:1]} was called in the event loop")

        return guarded


@pytest.fixture
def store(tmp_path: Path) -> GuardedStore:
    """A store with a chain of one step."""
    store = open_store(tmp_path / "store")
    chain = Chain(store, "r", "0-sft", "policy")
    chain.create_root(Root(base_digest="b"))
    batch = ArtifactRef(kind="batch", key="b", sha256="0", bytes=1, rows=1, parents=())
    request = StepRequest(parent=chain.policy(0), batch=batch, loss={}, optimizer=OptimizerSpec(lr=1.0))
    numerics = Numerics(backend="b", device="cpu", compute_dtype="float32", threads=1, max_tokens=1)
    chain.commit(CommitRecord(
        request=request, state=request.next_state(), updates=1, numerics=numerics, weights_digest="0"
    ))
    return GuardedStore(store)


@pytest.fixture
def policy(store: GuardedStore) -> PolicyRef:
    return Chain(store, "r", "0-sft", "policy").head()


class Engine:
    async def save_checkpoint(self, policy: PolicyRef, **_: Any) -> None:
        """There is nothing to save."""


def workspace_of(store: ObjectStore) -> Any:
    return SimpleNamespace(open_store=lambda: store, connect=Engine, provenance=None, epoch=1, run="r", engine=None)


async def test_a_checkpoint_and_its_name(store: GuardedStore, policy: PolicyRef) -> None:
    writer = CheckpointWriter(workspace_of(store), CheckpointSchedule())
    await writer.write([policy], Due("policy-0.5", name_only=True))
    before = store.calls
    await work_of(save_checkpoint)(workspace_of(store), policy, retention=Retention(finished=True))
    assert store.calls > before


async def test_the_metrics_of_a_step(
    store: GuardedStore, policy: PolicyRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = StepMetrics(step=0, loss=1.0, grad_norm=1.0, learning_rate=1.0)
    monkeypatch.setattr(step_reporter, "measure_step", lambda store, *_, **__: store.exists("a") or metrics)
    reporter: Any = step_reporter.StepReporter.__new__(step_reporter.StepReporter)
    ignored = SimpleNamespace(
        step=lambda *_, **__: None, add_step=lambda *_, **__: None, stepped=lambda _: None, lap=dict
    )
    reporter.store, reporter.chain, reporter.total_steps, reporter.parts = store, Chain.of(store, policy), 1, ()
    reporter.logger = reporter.page = reporter.loggers = reporter.watch = reporter.clock = ignored
    reporter.advisor = Advisor()
    reporter.time_left, reporter.notifier, reporter._resumed = step_reporter.TimeLeft(1, {}), None, False
    record = await reporter.record(policy)
    assert record.policy == policy
    assert await asyncio.to_thread(store.exists, keys.step_metrics("r", "0-sft", 0))


async def test_the_end_of_a_run(store: GuardedStore, policy: PolicyRef, monkeypatch: pytest.MonkeyPatch) -> None:
    async def shown(*_: Any, **__: Any) -> None:
        """There is no page."""

    monkeypatch.setattr(finish, "show_finished_run", shown)
    monkeypatch.setattr(finish, "has_learnt", lambda store, policy: store.exists("a"))
    monkeypatch.setattr(finish, "write_report", lambda workspace, *_, **__: str(workspace.open_store().exists("a")))
    config = SimpleNamespace(checkpoints=CheckpointConfig())
    session: Any = SimpleNamespace(workspace=workspace_of(store), run="r", config=config)
    model: Any = SimpleNamespace(publish_unchanged=False)
    result = await finish.publish_and_report(session, SimpleNamespace(note=lambda _: None), model, policy)  # type: ignore[arg-type]
    assert result["report"] == "False"
    assert await asyncio.to_thread(store.exists, keys.result_json("r"))
