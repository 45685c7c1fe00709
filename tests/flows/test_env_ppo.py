"""Tests of `env_ppo` from end to end on a toy: its two chains, the credit of its batches, and that a run that crashes
between the two commits of an iteration resumes. `test_env_learning` tests what it learns."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flows.ppo
from engine.handles import Model, TrainingModel
from engine.text.threads import StringThread
from flows.configs.environments import ENVPPOConfig
from flows.env_ppo import ENVPPO, env_ppo
from flows.recipe import RecipeContext
from storage.chain.records import CommitRecord
from storage.inspect.accounting import check_accounting, step_inputs
from tests.fixtures.engines import DETERMINISTIC
from tests.fixtures.guessing import GuessFactory, guess_config
from tests.fixtures.runs.flow_runs import FlowRuns
from tests.fixtures.runs.ppo_runs import PPO_DEFAULTS, assert_adapters_clip_and_whitening, assert_kill_changes_no_byte

STAGE = "0-env_ppo"
DEFAULTS = PPO_DEFAULTS | {"environment__arguments": {"grade_each": True}, "algorithm__steps": 4}


def ppo_runs(folder: Path, tiny_folder: Path) -> FlowRuns:
    return FlowRuns(
        folder, tiny_folder, env_ppo, ENVPPOConfig, stage=STAGE, make_config=guess_config, defaults=DEFAULTS
    )


def trajectories(runs: FlowRuns, record: CommitRecord) -> list[dict[str, Any]]:
    """The rows of a step's trajectories. A row is a segment of an episode."""
    tables = [runs.rows(ref) for ref in step_inputs(runs.store, record).rollouts]
    return list(chain.from_iterable(tables))


