"""Tests of the options of GRPO: what they change in the records and batches of a run, also after a crash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import flows.grpo
from engine.local.verify import verify_run
from engine.losses.policy_gradient import POLICY_LOSSES, ClipCovSpec, KLCovSpec
from engine.workspace import connect
from flows.configs.common import GRPOAlgorithm, GRPOConfig
from flows.configs.reinforcement import CovarianceSettings, Regularisation, old_logprobs_of_step
from flows.training.rollout_collection import BatchNotFilled
from flows.training.rollout_loop import kl_controller, policy_loss
from storage.inspect.accounting import check_accounting
from storage.store.artifacts import read_manifest
from tasks.batches.advantages import TokenSelection
from tests.fixtures.runs.flow_runs import FlowRuns, grpo_runs
from tests.fixtures.runs.interruption import Killed, interrupt_at
from tests.fixtures.toy import toy_config

OFTEN_SHORT = {"max_new_tokens": 6, "min_new_tokens": 1, "stop_token_ids": list(range(64))}
"""A quarter of the tiny model's tokens end an answer."""


def rollouts(runs: FlowRuns, run: str, step: int) -> list[dict[str, Any]]:
    """The rollouts of all shards of a 0-based step."""
    rows = []
    for path in runs.files(run, f"steps/{step:06d}/rollouts"):
        rows += pq.read_table(path).to_pylist()
    return rows


@pytest.fixture
def runs(prefect_server: str, tmp_path: Path, tiny_folder: Path) -> FlowRuns:
    return grpo_runs(tmp_path, tiny_folder, algorithm__steps=3)


def test_the_loss_of_every_option_is_the_one_that_was_asked_for(runs: FlowRuns) -> None:
    """The second step has completions of the policy before the first. Both are redone to the bit."""
    options = {"policy_loss": "cispo", "entropy_coef": 0.01, "importance_cap": 2.0}
    changes = {"algorithm__steps": 2, "regularisation": options, "rules": {"max_staleness": 1}}
    record, stale = runs.train("losses", **changes)
    loss = record.request.loss
    assert (loss["kind"], loss["entropy_coef"], loss["importance_cap"]) == ("cispo", 0.01, 2.0)
    # 256 tokens and a model that knows nothing: its entropy is near, and never above, the logarithm of that
    assert 0.9 * np.log(256) < record.metrics["entropy_mean"] <= np.log(300)
    # sampler and trainer are the same weights in the same precision: all weights are 1, but for what min_new_tokens
    # holds back, one end token of about 300
    assert record.metrics["importance_weight_mean"] == pytest.approx(1.0, abs=1 / 200)
    assert {row["policy_state"] for row in rollouts(runs, "losses", 1)} == {record.request.parent.state}
    assert stale.request.old_logprobs == "forward"
    assert stale.metrics["logprob_gap_mean"] > 2 * record.metrics["logprob_gap_mean"]
    (chain,) = verify_run(runs.store, "losses").chains
    assert (chain.redone, chain.problems) == (2, ())


