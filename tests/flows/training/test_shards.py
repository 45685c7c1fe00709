"""Tests that the shards of a step do not wait for each other."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from engine.workspace import derive_seed
from flows.training import rollout_sources as module
from flows.training.rollout_collection import PromptShards, RolloutCollector
from storage.store.artifacts import ArtifactRef
from tasks.plans import PromptShard
from tasks.sampling.shards import SHARDS_AT_ONCE


def run(
    monkeypatch: pytest.MonkeyPatch, generate: Any, grade: Any, *, shards: int = 2, at_once: int = SHARDS_AT_ONCE
) -> Any:
    """Samples and grades shards with these tasks."""
    monkeypatch.setattr(module, "generate_rollouts", generate)
    monkeypatch.setattr(module, "grade_rollouts", grade)
    all_shards: Any = [SimpleNamespace(index=index) for index in range(shards)]
    anything: Any = SimpleNamespace(stage="0-grpo", workspace=None, sampling=None)
    prompts: Any = PromptShards(anything, anything, 2, 1, 1, anything, None, "error")
    collector = RolloutCollector(prompts, module.Completions(anything), shards_at_once=at_once)
    call = collector.sample_and_grade(anything, all_shards, step=3)
    return asyncio.run(asyncio.wait_for(call, 10))


def test_a_shard_is_graded_while_another_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    graded_first = asyncio.Event()

    async def generate(workspace: Any, policy: Any, shard: Any, sampling: Any, *, step: int) -> str:
        # the second shard is sampled only when the grades of the first are there
        if shard.index == 1:
            await graded_first.wait()
        return f"rollouts {step}/{shard.index}"

    async def grade(workspace: Any, rollouts: str, grading: Any, *, stage: str, step: int, shard: int) -> str:
        graded_first.set()
        return f"grades of {rollouts}"

    rollouts, graded = run(monkeypatch, generate, grade)
    assert rollouts == ["rollouts 3/0", "rollouts 3/1"]
    assert graded == ["grades of rollouts 3/0", "grades of rollouts 3/1"]


def test_a_step_of_many_shards_works_on_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    in_progress, most = 0, 0

    async def generate(workspace: Any, policy: Any, shard: Any, sampling: Any, *, step: int) -> int:
        nonlocal in_progress, most
        in_progress += 1
        most = max(most, in_progress)
        await asyncio.sleep(0)
        return shard.index

    async def grade(workspace: Any, rollouts: int, grading: Any, *, stage: str, step: int, shard: int) -> int:
        nonlocal in_progress
        await asyncio.sleep(0)
        in_progress -= 1
        return -rollouts

    rollouts, graded = run(monkeypatch, generate, grade, shards=20, at_once=3)
    assert (rollouts, graded) == (list(range(20)), [-index for index in range(20)])
    assert most == 3


def test_an_error_cancels_the_other_shards_and_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []

    async def generate(workspace: Any, policy: Any, shard: Any, sampling: Any, *, step: int) -> str:
        if shard.index == 0:
            return "rollouts"
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(shard.index)
        return "never"

    async def grade(*args: Any, **kwargs: Any) -> str:
        raise ValueError("no grade")

    with pytest.raises(ValueError, match="no grade"):
        run(monkeypatch, generate, grade)
    assert ended == [1]


def shards_of(on_policy: float, step: int, *, seed: int = 0, rows: list[int] | None = None) -> list[PromptShard]:
    """The shards of a step that reads these rows, with three prompts per shard and two completions of each."""
    ref = ArtifactRef(kind="threads", key="datasets/d/v", sha256="0" * 64, bytes=1, rows=None, parents=())
    workspace = SimpleNamespace(seed_for=lambda *parts: derive_seed(seed, *parts))
    model: Any = SimpleNamespace(base=ref, workspace=workspace)
    prompts: Any = PromptShards(model, SimpleNamespace(ref=ref), 100, 2, 3, model, None, "error", on_policy=on_policy)
    return prompts.shards(rows or list(range(100)), earlier_rows=[], first_index=0, step=step)


def taken_rows(shards: list[PromptShard]) -> list[tuple[int, int]]:
    taken = [shard for shard in shards if shard.dataset_answers == "taken"]
    return [pair for shard in taken for pair in zip(shard.rows, shard.repetitions, strict=True)]


def test_each_prompt_has_completions_or_its_answer_by_the_seed_and_the_step() -> None:
    shards = shards_of(0.7, 4)
    assert [shard.index for shard in shards] == list(range(len(shards)))
    assert sorted(row for shard in shards for row in shard.rows) == list(range(100))
    assert {shard.dataset_answers for shard in shards} == {"replaced", "taken"}
    assert all(len(shard.rows) <= 3 for shard in shards)
    # of 100 draws with probability 0.3, a number that is 4 standard deviations (4.6) from 30 would be no chance
    assert 12 <= len(taken_rows(shards)) <= 48
    assert shards_of(0.7, 4) == shards
    others = [shards_of(0.7, 5), shards_of(0.7, 4, seed=1)]
    assert all(taken_rows(other) != taken_rows(shards) for other in others)
    # a smaller probability takes the same answers, and more
    assert set(taken_rows(shards)) < set(taken_rows(shards_of(0.4, 4)))


def test_a_row_that_occurs_twice_in_a_step_is_decided_once() -> None:
    """The completions of a prompt are then numbered without a gap (storage.inspect.accounting)."""
    taken = taken_rows(shards_of(0.5, 0, rows=[*range(50), *range(50)]))
    first, second = ({row for row, times in taken if times == occurrence} for occurrence in (0, 1))
    assert first == second and 0 < len(first) < 50


def test_with_and_without_sampling_a_step_has_one_kind_of_shards() -> None:
    assert {shard.dataset_answers for shard in shards_of(1.0, 0)} == {"none"}
    assert "dataset_answers" not in shards_of(1.0, 0)[0].model_dump()
    assert {shard.dataset_answers for shard in shards_of(0.0, 0)} == {"taken"}
