"""Every task may run twice, and at once with itself: one artifact, one ref. And what is retried."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import StepConflict, WorkerDied
from engine.losses.policy_gradient import GRPOSpec
from engine.protocol import PolicySpec, SamplingParams
from engine.specs.engine import LocalEngineSpec
from engine.workspace import Workspace
from storage.chain.records import Chain, OptimizerSpec, PolicyRef, Root, StepRequest
from storage.chain.run_record import create_or_check_run
from storage.errors import StorageUnavailable
from storage.store import keys
from storage.store.artifacts import ArtifactRef, Provenance
from tasks.batches.rl import BatchPlan
from tasks.checkpoint import save_checkpoint
from tasks.datasets.spec import FileDataset
from tasks.evaluate import evaluate_policy
from tasks.evaluation.completions import EvaluationPlan
from tasks.grade import grade_rollouts
from tasks.graders.spec import grader_spec
from tasks.load import load_prompts
from tasks.prepare import prepare_batch
from tasks.publish import publish_model
from tasks.report import write_report
from tasks.retries import DURABLE
from tasks.rollout import generate_rollouts
from tasks.sampling.completions import PromptShard
from tasks.sampling.grading import Grading
from tasks.task_runs import durable_task
from tasks.train import take_gradient_step
from tests.fixtures.toy import write_prompts

pytestmark = pytest.mark.usefixtures("prefect_server")

STAGE = "0-grpo"
SAMPLING = SamplingParams(max_new_tokens=6, min_new_tokens=6)
GREEDY = SamplingParams(max_new_tokens=4, temperature=0.0)


class Stand:
    """A new run at policy 0, with one shard of prompts, and each task as a call without arguments."""

    def __init__(self, workspace: Workspace, base: ArtifactRef, policy: PolicyRef, prompts: FileDataset) -> None:
        self.workspace, self.base, self.policy, self.prompts = workspace, base, policy, prompts
        self.store = workspace.open_store()
        self.grading = Grading(grader=grader_spec("tests.fixtures.grading:even_share"))
        self.dataset = load_prompts(workspace, prompts, "prompt").ref
        self.shard = PromptShard(base=base, dataset=self.dataset, index=0, rows=(0, 1), completions=4)
        self.plan = BatchPlan(reference=policy)

    async def rollouts(self) -> ArtifactRef:
        return await generate_rollouts(self.workspace, self.policy, self.shard, SAMPLING, step=0)

    async def graded(self, rollouts: ArtifactRef) -> ArtifactRef:
        return await grade_rollouts(self.workspace, rollouts, self.grading, stage=STAGE, step=0, shard=0)

    async def batch(self) -> ArtifactRef:
        rollouts = await self.rollouts()
        return await self.batch_of(rollouts, await self.graded(rollouts))

    async def batch_of(self, rollouts: ArtifactRef, graded: ArtifactRef) -> ArtifactRef:
        return await prepare_batch(self.workspace, self.policy, [rollouts], [graded], self.plan, step=0)

    def request(self, batch: ArtifactRef, lr: float = 1e-3) -> StepRequest:
        return StepRequest(
            parent=self.policy,
            batch=batch,
            reference=self.policy,
            loss=GRPOSpec().model_dump(),
            optimizer=OptimizerSpec(lr=lr),
        )

    def evaluation(self) -> EvaluationPlan:
        return EvaluationPlan(
            prompts=self.shard.model_copy(update={"completions": 1}), sampling=GREEDY, grading=self.grading
        )

    def manifests(self, prefix: str, kind: str) -> list[str]:
        """Keys of the committed artifacts of a kind."""
        found = []
        for info in self.store.list(prefix):
            if info.key.endswith(".json"):
                body = json.loads(self.store.get(info.key))
                if isinstance(body, dict) and body.get("kind") == kind and "files" in body:
                    found.append(info.key)
        return found

    def data(self, prefix: str, suffix: str) -> list[str]:
        return [info.key for info in self.store.list(prefix) if info.key.endswith(suffix)]


@pytest.fixture
async def stand(tmp_path: Path, tiny_folder: Path) -> Stand:
    workspace = Workspace(
        store=str(tmp_path / "data"),
        engine=LocalEngineSpec(deterministic=True, threads=1),
        run="twice",
        epoch=1,
        provenance=Provenance(code_version="test", config_digest="none", seed=0),
    )
    engine = workspace.connect()
    base = await engine.import_model(str(tiny_folder), provenance=workspace.provenance)
    root = Root(base=base, base_digest=base.sha256)
    policy = await engine.create_policy(PolicySpec(run="twice", stage=STAGE, model="policy", root=root))
    return Stand(workspace, base, policy, FileDataset(path=str(write_prompts(tmp_path / "prompts.jsonl"))))


def count(worklog: Path, event: str) -> int:
    return sum(json.loads(line)["event"] == event for line in worklog.read_text().splitlines())


async def three_times(call: Callable[[], Awaitable[Any]]) -> Any:
    """The one answer of a task that ran twice at once, and a third time after that."""
    first, second = await asyncio.gather(call(), call())
    third = await call()
    assert first == second == third
    return first


async def test_generate_rollouts(stand: Stand, worklog: Path) -> None:
    ref = await three_times(stand.rollouts)
    assert ref.rows == 8 and ref.key == keys.step_artifact("twice", STAGE, 0, "rollouts", 0)
    assert stand.manifests("runs/twice/", "rollouts") == [keys.manifest(ref.key)]
    assert len(stand.data("runs/twice/stages/0-grpo/steps/000000/rollouts/", ".parquet")) == 1
    # at once, both may sample; once committed, nobody does
    drawn = count(worklog, "generate")
    assert drawn in (1, 2)
    await stand.rollouts()
    assert count(worklog, "generate") == drawn


async def test_grade_rollouts(stand: Stand, worklog: Path) -> None:
    rollouts = await stand.rollouts()
    ref = await three_times(lambda: stand.graded(rollouts))
    assert ref.rows == 8 and ref.parents == (rollouts.uri,)
    assert stand.manifests("runs/twice/", "graded") == [keys.manifest(ref.key)]
    graded = count(worklog, "grade")
    await stand.graded(rollouts)
    assert count(worklog, "grade") == graded <= 2


async def test_prepare_batch(stand: Stand) -> None:
    rollouts = await stand.rollouts()
    graded = await stand.graded(rollouts)
    ref = await three_times(lambda: stand.batch_of(rollouts, graded))
    assert ref.rows == 8 and set(ref.parents) == {stand.policy.uri, rollouts.uri, graded.uri}
    assert stand.manifests("runs/twice/", "batch") == [keys.manifest(ref.key)]


async def test_take_gradient_step(stand: Stand, worklog: Path) -> None:
    request = stand.request(await stand.batch())
    policy = await three_times(lambda: take_gradient_step(stand.workspace, request, step=0))
    assert policy == request.result() and policy.step == 1
    assert list(Chain.of(stand.store, policy).steps()) == [1]
    assert count(worklog, "step") == 1


async def test_take_gradient_step_in_two_engines_at_once(stand: Stand, worklog: Path) -> None:
    """Two machines: each its own engine and weights, one store."""
    from engine.local.engine import LocalEngine

    request = stand.request(await stand.batch())
    engines = [LocalEngine(stand.workspace.store, stand.workspace.engine) for _ in range(2)]
    first, second = await asyncio.gather(*(engine.take_gradient_step(request) for engine in engines))
    assert first == second  # the whole record, the attempt and the time in it too: one was committed
    assert list(Chain.of(stand.store, stand.policy).steps()) == [1]
    assert 1 <= count(worklog, "step") <= 2
    for engine in engines:
        await engine.close()


async def test_save_checkpoint(stand: Stand, worklog: Path) -> None:
    policy = await take_gradient_step(stand.workspace, stand.request(await stand.batch()), step=0)
    ref = await three_times(lambda: save_checkpoint(stand.workspace, policy, name="named"))
    assert len(stand.manifests("runs/twice/", "checkpoint")) == 1
    assert len(stand.data("runs/twice/stages/0-grpo/checkpoints/", "weights.safetensors")) == 1
    assert ref.key == keys.checkpoint("twice", STAGE, "policy", 1)
    assert count(worklog, "checkpoint") == 1


async def test_publish_model(stand: Stand) -> None:
    policy = await take_gradient_step(stand.workspace, stand.request(await stand.batch()), step=0)
    ref = await three_times(lambda: publish_model(stand.workspace, policy, "published"))
    assert len(stand.data("models/published/", "model.safetensors")) == 1
    assert len(stand.data("models/published/aliases/latest/", ".json")) == 1
    assert ref.key.startswith("models/published/000001-")


async def test_evaluate_policy(stand: Stand) -> None:
    plan = stand.evaluation()
    ref = await three_times(lambda: evaluate_policy(stand.workspace, stand.policy, plan))
    assert ref.rows == 2
    assert stand.manifests("runs/twice/", "evaluation") == [keys.manifest(ref.key)]
    other = plan.model_copy(update={"sampling": SAMPLING})
    assert (await evaluate_policy(stand.workspace, stand.policy, other)).key != ref.key


async def test_load_prompts(stand: Stand) -> None:
    async def load() -> Any:
        return await asyncio.to_thread(load_prompts, stand.workspace, stand.prompts, "prompt")

    loaded = await three_times(load)
    assert loaded.rows == 10 and loaded.ref == stand.dataset
    assert len(stand.manifests("datasets/", "threads")) == 1


async def test_write_report(stand: Stand) -> None:
    create_or_check_run(stand.store, "twice", semantic={"seed": 0}, other={}, code_version="test")
    await take_gradient_step(stand.workspace, stand.request(await stand.batch()), step=0)
    head = Chain.of(stand.store, stand.policy).head()
    before = await evaluate_policy(stand.workspace, stand.policy, stand.evaluation())

    async def report() -> Any:
        facts = {"run": "twice", "heldout": None}
        return await asyncio.to_thread(write_report, stand.workspace, head, before, None, facts)

    where = await three_times(report)
    assert Path(where).is_file() and "twice" in Path(where).read_text()
    assert stand.data("runs/twice/", ".html") == [keys.report("twice")]


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


async def test_retries_end(stand: Stand) -> None:
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


async def test_a_step_that_conflicts_fails_at_once_and_names_both_batches(stand: Stand) -> None:
    batch = await stand.batch()
    await take_gradient_step(stand.workspace, stand.request(batch), step=0)
    calls = []
    engine = stand.workspace.connect()
    original = engine.take_gradient_step

    async def watched(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return await original(*args, **kwargs)

    engine.take_gradient_step = watched  # type: ignore[method-assign]
    with pytest.raises(StepConflict, match="optimizer"):
        await take_gradient_step(stand.workspace, stand.request(batch, lr=2e-3), step=0)
    assert calls == [1]


async def test_a_task_lives_through_a_store_that_fails_twice(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real task, without the waiting."""
    failures = iter([StorageUnavailable("503"), StorageUnavailable("503")])
    original = stand.store.put

    def put(key: str, data: bytes) -> Any:
        if "/rollouts/" in key:
            for error in failures:
                raise error
        return original(key, data)

    monkeypatch.setattr(stand.store, "put", put)
    verb = inspect.unwrap(generate_rollouts)
    quick = durable_task("rollout", "quick", retry_delay_seconds=0, retry_jitter_factor=None)(verb)
    ref = await quick(stand.workspace, stand.policy, stand.shard, SAMPLING, step=0)
    assert ref.rows == 8
    assert next(failures, None) is None, "the store was not asked often enough to fail twice"
    assert len(stand.data("runs/twice/stages/0-grpo/steps/000000/rollouts/", ".parquet")) == 1
