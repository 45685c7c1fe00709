"""Tests of what a campaign counts and finds where samplers run ahead of the trainer."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flows.configs.common import GRPOConfig
from flows.grpo import grpo
from storage.store.objects import ObjectStore, open_store
from tests.chaos import asynchrony
from tests.chaos.asynchrony import broken_staleness, count_tokens
from tests.chaos.faults import Fault
from tests.chaos.world import ASYNC, Happening, World
from tests.fixtures.toy import toy_config

STEPS = 3


def world_of(folder: Path, **changes: Any) -> World:
    """A finished run without faults, as far as the checks read a world."""
    tokens, others = [], []
    for event in map(json.loads, (folder / "work.log").read_text().splitlines()):
        (tokens if event["event"] == "token" else others).append(event)
    fields = {"mode": replace(ASYNC, steps=STEPS), "tokens": tokens, "log": others, "happenings": []} | changes
    return cast(World, SimpleNamespace(run_key=lambda run: f"chaos-{run}", **fields))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, prefect_server: str) -> Path:
    path = tmp_path_factory.mktemp("async")
    config = toy_config(
        path, tiny_folder, run="chaos-0", grader__path="tests.fixtures.grading:even_share", algorithm__steps=STEPS,
        algorithm__samples_per_batch=8, algorithm__samples_per_mini_batch=8, algorithm__prompts_per_shard=1,
        engine={"threads": 1, **ASYNC.engine}, **ASYNC.run,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OSTINATO_WORKLOG", str(path / "work.log"))
        asyncio.run(grpo(GRPOConfig.model_validate(config)))
    return path


@pytest.fixture
def store(folder: Path) -> ObjectStore:
    return open_store(folder / "data")


@pytest.mark.slow
def test_a_run_without_faults_samples_each_token_once(folder: Path, store: ObjectStore) -> None:
    world = world_of(folder)
    counts = count_tokens(world, store)
    assert (counts.trained, counts.again) == (len(world.tokens), 0)
    assert counts.segments > 0
    assert broken_staleness(world, store) == []


@pytest.mark.slow
def test_tokens_sampled_again_count_for_the_last_fault_before(folder: Path, store: ObjectStore) -> None:
    world = world_of(folder)
    tokens = sorted(world.tokens, key=lambda token: token["time"])
    # the second fault happens when three tokens have been sampled, and none is committed; two are sampled again
    second = (tokens[2]["time"] + tokens[3]["time"]) / 2
    faults = [Fault("kill -9 engine", step=0, offset=0, seconds=0)] * 2
    happenings = [Happening(fault, time) for fault, time in zip(faults, (0.0, second), strict=True)]
    end = tokens[-1]["time"] + 1
    again = [token | {"time": end} for token in tokens[:2]]
    restart = {"event": "restart", "tokens": 5, "time": end}
    world = world_of(folder, tokens=[*again, *tokens], log=[restart], happenings=happenings)
    assert count_tokens(world, store).again == 2 + 5
    assert [(happening.tokens_in_flight, happening.sampled_again) for happening in happenings] == [(0, 0), (3, 7)]


@pytest.mark.slow
def test_old_tokens_and_a_lost_prompt_are_found(
    folder: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = replace(ASYNC, steps=STEPS, run={"rules": {"max_staleness": 0}})
    problems = broken_staleness(world_of(folder, mode=strict), store)
    assert problems and all("steps old" in problem for problem in problems)
    world = world_of(folder)
    shards = list(asynchrony.shards_of(world, store))
    monkeypatch.setattr(asynchrony, "shards_of", lambda *_: shards[1:])
    (problem,) = broken_staleness(world, store)
    assert "trained its prompts this often" in problem
