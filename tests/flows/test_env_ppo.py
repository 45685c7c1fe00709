"""`env_ppo` from end to end on a toy: two chains over one batch of episodes, the value model first and alone, and what
a crash between the two commits of an iteration does. What it learns is in test_env_learning."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flows.env_ppo
from engine.connect import connect
from engine.handles import Model, TrainingModel
from engine.specs.engine import LocalEngineSpec
from engine.text.threads import StringThread
from flows.configs.env_ppo import ENVPPOConfig
from flows.env_ppo import ENVPPO, env_ppo
from flows.recipe import RecipeContext
from storage.chain.records import Chain, CommitRecord
from storage.inspect.accounting import check_accounting, step_inputs
from storage.store.artifacts import ArtifactRef
from storage.store.objects import open_store
from storage.store.tables import read_table
from tests.fixtures.guessing import GuessFactory, guess_config

STAGE = "0-env_ppo"


class Runs:
    """Short runs of the toy in one store."""

    def __init__(self, folder: Path, tiny_folder: Path) -> None:
        self.folder, self.tiny_folder = folder, tiny_folder
        self.store = open_store(str(folder / "data"))

    def config(self, run: str, **changes: Any) -> ENVPPOConfig:
        changes = {
            "environment__arguments": {"grade_each": True},
            "algorithm__steps": 4,
            "algorithm__completions_per_sample": 1,
            "algorithm__kl_beta": 0.1,
            "value_model__lr": 1e-3,
            "credit__value_only_fraction": 0.5,
        } | changes
        return ENVPPOConfig.model_validate(guess_config(self.folder, self.tiny_folder, run=run, **changes))

    def run(self, run: str, **changes: Any) -> dict[str, Any]:
        return asyncio.run(env_ppo(self.config(run, **changes)))

    def chain(self, run: str, model: str) -> Chain:
        return Chain(self.store, run, STAGE, model)

    def records(self, run: str, model: str) -> list[CommitRecord]:
        chain = self.chain(run, model)
        return [record for step in chain.steps() if (record := chain.record(step)) is not None]

    def digests(self, run: str, model: str) -> list[str | None]:
        return [record.weights_digest for record in self.records(run, model)]

    def rows(self, ref: ArtifactRef) -> list[dict[str, Any]]:
        return read_table(self.store, ref).to_pylist()

    def played(self, record: CommitRecord) -> list[dict[str, Any]]:
        """The segments of a step's episodes."""
        return [row for ref in step_inputs(self.store, record).rollouts for row in self.rows(ref)]


