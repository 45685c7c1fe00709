"""Options of GRPO as a run shows them: in its records, its batches, and after an interruption."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import flows.grpo
from engine.connect import connect
from flows.configs.common import GRPOConfig
from flows.configs.reinforcement import Regularisation
from flows.grpo import grpo
from flows.training.rollout_collection import NothingToLearn
from flows.training.rollout_loop import kl_controller
from storage.chain.records import Chain, CommitRecord
from storage.inspect.accounting import check_accounting
from storage.store import keys
from storage.store.artifacts import ArtifactRef, read_manifest
from storage.store.objects import open_store
from storage.store.tables import read_table
from tests.fixtures.toy import toy_config

STAGE = "0-grpo"
OFTEN_SHORT = {"max_new_tokens": 6, "min_new_tokens": 1, "stop_token_ids": list(range(64))}
"""A quarter of the tiny model's tokens end an answer."""


class Runs:
    """Short runs in one store, and what they left there."""

    def __init__(self, folder: Path, tiny_folder: Path) -> None:
        self.folder, self.tiny_folder = folder, tiny_folder
        self.store = open_store(str(folder / "data"))

    def run(self, run: str, **changes: Any) -> list[CommitRecord]:
        changes = {"grader__path": "tests.fixtures.grading:even_share", "algorithm__steps": 3} | changes
        config = toy_config(self.folder, self.tiny_folder, run=run, **changes)
        asyncio.run(grpo(GRPOConfig.model_validate(config)))
        return self.records(run)

    def records(self, run: str) -> list[CommitRecord]:
        chain = Chain(self.store, run, STAGE, "policy")
        found = [chain.record(step) for step in chain.steps()]
        return [record for record in found if record is not None]

    def rows(self, ref: ArtifactRef) -> list[dict[str, Any]]:
        return read_table(self.store, ref).to_pylist()

    def rollouts(self, run: str, step: int) -> list[dict[str, Any]]:
        """Of all shards of a 0-based step."""
        prefix = keys.step_artifact(run, STAGE, step, "rollouts", 0).rsplit("/", 1)[0]
        folders = sorted((self.folder / "data" / prefix).glob("**/*.parquet"))
        return [row for path in folders for row in pq.read_table(path).to_pylist()]


@pytest.fixture
def runs(prefect_server: str, tmp_path: Path, tiny_folder: Path) -> Runs:
    return Runs(tmp_path, tiny_folder)


def test_the_loss_of_every_option_is_the_one_that_was_asked_for(runs: Runs) -> None:
    asked = {"policy_loss": "cispo", "entropy_coef": 0.01, "importance_cap": 2.0}
    (record,) = runs.run("losses", algorithm__steps=1, regularisation=asked)
    loss = record.request.loss
    assert (loss["kind"], loss["entropy_coef"], loss["importance_cap"]) == ("cispo", 0.01, 2.0)
    # 256 tokens and a model that knows nothing: its entropy is near, and never above, the logarithm of that
    assert 0.9 * np.log(256) < record.metrics["entropy_mean"] <= np.log(300)
    # sampler and trainer are the same weights in the same precision: all weights are 1, but for what min_new_tokens
    # holds back, one end token of about 300
    assert record.metrics["importance_weight_mean"] == pytest.approx(1.0, abs=1 / 200)


