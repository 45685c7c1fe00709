"""Runs of `env_grpo` and `env_gspo` with an agent: a program that calls the policy over HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from flows.configs.environments import ENVGRPOConfig, ENVGSPOConfig
from flows.env_grpo import env_grpo
from flows.env_gspo import env_gspo
from flows.training.options import episode_plan
from storage.inspect.accounting import check_accounting, step_inputs
from tasks.environments.spec import agent_spec
from tasks.plans import AgentPlan
from tests.fixtures.guessing import PLAIN_AGENT, agent_config, guess_config
from tests.fixtures.runs.flow_runs import FlowRuns


@pytest.fixture
def runs(prefect_server: str, tmp_path: Path, tiny_folder: Path) -> FlowRuns:
    return FlowRuns(tmp_path, tiny_folder, env_grpo, ENVGRPOConfig, stage="0-env_grpo", make_config=agent_config)


def test_three_steps_twice_are_equal(runs: FlowRuns) -> None:
    records = runs.train("first")
    runs.run("second")
    assert len(records) == 3
    assert runs.digests("first") == runs.digests("second")
    assert len(set(runs.digests("first"))) == 3  # every step moved the weights
    for record, line in zip(records, runs.metrics("first"), strict=True):
        assert check_accounting(runs.store, record) == []
        assert (line["completions"], line["masked"]) == (8, 0)
        assert (line["turns_mean"], line["segments_mean"], line["failed_attempts_mean"]) == (2, 1, 0)
        assert line["logprob_gap"] < 1e-5
    for batch in runs.tables("first", "batch"):
        for _, row in batch.iterrows():
            assert len(set(row["advantages"])) == 1  # both turns have the advantage of the one grade


def test_gspo_trains_the_one_grade_of_an_agent(prefect_server: str, tmp_path: Path, tiny_folder: Path) -> None:
    runs = FlowRuns(tmp_path, tiny_folder, env_gspo, ENVGSPOConfig, stage="0-env_gspo", make_config=agent_config)
    assert len({record.state for record in runs.train("gspo", algorithm__steps=2)}) == 2


def test_answers_take_newer_weights_in_flight(runs: FlowRuns) -> None:
    records = runs.train(
        "in-flight", rules__max_staleness=1, rules__weight_updates="in_flight", rules__segment_seconds=0.02,
        engine__sampler={"kind": "torch", "own_lane": True},
    )  # fmt: skip
    states = [runs.chain("in-flight").policy(step).state for step in range(4)]
    for record in records:
        step = record.request.parent.step
        assert check_accounting(runs.store, record) == []
        for ref in step_inputs(runs.store, record).rollouts:
            for row in runs.rows(ref):
                assert sum(row["policy_tokens"]) == len(row["logprobs"]) > 0
                assert set(row["policy_states"]) <= set(states[max(0, step - 1) : step + 1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"agent": None}, "and neither was given"),
        ({"environment": {"path": "a:b"}}, "and both was given"),
        ({"agent": {}}, "and neither was given; give one of them"),
        ({"agent": {"path": "a:b", "command": ["c"]}}, "and both was given; give one of them"),
        ({"data__max_prompt_tokens": 5}, "an agent writes its prompts itself"),
    ],
)
def test_what_does_not_go_together_is_refused(
    changes: dict, message: str, tmp_path: Path, tiny_folder: Path
) -> None:
    config = agent_config(tmp_path, tiny_folder)
    for name, value in changes.items():
        group, _, field = name.partition("__")
        if field:
            config[group] |= {field: value}
        else:
            config[group] = value
    with pytest.raises(ValidationError, match=message):
        ENVGRPOConfig.model_validate(config)


def test_a_config_without_an_agent_has_the_bytes_that_it_had(tmp_path: Path, tiny_folder: Path) -> None:
    """A run that began before agents existed can be resumed."""
    config = ENVGRPOConfig.model_validate(guess_config(tmp_path, tiny_folder))
    assert "agent" not in config.semantic() and "agent" not in config.model_dump()
    with_agent = ENVGRPOConfig.model_validate(agent_config(tmp_path, tiny_folder))
    assert with_agent.semantic()["agent"] == {
        "path": None, "command": list(PLAIN_AGENT), "max_calls": 32, "max_tokens": None, "seconds": 600.0,
        "memory_mib": None,
    }  # fmt: skip
    assert with_agent.longest_rollout == 32 * 6


def test_limits_of_environments_are_refused_with_an_agent() -> None:
    plan = AgentPlan(agent=agent_spec(command=PLAIN_AGENT))
    assert episode_plan(plan, {}) is plan
    with pytest.raises(ValueError, match="give the limits in the AgentPlan"):
        episode_plan(plan, {"max_turns": 3})
