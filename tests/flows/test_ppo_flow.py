"""Tests of `ppo` from end to end on a toy: its two chains, the credit of its batches, and that a run that crashes
between the two commits of an iteration resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import flows.ppo
from engine.handles import TrainingModel
from flows.configs.ppo import PPOConfig
from flows.ppo import ppo
from flows.training.critic import Critic
from flows.training.schedules import AdamW
from storage.inspect.accounting import check_accounting
from tasks.reports.step_metrics import read_metrics
from tests.fixtures.runs.flow_runs import GRADED, FlowRuns
from tests.fixtures.runs.ppo_runs import PPO_DEFAULTS, assert_adapters_clip_and_whitening, assert_kill_changes_no_byte

STAGE = "0-ppo"


def ppo_runs(folder: Path, tiny_folder: Path) -> FlowRuns:
    return FlowRuns(folder, tiny_folder, ppo, PPOConfig, stage=STAGE, defaults=PPO_DEFAULTS | GRADED)


@pytest.fixture(scope="module")
def runs(prefect_server: str, tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> FlowRuns:
    """Runs with one finished run, `whole`, of four iterations. The first two train the value model alone."""
    runs = ppo_runs(tmp_path_factory.mktemp("ppo"), tiny_folder)
    runs.run("whole")
    return runs


def test_policy_and_value_step_over_one_batch(runs: FlowRuns) -> None:
    policies, values = runs.records("whole", "policy"), runs.records("whole", "value")
    assert len(policies) == len(values) == 4
    assert [p.request.batch for p in policies] == [v.request.batch for v in values]
    assert [p.request.cursor_out for p in policies] == [v.request.cursor_out for v in values]
    assert {v.request.loss["kind"] for v in values} == {"mse"}
    assert [check_accounting(runs.store, record) for record in (*policies, *values)] == [[]] * 8
    assert all(p.request.reference is not None and p.request.reference.step == 0 for p in policies)


def test_the_policy_waits_while_the_value_model_is_trained_alone(runs: FlowRuns) -> None:
    policies, values = runs.records("whole", "policy"), runs.records("whole", "value")
    assert [record.updates for record in policies] == [0, 0, 1, 1]
    assert [record.updates for record in values] == [1, 1, 1, 1]
    digests = runs.digests("whole", "policy")
    assert digests[0] == digests[1] != digests[2] != digests[3]
    assert len(set(runs.digests("whole", "value"))) == 4
    optimizer = AdamW(weight_decay=0.0, max_grad_norm=1.0, betas=(0.9, 0.999), eps=1e-8)
    critic = Critic(cast(TrainingModel, None), {"value_only_fraction": 0.25}, optimizer)
    assert [critic.value_only_steps(n) for n in (2, 3, 4, 5, 8, 100)] == [1, 1, 1, 2, 2, 25]


def test_rewards_values_and_credit_of_a_batch_by_the_definitions(runs: FlowRuns) -> None:
    request = runs.records("whole", "policy")[-1].request
    for row in runs.rows(request.batch):
        gap = np.array(row["old_logprobs"]) - np.array(row["reference_logprobs"])
        rewards = -0.1 * gap
        rewards[-1] += row["reward"]
        values, count = row["old_values"], len(rewards)
        returns, advantages = [0.0] * (count + 1), [0.0] * (count + 1)
        for t in reversed(range(count)):
            returns[t] = rewards[t] + returns[t + 1]
            after = values[t + 1] if t + 1 < count else 0.0
            advantages[t] = rewards[t] + after - values[t] + 0.95 * advantages[t + 1]
        assert row["returns"] == pytest.approx(returns[:-1], abs=1e-5)
        assert row["advantages"] == pytest.approx(advantages[:-1], abs=1e-5)


@pytest.mark.parametrize(
    ("step", "task_name"),
    [
        (3, "take_value_step"),  # the policy's record is there, the value model's is not
        pytest.param(1, "take_value_step", marks=pytest.mark.slow),
        pytest.param(1, "take_gradient_step", marks=pytest.mark.slow),
        pytest.param(3, "take_gradient_step", marks=pytest.mark.slow),
        pytest.param(1, "prepare_batch", marks=pytest.mark.slow),
        pytest.param(3, "prepare_batch", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_ends_between_two_commits_resumes_to_the_same_bytes(
    runs: FlowRuns, monkeypatch: pytest.MonkeyPatch, task_name: str, step: int
) -> None:
    assert_kill_changes_no_byte(runs, monkeypatch, flows.ppo, task_name, step)


@pytest.mark.slow
def test_adapters_clipped_values_and_whitening(runs: FlowRuns) -> None:
    assert_adapters_clip_and_whitening(runs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value_model__name": "policy"}, "two names"),
        ({"rules": {"dynamic_sampling": True}}, "PPO has none"),
        ({"credit__value_only_fraction": 1.0}, "less than 1"),
        ({"algorithm__advantage_estimator": "group"}, "gae"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_loads(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ppo_runs(tmp_path, tmp_path).config("wrong", **changes)


@pytest.mark.slow
def test_ppo_learns_the_toy_task(runs: FlowRuns) -> None:
    runs.run(
        "learns", algorithm__steps=60, algorithm__samples_per_batch=80, algorithm__samples_per_mini_batch=80,
        algorithm__completions_per_sample=8, algorithm__kl_beta=0.0, optimizer__lr=3e-3, value_model__lr=3e-3,
        credit__value_only_fraction=0.1, checkpoints={"frequency": None},
    )  # fmt: skip
    rewards = [metrics.reward_mean or 0.0 for metrics in read_metrics(runs.store, "learns", STAGE, steps=60)]
    # chance is a half: an even code point or an odd one
    assert np.mean(rewards[:6]) < 0.7 and np.mean(rewards[-5:]) > 0.9