@pytest.mark.slow
def test_an_adaptive_kl_coefficient_is_on_the_chain_and_goes_on_after_a_crash(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    adaptive = {"kl_controller": "adaptive", "kl_target": 0.001, "kl_horizon": 100}
    records = runs.run("whole", regularisation=adaptive, algorithm__kl_beta=0.1)
    betas = [record.request.controllers_in["kl_beta"] for record in records]
    assert betas[0] == 0.1 and [record.request.loss["kl_beta"] for record in records] == betas
    for before, after, record in zip(betas, betas[1:], records, strict=False):
        error = min(0.2, max(-0.2, record.metrics["kl_mean"] / 0.001 - 1))
        assert after == pytest.approx(before * (1 + error * 16 / 100), rel=1e-12)
    assert betas[1] != betas[0]
    interrupted(runs, monkeypatch, regularisation=adaptive, algorithm__kl_beta=0.1)
    assert [r.weights_digest for r in runs.records("interrupted")] == [r.weights_digest for r in records]


@pytest.mark.slow
def test_a_penalty_in_the_reward_leaves_the_loss_and_changes_the_advantages(runs: Runs) -> None:
    in_reward = {"kl_in": "reward"}
    records = runs.run("reward-kl", regularisation=in_reward, algorithm__kl_beta=0.5, algorithm__kl_estimator="k1")
    assert [record.request.loss["kl_beta"] for record in records] == [0.0] * 3
    last = records[-1].request
    assert last.reference is not None and last.reference.step == 0
    said = read_manifest(runs.store, last.batch.key).extra["reward_kl"]
    rows = runs.rows(last.batch)
    gaps = [np.array(row["old_logprobs"]) - np.array(row["reference_logprobs"]) for row in rows]
    assert said == pytest.approx(np.concatenate(gaps).mean(), abs=1e-7) and said != 0
    for group in {row["group"] for row in rows}:
        members = [i for i, row in enumerate(rows) if row["group"] == group]
        shaped = np.array([rows[i]["reward"] - 0.5 * gaps[i].sum() for i in members])
        expected = (shaped - shaped.mean()) / (shaped.std() + 1e-8)
        assert [rows[i]["advantages"][0] for i in members] == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_advantages_over_the_whole_batch_have_mean_0_and_variance_1_over_its_tokens(
    runs: Runs, estimator: str
) -> None:
    records = runs.run("whole-batch", algorithm__steps=1, algorithm__advantage_estimator=estimator)
    rows = runs.rows(records[0].request.batch)
    tokens = np.concatenate([row["advantages"] for row in rows])
    assert (tokens.mean(), tokens.std()) == pytest.approx((0.0, 1.0), abs=1e-5)
    by_reward = sorted(rows, key=lambda row: row["reward"])
    if estimator == "reinforce_plus_plus":  # no baseline: the better the reward, the larger the advantage
        found = [row["advantages"][0] for row in by_reward]
        assert found == sorted(found) and len(set(found)) > 1


@pytest.mark.slow
def test_rollouts_come_from_the_policy_that_the_staleness_says(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    records = runs.run("stale", algorithm__steps=4, rules={"max_staleness": 2})
    states = [records[0].request.parent.state, *(record.state for record in records)]
    for step in range(4):
        assert {row["policy_state"] for row in runs.rollouts("stale", step)} == {states[max(0, step - 2)]}
    interrupted(runs, monkeypatch, algorithm__steps=4, rules={"max_staleness": 2})
    assert [r.weights_digest for r in runs.records("interrupted")] == [r.weights_digest for r in records]


def test_dynamic_sampling_draws_other_prompts_for_groups_that_teach_nothing(runs: Runs) -> None:
    # 4 prompts a step; of the prompts 0…9, only even ones are graded with anything but 0
    records = runs.run(
        "dynamic", algorithm__steps=1, grader__path="tests.fixtures.grading:only_even_prompts",
        rules={"dynamic_sampling": True, "max_refill_rounds": 8, "refill_end": "fail"},
    )  # fmt: skip
    rows = runs.rows(records[0].request.batch)
    groups: dict[str, set[float]] = {}
    for row in rows:
        groups.setdefault(row["group"], set()).add(row["reward"])
    assert len(groups) >= 4 and all(len(rewards) > 1 for rewards in groups.values())
    drawn = runs.rollouts("dynamic", 0)
    assert len({row["prompt_id"] for row in drawn}) > len(groups)
    cursor = records[0].request.cursor_out
    assert cursor["epoch"] * 10 + cursor["index"] == len(drawn) / 4


def test_groups_that_never_differ_fail_the_run_when_asked(runs: Runs) -> None:
    with pytest.raises(NothingToLearn, match="after 2 draws"):
        runs.run(
            "hopeless", grader__path="tests.fixtures.grading:nothing",
            rules={"dynamic_sampling": True, "max_refill_rounds": 1, "refill_end": "fail"},
        )  # fmt: skip


def test_answers_that_were_cut_leave_the_loss_and_count_in_their_groups(runs: Runs) -> None:
    (record,) = runs.run("cut", algorithm__steps=1, sampling=OFTEN_SHORT, rules={"mask_truncated": True})
    drawn = runs.rollouts("cut", 0)
    ended = {(row["prompt_id"], row["completion"]) for row in drawn if row["stop_reason"] != "length"}
    kept = {(row["group"], row["completion"]) for row in runs.rows(record.request.batch)}
    assert kept == ended and 0 < len(ended) < len(drawn)


@pytest.mark.slow
def test_a_penalty_on_length_moves_the_group_and_not_the_reward(runs: Runs) -> None:
    rules = {"overlong_buffer": 3, "overlong_penalty": 10.0}
    (record,) = runs.run("long", algorithm__steps=1, rules=rules, sampling=OFTEN_SHORT)
    rows = runs.rows(record.request.batch)
    assert all(0 <= row["reward"] <= 1 for row in rows)
    mixed = 0
    for group in {row["group"] for row in rows}:
        lengths, advantages = zip(
            *sorted((len(r["advantages"]), r["advantages"][0]) for r in rows if r["group"] == group), strict=True
        )
        if lengths[0] <= 3 and lengths[-1] == 6:  # unpunished, and ten times what a grade can give
            assert advantages[0] > 0 > advantages[-1]
            mixed += 1
    assert mixed


@pytest.mark.slow
def test_whatever_the_rules_leave_out_every_prompt_is_accounted_for(runs: Runs) -> None:
    records = runs.run(
        "rules", algorithm__steps=3, grader__path="tests.fixtures.grading:only_even_prompts", sampling=OFTEN_SHORT,
        rules={"max_staleness": 1, "mask_truncated": True, "dynamic_sampling": True, "overlong_buffer": 2},
    )  # fmt: skip
    assert [check_accounting(runs.store, record) for record in records] == [[], [], []]
    left_out = [len(runs.rollouts("rules", step)) - len(runs.rows(r.request.batch)) for step, r in enumerate(records)]
    assert min(left_out) > 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rules": {"refill_end": "fail"}}, "dynamic_sampling"),
        ({"rules": {"overlong_penalty": 2.0}}, "overlong_buffer"),
        ({"regularisation": {"kl_target": 0.2}}, "adaptive"),
        ({"regularisation": {"policy_loss": "ppo"}}, "policy_loss"),
    ],
)
def test_options_that_would_do_nothing_are_refused(tmp_path: Path, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        GRPOConfig.model_validate(toy_config(tmp_path, tmp_path, **wrong))


def test_an_adaptive_coefficient_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="stays 0"):
        kl_controller(Regularisation(kl_controller="adaptive"), 0.0)


def test_rules_and_regularisation_decide_the_result(tmp_path: Path) -> None:
    plain = GRPOConfig.model_validate(toy_config(tmp_path, tmp_path)).semantic()
    assert plain["rules"]["max_staleness"] == 0 and plain["regularisation"]["entropy_coef"] == 0.0
    stale = GRPOConfig.model_validate(toy_config(tmp_path, tmp_path, rules={"max_staleness": 1})).semantic()
    assert stale["rules"]["max_staleness"] == 1


class Interrupted(BaseException):
    """Ends a run as a kill does."""


def interrupted(runs: Runs, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """The run "interrupted", stopped before its third step and taken up by a process that holds nothing."""
    prepare: Any = flows.grpo.prepare_batch

    async def stop(*arguments: Any, step: int) -> ArtifactRef:
        if step == 2:
            raise Interrupted
        return await prepare(*arguments, step=step)

    with monkeypatch.context() as patched:
        patched.setattr(flows.grpo, "prepare_batch", stop)
        with pytest.raises(Interrupted):
            runs.run("interrupted", **changes)
    connect.cache_clear()
    runs.run("interrupted", **changes)
