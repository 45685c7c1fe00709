"""`ppo` from end to end on a toy: two chains over one batch, the value model first and alone, and what a crash between
the two commits of an iteration does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import flows.ppo
from engine.connect import connect
from engine.handles import TrainingModel
from flows.configs.ppo import PPOConfig
from flows.ppo import ppo
from flows.training.critic import Critic
from flows.training.optimizer import AdamW
from storage.chain.records import Chain, CommitRecord
from storage.inspect.accounting import check_accounting
from storage.store.artifacts import ArtifactRef
from storage.store.objects import open_store
from storage.store.tables import read_table
from tasks.reports.step_metrics import read_metrics
from tests.fixtures.toy import toy_config

STAGE = "0-ppo"


class Runs:
    """Short runs of PPO in one store."""

    def __init__(self, folder: Path, tiny_folder: Path) -> None:
        self.folder, self.tiny_folder = folder, tiny_folder
        self.store = open_store(str(folder / "data"))

    def config(self, run: str, **changes: Any) -> PPOConfig:
        changes = {
            "grader__path": "tests.fixtures.grading:even_share",
            "algorithm__completions_per_sample": 1,
            "algorithm__kl_beta": 0.1,
            "value_model__lr": 1e-3,
            "credit__value_only_fraction": 0.5,
        } | changes
        return PPOConfig.model_validate(toy_config(self.folder, self.tiny_folder, run=run, **changes))

    def run(self, run: str, **changes: Any) -> dict[str, Any]:
        return asyncio.run(ppo(self.config(run, **changes)))

    def records(self, run: str, model: str) -> list[CommitRecord]:
        chain = Chain(self.store, run, STAGE, model)
        found = [chain.record(step) for step in chain.steps()]
        return [record for record in found if record is not None]

    def digests(self, run: str, model: str) -> list[str | None]:
        return [record.weights_digest for record in self.records(run, model)]

    def rows(self, ref: ArtifactRef) -> list[dict[str, Any]]:
        return read_table(self.store, ref).to_pylist()


@pytest.fixture(scope="module")
def runs(prefect_server: str, tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Runs:
    """With one finished run of four iterations, `whole`: two of the value model alone, two of both."""
    found = Runs(tmp_path_factory.mktemp("ppo"), tiny_folder)
    found.run("whole")
    return found


def test_policy_and_value_step_over_one_batch(runs: Runs) -> None:
    policies, values = runs.records("whole", "policy"), runs.records("whole", "value")
    assert len(policies) == len(values) == 4
    assert [p.request.batch for p in policies] == [v.request.batch for v in values]
    assert [p.request.cursor_out for p in policies] == [v.request.cursor_out for v in values]
    assert {v.request.loss["kind"] for v in values} == {"mse"}
    assert [check_accounting(runs.store, record) for record in (*policies, *values)] == [[]] * 8
    assert all(p.request.reference is not None and p.request.reference.step == 0 for p in policies)


def test_while_the_value_model_is_trained_alone_the_policy_stays_and_its_schedule_waits(runs: Runs) -> None:
    policies, values = runs.records("whole", "policy"), runs.records("whole", "value")
    assert [record.updates for record in policies] == [0, 0, 1, 1]
    assert [record.updates for record in values] == [1, 1, 1, 1]
    digests = runs.digests("whole", "policy")
    assert digests[0] == digests[1] != digests[2] != digests[3]
    assert len(set(runs.digests("whole", "value"))) == 4
    optimizer = AdamW(weight_decay=0.0, max_grad_norm=1.0, betas=(0.9, 0.999), eps=1e-8)
    critic = Critic(cast(TrainingModel, None), {"value_only_fraction": 0.25}, optimizer)
    assert [critic.value_only_steps(n) for n in (2, 3, 4, 5, 8, 100)] == [1, 1, 1, 2, 2, 25]


def test_rewards_values_and_credit_of_a_batch_by_the_definitions(runs: Runs) -> None:
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


class Interrupted(BaseException):
    """Ends a run as a kill does."""


@pytest.mark.parametrize(
    ("at", "where"),
    [
        (3, "take_value_step"),  # the policy's record is there, the value model's is not
        *(
            pytest.param(at, where, marks=pytest.mark.slow)
            for at in (1, 3)
            for where in ("take_gradient_step", "take_value_step", "prepare_ppo_batch")
            if (at, where) != (3, "take_value_step")
        ),
    ],
)
def test_a_run_that_ends_between_two_commits_resumes_to_the_same_bytes(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, where: str, at: int
) -> None:
    run, call = f"cut-{where}-{at}", getattr(flows.ppo, where)

    async def stop(*arguments: Any, step: int, **named: Any) -> Any:
        if step == at:
            raise Interrupted
        return await call(*arguments, step=step, **named)

    with monkeypatch.context() as patched:
        patched.setattr(flows.ppo, where, stop)
        with pytest.raises(Interrupted):
            runs.run(run)
    ahead = len(runs.records(run, "policy")) - len(runs.records(run, "value"))
    assert ahead == (1 if where == "take_value_step" else 0)
    connect.cache_clear()  # what was in memory is gone, as after a crash
    runs.run(run)
    for model in ("policy", "value"):
        assert runs.digests(run, model) == runs.digests("whole", model)
        assert None not in runs.digests(run, model)
        assert [r.state for r in runs.records(run, model)] == [r.state for r in runs.records("whole", model)]


@pytest.mark.slow
def test_adapters_clipped_values_and_whitening(runs: Runs) -> None:
    lora = {"rank": 2}
    runs.run(
        "options", algorithm__steps=2, model__adapter=lora, value_model__adapter=lora, credit__value_clip=0.2,
        credit__whiten_advantages=True, credit__returns="advantages", credit__value_only_fraction=0.0,
    )  # fmt: skip
    value = runs.records("options", "value")[-1]
    assert value.request.loss == {**value.request.loss, "kind": "trust_region_mse", "clip": 0.2}
    rows = runs.rows(value.request.batch)
    advantages = np.concatenate([row["advantages"] for row in rows])
    assert (advantages.mean(), advantages.std()) == pytest.approx((0.0, 1.0), abs=1e-4)
    assert [record.updates for record in runs.records("options", "policy")] == [1, 1]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"value_model__name": "policy"}, "two names"),
        ({"rules": {"dynamic_sampling": True}}, "PPO has none"),
        ({"credit__value_only_fraction": 1.0}, "less than 1"),
        ({"algorithm__advantage_estimator": "group"}, "gae"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_loads(tmp_path: Path, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Runs(tmp_path, tmp_path).config("wrong", **wrong)


@pytest.mark.slow
def test_ppo_learns_the_toy_task(runs: Runs) -> None:
    runs.run(
        "learns", algorithm__steps=60, algorithm__samples_per_batch=80, algorithm__samples_per_mini_batch=80,
        algorithm__completions_per_sample=8, algorithm__kl_beta=0.0, optimizer__lr=3e-3, value_model__lr=3e-3,
        credit__value_only_fraction=0.1, checkpoints={"frequency": None},
    )  # fmt: skip
    rewards = [metrics.reward_mean or 0.0 for metrics in read_metrics(runs.store, "learns", STAGE, steps=60)]
    # chance is a half: an even code point or an odd one
    assert np.mean(rewards[:6]) < 0.7 and np.mean(rewards[-5:]) > 0.9
