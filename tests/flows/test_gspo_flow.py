"""Tests of `gspo` from end to end: its defaults, its loss on the chain, and that it learns the toy task."""

from __future__ import annotations

import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from engine.protocol import SamplingParams
from flows.configs.overrides import ConfigError
from flows.configs.ppo import GSPOConfig
from flows.configs.reinforcement import old_logprobs_of_step
from flows.grpo import GRPO
from flows.gspo import GSPO, gspo
from flows.training.schedules import ConstantScheduler
from tasks.graders.spec import grader_spec
from tests.fixtures.runs.flow_runs import GRADED, FlowRuns
from tests.fixtures.toy import toy_config

STEPS = 180
GRADER = grader_spec("tests.fixtures.grading:even_share")
MODEL: Any = SimpleNamespace(sampling=SamplingParams())
"""A model that is only passed on."""


def gspo_runs(folder: Path, tiny_folder: Path) -> FlowRuns:
    return FlowRuns(folder, tiny_folder, gspo, GSPOConfig, stage="0-gspo")


@pytest.fixture
def runs(prefect_server: str, tmp_path: Path, tiny_folder: Path) -> FlowRuns:
    return gspo_runs(tmp_path, tiny_folder)


def test_its_defaults_are_those_of_the_algorithm() -> None:
    trainer = GSPO([], MODEL, GRADER, max_num_gspo_steps=3)
    assert (trainer.loss.kind, trainer.loss.norm) == ("gspo", "sequence_mean")
    assert (trainer.loss.clip_low, trainer.loss.clip_high, trainer.loss.kl_beta) == (0.01, 0.01, 0.01)
    assert (trainer.max_steps, trainer.algorithm.completions_per_sample, trainer.prompts_per_batch) == (3, 8, 16)
    assert isinstance(trainer, GRPO)
    high = GSPO([], MODEL, GRADER, max_num_gspo_steps=3, clip_range=3e-4, clip_range_high=4e-4)
    assert (high.loss.clip_low, high.loss.clip_high) == (3e-4, 4e-4)


def test_the_config_has_the_same_defaults(tmp_path: Path, tiny_folder: Path) -> None:
    body = toy_config(tmp_path, tiny_folder) | {"algorithm": {"steps": 1}}
    algorithm = GSPOConfig.model_validate(body).algorithm
    assert (algorithm.clip_range, algorithm.loss_norm, algorithm.kl_beta) == (0.01, "sequence_mean", 0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dual_clip": 3.0, "max_num_gspo_steps": 1}, "ratio per token"),
        ({"policy_loss": "cispo", "max_num_gspo_steps": 1}, "ratios per token"),
        ({"epochs": 1, "max_num_gspo_steps": 1}, "both max_num_gspo_steps=1 and epochs=1"),
        ({"max_num_grpo_steps": 1}, "max_num_grpo_steps"),
    ],
)
def test_what_it_cannot_do_is_said(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        GSPO([], MODEL, GRADER, **arguments)


def test_a_mini_batch_above_the_batch_is_one_update() -> None:
    trainer = GSPO([], MODEL, GRADER, samples_per_batch=4, completions_per_sample=4, max_num_gspo_steps=1)
    explicit = GSPO(
        [], MODEL, GRADER, samples_per_batch=4, samples_per_mini_batch=64, completions_per_sample=4,
        max_num_gspo_steps=1,
    )  # fmt: skip
    for one in (trainer, explicit):
        assert (one.minibatches.size, one.minibatches.epochs) == (None, 1)
        assert old_logprobs_of_step(one.algorithm, one.regularisation) == "forward"


def test_a_wrong_size_is_a_sentence_that_names_the_option() -> None:
    expected = r"samples_per_batch=3 splits a group; use a multiple of"
    with pytest.raises(ConfigError, match=expected):
        GSPO([], MODEL, GRADER, samples_per_batch=3, completions_per_sample=4, max_num_gspo_steps=1)


def test_an_endless_run_needs_a_constant_rate() -> None:
    trainer = GSPO(
        [], MODEL, GRADER, lr_scheduler=ConstantScheduler(1e-6), checkpoint_every_steps=5
    )  # fmt: skip
    assert trainer.max_steps is None


def test_a_config_with_a_ratio_per_token_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    runs = gspo_runs(tmp_path, tiny_folder)
    with pytest.raises(ValidationError, match="ratio per token"):
        runs.config("g", algorithm__dual_clip=3.0)
    with pytest.raises(ValidationError, match="ratios per token"):
        runs.config("g", regularisation={"policy_loss": "cispo"})


@pytest.mark.parametrize("adapter", [None, pytest.param({"rank": 4}, marks=pytest.mark.slow)])
def test_every_step_of_the_chain_minimises_its_loss(runs: FlowRuns, adapter: dict[str, Any] | None) -> None:
    changes = GRADED | {"algorithm__steps": 2, "algorithm__clip_range": 0.02, "model__adapter": adapter}
    result = runs.run("g", **changes)
    requests = [record.request for record in runs.records("g")]
    assert [(request.loss["kind"], request.loss["norm"]) for request in requests] == [("gspo", "sequence_mean")] * 2
    assert [request.loss["clip_low"] for request in requests] == [0.02] * 2
    assert [request.reference for request in requests] == [runs.chain("g").policy(0)] * 2
    assert len(set(runs.digests("g"))) == 2  # both moved the weights
    assert result["model"].startswith("toy@")
    assert runs.run("g", **changes) == result


@pytest.mark.slow
def test_gspo_learns_the_toy_from_random_weights(runs: FlowRuns) -> None:
    sizes = {"samples_per_batch": 128, "samples_per_mini_batch": 128, "completions_per_sample": 8}
    rest = {"steps": STEPS, "prompts_per_shard": 16, "clip_range": 0.2, "kl_beta": 0.0, "old_logprobs": "sampler"}
    engine = {"deterministic": True, "threads": 1, "max_rows": 128}
    runs.run("g", algorithm=sizes | rest, checkpoints={"frequency": None}, engine=engine)
    rewards = [line["reward_mean"] for line in runs.metrics("g")]
    assert len(rewards) == STEPS
    assert statistics.mean(rewards[:5]) < 0.1
    assert statistics.mean(rewards[-10:]) > 0.9