@pytest.mark.slow
def test_an_adaptive_kl_coefficient_is_on_the_chain_and_goes_on_after_a_crash(
    runs: FlowRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    adaptive = {"kl_controller": "adaptive", "kl_target": 0.001, "kl_horizon": 100}
    records = runs.train("whole", regularisation=adaptive, algorithm__kl_beta=0.1)
    betas = [record.request.controllers_in["kl_beta"] for record in records]
    assert betas[0] == 0.1 and [record.request.loss["kl_beta"] for record in records] == betas
    for before, after, record in zip(betas, betas[1:], records, strict=False):
        error = min(0.2, max(-0.2, record.metrics["kl_mean"] / 0.001 - 1))
        assert after == pytest.approx(before * (1 + error * 16 / 100), rel=1e-12)
    assert betas[1] != betas[0]
    run_killed_and_resumed(runs, monkeypatch, regularisation=adaptive, algorithm__kl_beta=0.1)
    assert runs.digests("interrupted") == [record.weights_digest for record in records]


@pytest.mark.slow
def test_a_penalty_in_the_reward_leaves_the_loss_and_changes_the_advantages(runs: FlowRuns) -> None:
    in_reward = {"kl_in": "reward"}
    records = runs.train("reward-kl", regularisation=in_reward, algorithm__kl_beta=0.5, algorithm__kl_estimator="k1")
    assert [record.request.loss["kl_beta"] for record in records] == [0.0] * 3
    last = records[-1].request
    assert last.reference is not None and last.reference.step == 0
    reward_kl = read_manifest(runs.store, last.batch.key).extra["reward_kl"]
    rows = runs.rows(last.batch)
    gaps = [np.array(row["old_logprobs"]) - np.array(row["reference_logprobs"]) for row in rows]
    assert reward_kl == pytest.approx(np.concatenate(gaps).mean(), abs=1e-7) and reward_kl != 0
    for group in {row["group"] for row in rows}:
        indices = [i for i, row in enumerate(rows) if row["group"] == group]
        rewards = np.array([rows[i]["reward"] - 0.5 * gaps[i].sum() for i in indices])
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        assert [rows[i]["advantages"][0] for i in indices] == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_advantages_over_the_whole_batch_have_mean_0_and_variance_1_over_its_tokens(
    runs: FlowRuns, estimator: str
) -> None:
    records = runs.train("whole-batch", algorithm__steps=1, algorithm__advantage_estimator=estimator)
    rows = runs.rows(records[0].request.batch)
    tokens = np.concatenate([row["advantages"] for row in rows])
    assert (tokens.mean(), tokens.std()) == pytest.approx((0.0, 1.0), abs=1e-5)
    by_reward = sorted(rows, key=lambda row: row["reward"])
    if estimator == "reinforce_plus_plus":  # no baseline: the better the reward, the larger the advantage
        advantages = [row["advantages"][0] for row in by_reward]
        assert advantages == sorted(advantages) and len(set(advantages)) > 1


@pytest.mark.slow
def test_only_the_best_of_a_prompt_is_trained_with_k_of_all_completions(runs: FlowRuns) -> None:
    """With k = n there is one set: the best completion gains what the second best lacks."""
    pass_at_4 = {"algorithm__advantage_estimator": "pass_at_k", "algorithm__pass_k": 4}
    records = runs.train("pass", algorithm__steps=1, algorithm__completions_per_sample=4, **pass_at_4)
    rows = runs.rows(records[0].request.batch)
    for group in {row["group"] for row in rows}:
        members = [row for row in rows if row["group"] == group]
        *_, second, best = sorted(row["reward"] for row in members)
        gains = [best - second if row["reward"] == best else 0.0 for row in members]
        assert [row["advantages"][0] for row in members] == pytest.approx(gains, abs=1e-6)
    assert any(row["advantages"][0] > 0 for row in rows)


@pytest.mark.slow
def test_selected_tokens_and_parts_of_rewards_are_the_same_after_a_crash_and_in_a_redo(
    runs: FlowRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two graders' parts are normalised apart; a tenth of the tokens has no gradient, chosen when the batch is made."""
    graders = [{"path": "tests.fixtures.toy:digit_share"}, {"path": "tests.fixtures.grading:even_share"}]
    changes = {
        "grader": {"path": "tasks.graders:CombinedGrader", "arguments": {"grader_key": "both", "graders": graders}},
        "regularisation": {"policy_loss": "clip_cov", "covariance": {"fraction": 0.1, "low": 0.0, "high": 100.0}},
        "algorithm__advantage_estimator": "gdpo",
    }
    records = runs.train("whole", **changes)
    for record, line in zip(records, runs.metrics("whole"), strict=True):
        assert 0 < record.metrics["selected_fraction_mean"] <= 0.11
        assert line["reward_mean"] == pytest.approx(sum(line["reward_parts"].values()) / 2)
    run_killed_and_resumed(runs, monkeypatch, **changes)
    assert runs.digests("interrupted") == [record.weights_digest for record in records]
    (chain,) = verify_run(runs.store, "whole").chains
    assert (chain.redone, chain.problems) == (3, ())


@pytest.mark.slow
def test_rollouts_come_from_the_policy_that_the_staleness_says(runs: FlowRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"rules": {"max_staleness": 2}}
    records = runs.train("stale", algorithm__steps=4, **changes)
    states = [records[0].request.parent.state, *(record.state for record in records)]
    for step in range(4):
        assert {row["policy_state"] for row in rollouts(runs, "stale", step)} == {states[max(0, step - 2)]}
    run_killed_and_resumed(runs, monkeypatch, algorithm__steps=4, **changes)
    assert runs.digests("interrupted") == [record.weights_digest for record in records]


def test_the_weights_of_stale_completions_are_those_of_the_policy_that_sampled(runs: FlowRuns) -> None:
    """min(exp(o - s), cap): o of the policy before the step, s of the policy before the step before."""
    _, stale = runs.train(
        "weights", algorithm__steps=2, algorithm__samples_per_mini_batch=8, rules={"max_staleness": 1},
        regularisation={"importance_cap": 1.1},
    )  # fmt: skip
    rows = runs.rows(stale.request.batch)
    old, sampler = (np.concatenate([row[name] for row in rows]) for name in ("old_logprobs", "sampler_logprobs"))
    weights = np.minimum(np.exp(old - sampler), 1.1)
    assert stale.metrics["importance_weight_mean"] == pytest.approx(weights.mean(), rel=1e-5)
    assert weights.std() > 0.02 and (weights == 1.1).any()


def test_a_mask_leaves_out_the_stale_tokens_that_are_too_far(runs: FlowRuns) -> None:
    """IcePop: o of the policy before the step, s of the policy before the step before, exp(o - s) in [0.8, 1.25]."""
    mask = {"kind": "token_ratio", "low": 0.8, "high": 1.25}
    _, stale = runs.train(
        "masked", algorithm__steps=2, algorithm__samples_per_mini_batch=8, rules={"max_staleness": 1},
        regularisation={"importance_mask": mask},
    )  # fmt: skip
    loss = stale.request.loss
    assert (loss["importance_cap"], loss["importance_mask"]) == (None, mask)
    rows = runs.rows(stale.request.batch)
    old, sampler = (np.concatenate([row[name] for row in rows]) for name in ("old_logprobs", "sampler_logprobs"))
    ratios = np.exp(old - sampler)
    kept = (ratios >= 0.8) & (ratios <= 1.25)
    assert 0.1 < kept.mean() < 0.9
    assert stale.metrics["importance_weight_mean"] == pytest.approx((ratios * kept).mean(), rel=1e-5)
    first, second = runs.metrics("masked")
    assert (first["lag_mean"], first["lag_max"]) == (0, 0)
    assert (second["lag_mean"], second["lag_max"]) == (1, 1)
    assert second["masked_token_fraction"] == pytest.approx(1 - kept.mean(), rel=1e-5)
    # at most the share of the tokens that are kept, by Cauchy and Schwarz; their weights are not far from each other
    assert 0.5 * kept.mean() < second["effective_sample_size"] < kept.mean()


def test_the_clips_act_on_the_ratio_to_the_policy_that_sampled(runs: FlowRuns) -> None:
    """With one update and no cap that acts, the weights of decoupled PPO are the ratios of PPO to the sampling policy:
    pi / mu = (pi / pi_before) (pi_before / mu), and pi is pi_before."""
    clipped = runs.train(
        "clipped", algorithm__steps=2, algorithm__old_logprobs="sampler", algorithm__clip_range=0.02,
        rules={"max_staleness": 1},
    )  # fmt: skip
    weighted = runs.train(
        "weighted", algorithm__steps=2, rules={"max_staleness": 1}, regularisation={"importance_cap": 1e6}
    )
    assert clipped[1].request.old_logprobs == "sampler" and weighted[1].request.old_logprobs == "forward"
    assert clipped[1].metrics["ratio_mean"] == pytest.approx(weighted[1].metrics["importance_weight_mean"], rel=1e-3)
    assert clipped[0].metrics["clip_fraction_mean"] == 0 < clipped[1].metrics["clip_fraction_mean"]
    assert weighted[1].metrics["ratio_mean"] == 1.0 and weighted[1].metrics["clip_fraction_mean"] == 0


def test_dynamic_sampling_draws_other_prompts_for_groups_that_teach_nothing(runs: FlowRuns) -> None:
    # 4 prompts a step; of the prompts 0…9, only even ones are graded with anything but 0
    records = runs.train(
        "dynamic", algorithm__steps=1, grader__path="tests.fixtures.grading:only_even_prompts",
        rules={"dynamic_sampling": True, "max_refill_rounds": 8, "refill_end": "fail"},
    )  # fmt: skip
    rows = runs.rows(records[0].request.batch)
    groups: dict[str, set[float]] = {}
    for row in rows:
        groups.setdefault(row["group"], set()).add(row["reward"])
    assert len(groups) >= 4 and all(len(rewards) > 1 for rewards in groups.values())
    drawn = rollouts(runs, "dynamic", 0)
    assert len({row["prompt_id"] for row in drawn}) > len(groups)
    cursor = records[0].request.cursor_out
    assert cursor["epoch"] * 10 + cursor["index"] == len(drawn) / 4


def test_groups_that_never_differ_fail_the_run_when_asked(runs: FlowRuns) -> None:
    with pytest.raises(BatchNotFilled, match="after 2 draws"):
        runs.run(
            "hopeless", grader__path="tests.fixtures.grading:nothing",
            rules={"dynamic_sampling": True, "max_refill_rounds": 1, "refill_end": "fail"},
        )  # fmt: skip


def test_answers_that_were_cut_leave_the_loss_and_count_in_their_groups(runs: FlowRuns) -> None:
    (record,) = runs.train("cut", algorithm__steps=1, sampling=OFTEN_SHORT, rules={"mask_truncated": True})
    drawn = rollouts(runs, "cut", 0)
    ended = {(row["prompt_id"], row["completion"]) for row in drawn if row["stop_reasons"] != ["length"]}
    trained = {(row["group"], row["completion"]) for row in runs.rows(record.request.batch)}
    assert trained == ended and 0 < len(ended) < len(drawn)


@pytest.mark.slow
def test_a_penalty_on_length_moves_the_group_and_not_the_reward(runs: FlowRuns) -> None:
    rules = {"overlong_buffer": 3, "overlong_penalty": 10.0}
    (record,) = runs.train("long", algorithm__steps=1, rules=rules, sampling=OFTEN_SHORT)
    rows = runs.rows(record.request.batch)
    assert all(0 <= row["reward"] <= 1 for row in rows)
    mixed = 0
    for group in {row["group"] for row in rows}:
        advantages = [row["advantages"] for row in rows if row["group"] == group]
        advantages.sort(key=lambda of_tokens: (len(of_tokens), of_tokens[0]))
        shortest, longest = advantages[0], advantages[-1]
        # Up to three tokens there is no penalty; at six it is ten times what a grade can give.
        if len(shortest) <= 3 and len(longest) == 6:
            assert shortest[0] > 0 > longest[0]
            mixed += 1
    assert mixed


@pytest.mark.slow
def test_whatever_the_rules_leave_out_every_prompt_is_accounted_for(runs: FlowRuns) -> None:
    records = runs.train(
        "rules", algorithm__steps=3, grader__path="tests.fixtures.grading:only_even_prompts", sampling=OFTEN_SHORT,
        rules={"max_staleness": 1, "mask_truncated": True, "dynamic_sampling": True, "overlong_buffer": 2},
    )  # fmt: skip
    assert [record.request.loss["importance_cap"] for record in records] == [2.0] * 3  # by default
    assert [check_accounting(runs.store, record) for record in records] == [[], [], []]
    for step, record in enumerate(records):
        assert len(rollouts(runs, "rules", step)) > len(runs.rows(record.request.batch))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rules": {"refill_end": "fail"}}, "dynamic_sampling"),
        ({"rules": {"overlong_penalty": 2.0}}, "overlong_buffer"),
        ({"regularisation": {"kl_target": 0.2}}, "adaptive"),
        ({"regularisation": {"policy_loss": "ppo"}}, "policy_loss"),
        ({"regularisation": {"covariance": {"fraction": 0.1}}}, "covariance has no effect with policy_loss='clip'"),
        ({"regularisation": {"policy_loss": "clip_cov", "covariance": {"low": 6.0}}}, "low=6.0 is above high=5.0"),
        ({"regularisation": {"policy_loss": "kl_cov"}, "algorithm": {"clip_range": 0.3}}, "which does not clip"),
    ],
)
def test_options_that_would_do_nothing_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPOConfig.model_validate(toy_config(tmp_path, tmp_path, **changes))


