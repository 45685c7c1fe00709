"""Tests that the toy task is learnt from random weights, and only from rewards for the right answer."""

from __future__ import annotations

import asyncio
import json
import statistics
from pathlib import Path
from typing import Any

import pandas
import pytest

from engine.text.threads import StringThread
from flows.configs.common import GRPOConfig
from flows.grpo import grpo
from tests.fixtures.toy import digit_share, toy_config

STEPS = 180


def learn(folder: Path, tiny_folder: Path, *, steps: int, run: str = "learn", **changes: Any) -> list[float]:
    """Mean reward of the completions of each step."""
    sizes = {"samples_per_batch": 128, "samples_per_mini_batch": 128, "completions_per_sample": 8}
    # the sampler is the trainer's model in the same precision: its logprobs save a forward pass
    rest = {"steps": steps, "prompts_per_shard": 16, "clip_range": 0.2, "kl_beta": 0.0, "old_logprobs": "sampler"}
    settings: dict[str, Any] = {
        "algorithm": sizes | rest,
        "checkpoints": {"frequency": None},
        "engine": {"deterministic": True, "threads": 1, "max_rows": 128},
    }
    config = toy_config(folder, tiny_folder, run=run, **(settings | changes))
    asyncio.run(grpo(GRPOConfig.model_validate(config)))
    files = sorted((folder / "data" / "runs" / run / "stages" / "0-grpo" / "metrics").glob("*.json"))
    rewards = [json.loads(file.read_text())["reward_mean"] for file in files]
    assert len(rewards) == steps
    return rewards


@pytest.fixture(scope="module")
def learnt(
    prefect_server: str, tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path
) -> tuple[list[float], Path]:
    """Rewards of a run from random weights, and the folder of the model it published."""
    folder = tmp_path_factory.mktemp("learning")
    rewards = learn(folder, tiny_folder, steps=STEPS)
    (published,) = (path.parent for path in (folder / "data" / "models" / "toy").glob("*/model.safetensors"))
    return rewards, published


@pytest.mark.slow
def test_grpo_learns_the_toy_from_random_weights(learnt: tuple[list[float], Path]) -> None:
    rewards, _ = learnt
    assert statistics.mean(rewards[:5]) < 0.1
    assert statistics.mean(rewards[-10:]) > 0.9


@pytest.mark.slow
def test_negated_rewards_unlearn_it(learnt: tuple[list[float], Path], tmp_path: Path) -> None:
    grader = {"path": "tests.fixtures.toy:digit_share", "arguments": {"sign": -1}}
    rewards = learn(tmp_path, learnt[1], steps=30, grader=grader)
    shares = [-reward for reward in rewards]
    assert shares[0] > 0.9
    assert statistics.mean(shares[-5:]) < 0.5


@pytest.mark.slow
def test_rewards_that_say_nothing_teach_nothing(prefect_server: str, tiny_folder: Path, tmp_path: Path) -> None:
    learn(tmp_path, tiny_folder, steps=STEPS, grader__path="tests.fixtures.grading:by_hash")
    shares = []
    for table in sorted((tmp_path / "data" / "runs" / "learn" / "stages").glob("*/steps/*/rollouts/*.parquet")):
        rows = pandas.read_parquet(table, columns=["text", "thread"])
        answered = zip(rows["thread"], rows["text"], strict=True)
        threads = [StringThread.from_json(thread).assistant(text) for thread, text in answered]
        shares.append(statistics.mean(digit_share(thread) for thread in threads))
    assert len(shares) == STEPS
    assert statistics.mean(shares[-10:]) < 0.1
