"""Tests that the shards of a step do not wait for each other."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from flows.training import rollout_sources as module
from flows.training.rollout_collection import PromptShards, RolloutCollector
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