@pytest.fixture(scope="module")
def runs(prefect_server: str, tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> FlowRuns:
    """Runs with one finished run, `whole`, of four iterations. The first two train the value model alone."""
    runs = ppo_runs(tmp_path_factory.mktemp("env_ppo"), tiny_folder)
    heldout = {"kind": "file", "path": str(runs.folder / "secrets.jsonl"), "limit": 3}
    runs.run("whole", data__heldout=heldout)
    return runs


def test_policy_and_value_step_over_one_batch_of_episodes(runs: FlowRuns) -> None:
    policies, values = runs.records("whole", "policy"), runs.records("whole", "value")
    assert len(policies) == len(values) == 4
    assert [p.request.batch for p in policies] == [v.request.batch for v in values]
    assert [record.updates for record in policies] == [0, 0, 1, 1]
    assert [record.updates for record in values] == [1, 1, 1, 1]
    digests = runs.digests("whole", "policy")
    assert digests[0] == digests[1] != digests[2] != digests[3]
    assert all(p.request.loss["kl_beta"] == 0 and p.request.reference is not None for p in policies)  # in the reward
    for record in policies:
        assert {ref.kind for ref in step_inputs(runs.store, record).rollouts} == {"rollouts"}
    assert [check_accounting(runs.store, record) for record in (*policies, *values)] == [[]] * 8


def by_episode(rows: list[dict[str, Any]], prompt_column: str) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Rows by their episode: the prompt in the column of that name, and the completion."""
    episodes: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        episodes[row[prompt_column], row["completion"]].append(row)
    return episodes


def expected_rewards(batch_rows: list[dict[str, Any]], segments: list[dict[str, Any]]) -> np.ndarray:
    """Per trained token of an episode: the KL penalty, and on the last token of a graded turn the grade."""
    gaps = [np.array(row["old_logprobs"]) - np.array(row["reference_logprobs"]) for row in batch_rows]
    rewards, end = -0.1 * np.concatenate(gaps), 0
    for segment in segments:
        grade_of_turn = dict(zip(segment["graded_turns"], segment["grades"], strict=True))
        for turn, count in enumerate(segment["turn_tokens"], segment["first_turn"]):
            end += count
            if turn in grade_of_turn:
                rewards[end - 1] += grade_of_turn[turn]
    assert end == len(rewards)
    return rewards


def assert_credited_by_the_definition(runs: FlowRuns, record: CommitRecord) -> int:
    """Compares every batch row of a step with its trajectories. Returns the number of segments with a successor."""
    segments_of = by_episode(trajectories(runs, record), "prompt_id")
    rows_of = by_episode(runs.rows(record.request.batch), "group")
    assert rows_of.keys() == segments_of.keys()
    for episode, segments in segments_of.items():
        batch_rows = rows_of[episode]
        assert [row["token_ids"] for row in batch_rows] == [segment["token_ids"] for segment in segments]
        rewards = expected_rewards(batch_rows, segments)

        # Returns and advantages from the last token to the first. The value after the end of the episode is 0.
        values = [*chain.from_iterable(row["old_values"] for row in batch_rows), 0.0]
        returns, advantages = [0.0], [0.0]
        for t in reversed(range(len(rewards))):
            returns.insert(0, rewards[t] + returns[0])
            advantages.insert(0, rewards[t] + values[t + 1] - values[t] + 0.95 * advantages[0])
        batch_returns = chain.from_iterable(row["returns"] for row in batch_rows)
        batch_advantages = chain.from_iterable(row["advantages"] for row in batch_rows)
        assert list(batch_returns) == pytest.approx(returns[:-1], abs=1e-5)
        assert list(batch_advantages) == pytest.approx(advantages[:-1], abs=1e-5)
    return sum(len(segments) - 1 for segments in segments_of.values())


def test_rewards_values_and_credit_of_a_batch_by_the_definitions(runs: FlowRuns) -> None:
    record = runs.records("whole", "policy")[-1]
    assert_credited_by_the_definition(runs, record)
    assert any(len(row["graded_turns"]) > 1 for row in trajectories(runs, record))


@pytest.mark.slow
def test_credit_flows_over_a_rewritten_history(runs: FlowRuns) -> None:
    runs.run("forgets", algorithm__steps=2, environment__arguments={"forget": True})
    for record in runs.records("forgets", "policy"):
        assert assert_credited_by_the_definition(runs, record) > 0


def test_heldout_episodes_are_played_before_and_after(runs: FlowRuns) -> None:
    result = runs.run("whole")  # a finished run returns its result again
    assert result["heldout"]["n"] == 3 and result["policy"] == runs.chain("whole", "policy").head().uri


@pytest.mark.slow  # the default suite has one such test, of `ppo`
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("task_name", ["take_gradient_step", "take_value_step", "prepare_batch"])
def test_a_run_that_ends_between_two_commits_resumes_to_the_same_bytes(
    runs: FlowRuns, monkeypatch: pytest.MonkeyPatch, task_name: str, step: int
) -> None:
    assert_kill_changes_no_byte(runs, monkeypatch, flows.ppo, task_name, step)


@pytest.mark.slow
def test_adapters_clipped_values_and_whitening(runs: FlowRuns) -> None:
    assert_adapters_clip_and_whitening(runs)


# -- the class ---------------------------------------------------------------------------------------------------

SECRETS = [StringThread([("user", str(digit))], {"secret": digit}) for digit in range(4)]


async def spawned(folder: Path, tiny_folder: Path) -> tuple[TrainingModel, TrainingModel]:
    context = RecipeContext.open("recipe", store=str(folder / "data"), engine=DETERMINISTIC)
    builder = Model(str(tiny_folder)).to_builder(context)
    policy, value = await builder.spawn_train("policy"), await builder.into_scoring_model().spawn_train("value")
    return policy.max_gen_len(4), value


@pytest.mark.slow
async def test_the_class_takes_a_factory_of_this_process_and_resumes(
    prefect_server: str, tmp_path: Path, tiny_folder: Path
) -> None:
    heads = []
    for steps in (2, 3, 3):
        policy, value = await spawned(tmp_path, tiny_folder)
        trainer = ENVPPO(
            SECRETS, policy, value, GuessFactory(guesses=2), max_num_ppo_steps=steps, value_only_fraction=0.0,
            samples_per_batch=4, lr_policy=1e-3,
        )  # fmt: skip
        assert (trainer.kl.beta, trainer.loss.clip_low, trainer.loss.kl_beta) == (0.1, 0.1, 0.0)
        assert trainer.reward_kl is not None and trainer.reward_kl.estimator == "k1"
        heads.append((await trainer.run(), await value.policy()))
    assert [(head.step, value.step) for head, value in heads] == [(2, 2), (3, 3), (3, 3)]
    assert heads[1] == heads[2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value_model__name": "policy"}, "two names"),
        ({"credit__value_only_fraction": 1.0}, "less than 1"),
        ({"algorithm__advantage_estimator": "reinforce_plus_plus"}, "gae"),
        ({"rules": {"dynamic_sampling": True}}, "Extra inputs are not permitted"),
        ({"grader__path": "a:b"}, "Extra inputs are not permitted"),
        ({"algorithm__steps": None, "optimizer__schedule": "constant"}, "a share of nothing"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_loads(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ppo_runs(tmp_path, tmp_path).config("wrong", **changes)


def test_defaults_are_the_documents(tmp_path: Path) -> None:
    body = guess_config(tmp_path, tmp_path, algorithm={"steps": 3})
    config = ENVPPOConfig.model_validate(body)
    algorithm, credit = config.algorithm, config.credit
    assert (algorithm.kl_beta, algorithm.clip_range, algorithm.completions_per_sample) == (0.1, 0.1, 1)
    assert (credit.value_only_fraction, credit.gae_lambda, credit.gae_gamma) == (0.25, 0.95, 1.0)
    assert config.title.startswith("env_ppo ")
    assert {"environment", "value_model", "credit"} <= config.semantic().keys()