@pytest.fixture(scope="module")
def runs(prefect_server: str, tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Runs:
    """With one finished run of four iterations, `whole`: two of the value model alone, two of both."""
    found = Runs(tmp_path_factory.mktemp("env_ppo"), tiny_folder)
    heldout = {"kind": "file", "path": str(found.folder / "secrets.jsonl"), "limit": 3}
    found.run("whole", data__heldout=heldout)
    return found


def test_policy_and_value_step_over_one_batch_of_episodes(runs: Runs) -> None:
    policies, values = runs.records("whole", "policy"), runs.records("whole", "value")
    assert len(policies) == len(values) == 4
    assert [p.request.batch for p in policies] == [v.request.batch for v in values]
    assert [record.updates for record in policies] == [0, 0, 1, 1]
    assert [record.updates for record in values] == [1, 1, 1, 1]
    digests = runs.digests("whole", "policy")
    assert digests[0] == digests[1] != digests[2] != digests[3]
    assert all(p.request.loss["kl_beta"] == 0 and p.request.reference is not None for p in policies)  # in the reward
    assert {ref.kind for record in policies for ref in step_inputs(runs.store, record).rollouts} == {"trajectories"}
    assert [check_accounting(runs.store, record) for record in (*policies, *values)] == [[]] * 8


def assert_credited_by_the_definition(runs: Runs, record: CommitRecord) -> int:
    """Every batch row of a step against its trajectories; how many segments had a successor."""
    segments: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in runs.played(record):
        segments[row["prompt_id"], row["completion"]].append(row)
    rows: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in runs.rows(record.request.batch):
        rows[row["group"], row["completion"]].append(row)
    assert rows.keys() == segments.keys()
    for name, played in segments.items():
        mine = rows[name]
        assert [row["token_ids"] for row in mine] == [segment["token_ids"] for segment in played]
        gap = np.concatenate([np.array(row["old_logprobs"]) - np.array(row["reference_logprobs"]) for row in mine])
        rewards, end = -0.1 * gap, 0
        for segment in played:
            for turn, count in enumerate(segment["turn_tokens"], segment["first_turn"]):
                end += count
                if turn in segment["graded_turns"]:
                    rewards[end - 1] += segment["grades"][segment["graded_turns"].index(turn)]
        assert end == len(rewards)
        values, returns, advantages = [v for row in mine for v in row["old_values"]] + [0.0], [0.0], [0.0]
        for t in reversed(range(end)):
            returns.insert(0, rewards[t] + returns[0])
            advantages.insert(0, rewards[t] + values[t + 1] - values[t] + 0.95 * advantages[0])
        assert [v for row in mine for v in row["returns"]] == pytest.approx(returns[:-1], abs=1e-5)
        assert [v for row in mine for v in row["advantages"]] == pytest.approx(advantages[:-1], abs=1e-5)
    return sum(len(played) - 1 for played in segments.values())


def test_rewards_values_and_credit_of_a_batch_by_the_definitions(runs: Runs) -> None:
    record = runs.records("whole", "policy")[-1]
    assert_credited_by_the_definition(runs, record)
    assert any(len(row["graded_turns"]) > 1 for row in runs.played(record))


@pytest.mark.slow
def test_credit_flows_over_a_rewritten_history(runs: Runs) -> None:
    runs.run("forgets", algorithm__steps=2, environment__arguments={"forget": True})
    for record in runs.records("forgets", "policy"):
        assert assert_credited_by_the_definition(runs, record) > 0


def test_heldout_episodes_are_played_before_and_after(runs: Runs) -> None:
    result = runs.run("whole")  # finished: it says again what it said
    assert result["heldout"]["n"] == 3 and result["policy"] == runs.chain("whole", "policy").head().uri


class Interrupted(BaseException):
    """Ends a run as a kill does."""


@pytest.mark.parametrize(
    ("at", "where"),
    [
        pytest.param(at, where, marks=pytest.mark.slow)  # one of PPO's is in the default suite
        for at in (1, 3)
        for where in ("take_gradient_step", "take_value_step", "prepare_ppo_episode_batch")
    ],
)
def test_a_run_that_ends_between_two_commits_resumes_to_the_same_bytes(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, where: str, at: int
) -> None:
    run, call = f"cut-{where}-{at}", getattr(flows.env_ppo, where)

    async def stop(*arguments: Any, step: int, **named: Any) -> Any:
        if step == at:
            raise Interrupted
        return await call(*arguments, step=step, **named)

    with monkeypatch.context() as patched:
        patched.setattr(flows.env_ppo, where, stop)
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
    advantages = np.concatenate([row["advantages"] for row in runs.rows(value.request.batch)])
    assert (advantages.mean(), advantages.std()) == pytest.approx((0.0, 1.0), abs=1e-4)
    assert [record.updates for record in runs.records("options", "policy")] == [1, 1]


# -- the class ---------------------------------------------------------------------------------------------------

SECRETS = [StringThread([("user", str(digit))], {"secret": digit}) for digit in range(4)]


async def spawned(folder: Path, tiny_folder: Path) -> tuple[TrainingModel, TrainingModel]:
    spec = LocalEngineSpec(deterministic=True, threads=1)
    context = RecipeContext.open("recipe", store=str(folder / "data"), engine=spec)
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
    ("wrong", "said"),
    [
        ({"value_model__name": "policy"}, "two names"),
        ({"credit__value_only_fraction": 1.0}, "less than 1"),
        ({"algorithm__advantage_estimator": "reinforce_plus_plus"}, "gae"),
        ({"rules": {"dynamic_sampling": True}}, "Extra inputs are not permitted"),
        ({"grader__path": "a:b"}, "Extra inputs are not permitted"),
        ({"algorithm__steps": None, "optimizer__schedule": "constant"}, "a share of nothing"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_loads(tmp_path: Path, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Runs(tmp_path, tmp_path).config("wrong", **wrong)


def test_defaults_are_the_documents(tmp_path: Path) -> None:
    body = guess_config(tmp_path, tmp_path, algorithm={"steps": 3})
    config = ENVPPOConfig.model_validate(body)
    algorithm, credit = config.algorithm, config.credit
    assert (algorithm.kl_beta, algorithm.clip_range, algorithm.completions_per_sample) == (0.1, 0.1, 1)
    assert (credit.value_only_fraction, credit.gae_lambda, credit.gae_gamma) == (0.25, 0.95, 1.0)
    assert config.title.startswith("env_ppo ")
    assert {"environment", "value_model", "credit"} <= config.semantic().keys()