def test_the_losses_by_covariance_have_their_tokens_chosen_before_the_step() -> None:
    algorithm = GRPOAlgorithm(steps=1)
    assert old_logprobs_of_step(algorithm, Regularisation()) == "forward"
    settings = CovarianceSettings(fraction=0.01, kl=0.5)
    for name, loss in (("clip_cov", ClipCovSpec()), ("kl_cov", KLCovSpec(cov_kl=0.5))):
        regularisation = Regularisation(policy_loss=name, covariance=settings)  # type: ignore[arg-type]
        assert old_logprobs_of_step(algorithm, regularisation) == "trainer"
        assert regularisation.selection == TokenSelection(kind=name, fraction=0.01, low=1.0, high=5.0)  # type: ignore
        assert policy_loss(POLICY_LOSSES, algorithm, regularisation) == loss
    assert Regularisation(policy_loss="clip_cov").selection == TokenSelection(kind="clip_cov")
    assert Regularisation().selection is None


def test_an_adaptive_coefficient_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="stays 0"):
        kl_controller(Regularisation(kl_controller="adaptive"), 0.0)


def test_rules_and_regularisation_decide_the_result(tmp_path: Path) -> None:
    plain = GRPOConfig.model_validate(toy_config(tmp_path, tmp_path)).semantic()
    assert plain["rules"]["max_staleness"] == 0 and plain["regularisation"]["entropy_coef"] == 0.0
    changes = {"rules": {"max_staleness": 1}, "regularisation": {"importance_cap": 2.0}}
    stale = GRPOConfig.model_validate(toy_config(tmp_path, tmp_path, **changes)).semantic()
    assert stale["rules"]["max_staleness"] == 1


def run_killed_and_resumed(runs: FlowRuns, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Runs "interrupted", which is killed before its third step and resumed without anything in memory."""
    with monkeypatch.context() as patched:
        interrupt_at(patched, flows.grpo, "prepare_batch", step=2, error=Killed)
        with pytest.raises(Killed):
            runs.run("interrupted", **changes)
    connect.cache_clear()
    runs.run("interrupted", **changes)


@pytest.mark.slow
def test_batches_are_full_where_long_prompts_are_dropped(runs: FlowRuns, tmp_path: Path) -> None:
    """Six of ten prompts are long. Two passes over the other four, in batches of four, are two steps of 16 rollouts."""
    prompts = tmp_path / "mixed.jsonl"
    texts = [str(digit) if digit < 4 else f"{'x' * 40}{digit}" for digit in range(10)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    data = {"train": {"kind": "file", "path": str(prompts)}, "max_prompt_tokens": 30, "truncation": "drop"}
    records = runs.train("dropped", data=data, algorithm__steps=None, algorithm__epochs=2)
    assert len(records) == 2
    for step in range(2):
        assert {row["prompt_index"] for row in rollouts(runs, "dropped", step)} == {0, 1, 2, 3}
        assert len(rollouts(runs, "dropped", step)) == 16
