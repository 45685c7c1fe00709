"""Tests that a task may run twice, also at the same time, with one artifact as its result; and of what is retried."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import StepConflict, WorkerDied
from storage.chain.records import Chain
from storage.chain.run_record import create_or_check_run
from storage.errors import StorageUnavailable
from storage.store import keys
from tasks.evaluation.heldout import evaluate_policy
from tasks.load import load_prompts
from tasks.report import write_report
from tasks.sampling.completions import generate_rollouts
from tasks.task_runs import DURABLE, durable_task
from tasks.train import publish_model, save_checkpoint, take_gradient_step
from tests.fixtures.runs.batch_workspace import STAGE
from tests.fixtures.runs.task_calls import SAMPLING, TaskCalls, three_times
from tests.fixtures.worklog import events

pytestmark = pytest.mark.usefixtures("prefect_server")


async def test_generate_rollouts(calls: TaskCalls, worklog: Path) -> None:
    ref = await three_times(calls.rollouts)
    assert ref.rows == 8 and ref.key == keys.step_artifact("twice", STAGE, 0, "rollouts", 0)
    assert calls.manifests("runs/twice/", "rollouts") == [keys.manifest(ref.key)]
    assert len(calls.data("runs/twice/stages/0-grpo/steps/000000/rollouts/", ".parquet")) == 1
    # Two calls at once may both sample. After the commit no call samples.
    drawn = len(events(worklog, "generate"))
    assert drawn in (1, 2)
    await calls.rollouts()
    assert len(events(worklog, "generate")) == drawn


async def test_grade_rollouts(calls: TaskCalls, worklog: Path) -> None:
    rollouts = await calls.rollouts()
    ref = await three_times(lambda: calls.graded(rollouts))
    assert ref.rows == 8 and ref.parents == (rollouts.uri,)
    assert calls.manifests("runs/twice/", "graded") == [keys.manifest(ref.key)]
    graded = len(events(worklog, "grade"))
    await calls.graded(rollouts)
    assert len(events(worklog, "grade")) == graded <= 2


async def test_prepare_batch(calls: TaskCalls) -> None:
    rollouts = await calls.rollouts()
    graded = await calls.graded(rollouts)
    ref = await three_times(lambda: calls.batch_of(rollouts, graded))
    assert ref.rows == 8 and set(ref.parents) == {calls.policy.uri, rollouts.uri, graded.uri}
    assert calls.manifests("runs/twice/", "batch") == [keys.manifest(ref.key)]


async def test_take_gradient_step(calls: TaskCalls, worklog: Path) -> None:
    request = calls.request(await calls.batch())
    policy = await three_times(lambda: take_gradient_step(calls.workspace, request, step=0))
    assert policy == request.result() and policy.step == 1
    assert list(Chain.of(calls.store, policy).steps()) == [1]
    assert len(events(worklog, "step")) == 1


async def test_take_gradient_step_in_two_engines_at_once(calls: TaskCalls, worklog: Path) -> None:
    """Two machines: each its own engine and weights, one store."""
    from engine.local.engine import LocalEngine

    request = calls.request(await calls.batch())
    engines = [LocalEngine(calls.workspace.store, calls.workspace.engine) for _ in range(2)]
    first, second = await asyncio.gather(*(engine.take_gradient_step(request) for engine in engines))
    assert first == second  # the whole record, the attempt and the time in it too: one was committed
    assert list(Chain.of(calls.store, calls.policy).steps()) == [1]
    assert 1 <= len(events(worklog, "step")) <= 2
    for engine in engines:
        await engine.close()


async def test_save_checkpoint(calls: TaskCalls, worklog: Path) -> None:
    policy = await take_gradient_step(calls.workspace, calls.request(await calls.batch()), step=0)
    ref = await three_times(lambda: save_checkpoint(calls.workspace, policy, name="named"))
    assert len(calls.manifests("runs/twice/", "checkpoint")) == 1
    assert len(calls.data("runs/twice/stages/0-grpo/checkpoints/", "weights.safetensors")) == 1
    assert ref.key == keys.checkpoint("twice", STAGE, "policy", 1)
    assert len(events(worklog, "checkpoint")) == 1


async def test_publish_model(calls: TaskCalls) -> None:
    policy = await take_gradient_step(calls.workspace, calls.request(await calls.batch()), step=0)
    ref = await three_times(lambda: publish_model(calls.workspace, policy, "published"))
    assert len(calls.data("models/published/", "model.safetensors")) == 1
    assert len(calls.data("models/published/aliases/latest/", ".json")) == 1
    assert ref.key.startswith("models/published/000001-")


async def test_evaluate_policy(calls: TaskCalls) -> None:
    plan = calls.evaluation()
    ref = await three_times(lambda: evaluate_policy(calls.workspace, calls.policy, plan))
    assert ref.rows == 2
    assert calls.manifests("runs/twice/", "evaluation") == [keys.manifest(ref.key)]
    other = plan.model_copy(update={"sampling": SAMPLING})
    assert (await evaluate_policy(calls.workspace, calls.policy, other)).key != ref.key


async def test_load_prompts(calls: TaskCalls) -> None:
    async def load() -> Any:
        return await asyncio.to_thread(load_prompts, calls.workspace, calls.prompts, "prompt")

    loaded = await three_times(load)
    assert loaded.rows == 10 and loaded.ref == calls.dataset
    assert len(calls.manifests("datasets/", "threads")) == 1


async def test_write_report(calls: TaskCalls) -> None:
    create_or_check_run(calls.store, "twice", semantic={"seed": 0}, other={}, code_version="test")
    await take_gradient_step(calls.workspace, calls.request(await calls.batch()), step=0)
    head = Chain.of(calls.store, calls.policy).head()
    before = await evaluate_policy(calls.workspace, calls.policy, calls.evaluation())

    async def report() -> Any:
        facts = {"run": "twice", "heldout": None}
        return await asyncio.to_thread(write_report, calls.workspace, head, before, None, facts)

    page = Path(await three_times(report))
    assert page.is_file() and "twice" in page.read_text()
    assert calls.data("runs/twice/", ".html") == [keys.report("twice")]


# -- what is retried ---------------------------------------------------------------------------------------------


def counted(error: Exception, *, failures: int) -> tuple[Callable[[], Awaitable[str]], list[int]]:
    """A durable task that fails so often, without the waiting, and the list that its attempts are counted in."""
    attempts: list[int] = []

    @durable_task("test", "work", retry_delay_seconds=0, retry_jitter_factor=None)
    async def work() -> str:
        attempts.append(len(attempts) + 1)
        if len(attempts) <= failures:
            raise error
        return "done"

    return work, attempts


@pytest.mark.parametrize(
    "error", [StorageUnavailable("503"), WorkerDied("gone"), ConnectionResetError("reset"), TimeoutError("late")]
)
async def test_a_transient_error_is_retried(error: Exception) -> None:
    work, attempts = counted(error, failures=2)
    assert await work() == "done"
    assert attempts == [1, 2, 3]


async def test_retries_end(calls: TaskCalls) -> None:
    work, attempts = counted(StorageUnavailable("503"), failures=99)
    with pytest.raises(StorageUnavailable):
        await work()
    assert len(attempts) == 1 + DURABLE["retries"]


@pytest.mark.parametrize("error", [StepConflict("another"), ValueError("bad"), FileNotFoundError("no"), KeyError("k")])
async def test_a_permanent_error_fails_at_once(error: Exception) -> None:
    work, attempts = counted(error, failures=1)
    with pytest.raises(type(error)):
        await work()
    assert attempts == [1]


async def test_a_step_that_conflicts_fails_at_once_and_names_both_batches(calls: TaskCalls) -> None:
    batch = await calls.batch()
    await take_gradient_step(calls.workspace, calls.request(batch), step=0)
    attempts = []
    engine = calls.workspace.connect()
    original = engine.take_gradient_step

    async def watched(*args: Any, **kwargs: Any) -> Any:
        attempts.append(1)
        return await original(*args, **kwargs)

    engine.take_gradient_step = watched  # type: ignore[method-assign]
    with pytest.raises(StepConflict, match="optimizer"):
        await take_gradient_step(calls.workspace, calls.request(batch, lr=2e-3), step=0)
    assert attempts == [1]


async def test_a_task_lives_through_a_store_that_fails_twice(calls: TaskCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real task, without the waiting."""
    failures = iter([StorageUnavailable("503"), StorageUnavailable("503")])
    original = calls.store.put

    def put(key: str, data: bytes) -> Any:
        if "/rollouts/" in key:
            for error in failures:
                raise error
        return original(key, data)

    monkeypatch.setattr(calls.store, "put", put)
    verb = inspect.unwrap(generate_rollouts)
    quick = durable_task("rollout", "quick", retry_delay_seconds=0, retry_jitter_factor=None)(verb)
    ref = await quick(calls.workspace, calls.policy, calls.shard, SAMPLING, step=0)
    assert ref.rows == 8
    assert next(failures, None) is None, "the store was not asked often enough to fail twice"
    assert len(calls.data("runs/twice/stages/0-grpo/steps/000000/rollouts/", ".parquet")) == 1
