"""Tests that an imported config gives the numbers of verl's own definitions, computed by hand.

The comments name verl's files and functions, at the commits b178a3c (January 2026) and 1dda039 (August 2026). They
agree on these definitions unless a comment says otherwise.
"""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from engine.backends.torch.updates import token_weights
from engine.losses.inputs import Outputs
from engine.losses.policy_gradient import POLICY_LOSSES
from engine.specs.engine import DeepSpeedSpec, LocalEngineSpec
from flows.configs.common import GRPOConfig
from flows.configs.ppo import GSPOConfig, PPOConfig, value_only_steps
from flows.gspo import GSPO
from flows.training.rollout_loop import policy_loss
from flows.training.schedules import schedule_of
from flows.verl.read import VerlError
from tasks.batches.advantages import ESTIMATORS, estimator_of, reinforce_plus_plus
from tasks.datasets.spec import FileDataset, PythonDataset
from tasks.datasets.verl import image_rows
from tests.engine.losses.cases import loss_of, sample
from tests.fixtures.dataset_rows import read_threads
from tests.fixtures.verl_values import CRITIC, A, R, made

# -- advantages ------------------------------------------------------------------------------------------------


def test_reinforce_plus_plus_discounts_by_gamma(tmp_path: Path) -> None:
    # trainer/ppo/core_algos.py, compute_reinforce_plus_plus_outcome_advantage: return = reward + gamma * next return
    words = ["algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0.5"]
    config = GRPOConfig.model_validate(made(tmp_path, "ppo_trainer", words).config)
    gamma = config.regularisation.gamma
    advantages = reinforce_plus_plus(np.array([1.0, 0.0]), np.zeros(3), np.array([2, 1]), gamma=gamma)
    # returns 0.5, 1 | 0, whitened: mean 0.5, variance 1/6
    assert advantages == pytest.approx(np.array([0.0, 0.5, -0.5]) * np.sqrt(6), abs=1e-6)


def test_other_estimators_of_groups_do_not_read_gamma(tmp_path: Path) -> None:
    result = made(tmp_path, "ppo_trainer", ["algorithm.gamma=0.5"])
    assert "algorithm.gamma" in chain.from_iterable(result.unread.values())


@pytest.mark.parametrize("estimator", ["grpo", "grpo_vectorized", "rloo"])
def test_the_only_completion_of_a_prompt_keeps_its_reward(tmp_path: Path, estimator: str) -> None:
    # core_algos.py, compute_grpo_outcome_advantage, compute_rloo_outcome_advantage; utils/groupwise.py, group_mean_std:
    # a group of one has the mean 0 and the standard deviation 1
    words = [f"algorithm.adv_estimator={estimator}"]
    algorithm = made(tmp_path, "ppo_trainer", [*words, R + "n=1"]).config["algorithm"]
    assert ESTIMATORS[algorithm["advantage_estimator"]]([0.75]) == [0.75]
    several = made(tmp_path, "ppo_trainer", [*words, R + "n=2"]).config["algorithm"]
    assert ESTIMATORS[several["advantage_estimator"]]([0.75]) == [0.0]


def test_a_baseline_of_one_completion_is_none(tmp_path: Path) -> None:
    # core_algos.py, compute_reinforce_plus_plus_baseline_outcome_advantage: the reward, whitened over the batch
    words = ["algorithm.adv_estimator=reinforce_plus_plus_baseline", R + "n=1"]
    config = made(tmp_path, "ppo_trainer", words).config
    assert config["algorithm"]["advantage_estimator"] == "reinforce_plus_plus"
    with pytest.raises(VerlError, match="with rollout.n=1 it has no baseline"):
        made(tmp_path, "ppo_trainer", [*words, "algorithm.use_kl_in_reward=true"])


def test_the_factor_of_gpgs_advantages_is_said_to_be_missing(tmp_path: Path) -> None:
    # core_algos.py, compute_gpg_outcome_advantage: batch size / number of rewards other than 0, times (reward - mean)
    result = made(tmp_path, "ppo_trainer", ["algorithm.adv_estimator=gpg", R + "n=4"])
    rewards = [1.0, 0.0, 0.0, 3.0]
    advantages = ESTIMATORS[result.config["algorithm"]["advantage_estimator"]](rewards)
    assert (4 / 2 * np.array(advantages, dtype=float)).tolist() == [0.0, -2.0, -2.0, 4.0]
    (line,) = [line for line in result.approximate if line.key == "algorithm.adv_estimator"]
    assert "by 2 if half of the rewards are 0" in line.difference
    single = made(tmp_path, "ppo_trainer", ["algorithm.adv_estimator=gpg", R + "n=1"]).config["algorithm"]
    assert ESTIMATORS[single["advantage_estimator"]]([0.75]) == [0.75]


def verls_best(rewards: list[float], *, divided: bool) -> list[float]:
    """core_algos.py, compute_grpo_passk_outcome_advantage: only the best completion has an advantage."""
    best, second = torch.topk(torch.tensor(rewards), 2)[0].tolist()
    gain = (best - second) / (float(np.std(rewards, ddof=1)) + 1e-6 if divided else 1.0)
    return [gain if number == int(np.argmax(rewards)) else 0.0 for number in range(len(rewards))]


@pytest.mark.parametrize("rewards", [[0.0, 1.0, 0.0, 0.0], [0.2, 0.9, 0.4, -1.0], [1.0, 1.0, 0.0, 0.0]])
def test_the_best_of_a_group_has_what_verl_gives_it(tmp_path: Path, rewards: list[float]) -> None:
    words = ["algorithm.adv_estimator=grpo_passk", R + "n=4"]
    exact = made(tmp_path, "ppo_trainer", [*words, "algorithm.norm_adv_by_std_in_grpo=false"])
    algorithm = GRPOConfig.model_validate(exact.config).algorithm
    advantages = estimator_of(algorithm.advantage_estimator, algorithm.pass_k)(rewards)
    assert advantages == pytest.approx(verls_best(rewards, divided=False), abs=1e-6)
    assert [line for line in exact.approximate if line.key == "algorithm.adv_estimator"] == []

    divided = made(tmp_path, "ppo_trainer", words)
    assert divided.config["algorithm"] == exact.config["algorithm"]
    (line,) = [line for line in divided.approximate if line.key == "algorithm.adv_estimator"]
    assert "the same factor for every prompt" in line.difference
    # of one 1 among four rewards, the standard deviation is 0.5
    assert verls_best([0.0, 1.0, 0.0, 0.0], divided=True) == pytest.approx([0.0, 2.0, 0.0, 0.0], abs=1e-5)
    with pytest.raises(VerlError, match=r"use rollout\.n above 1"):
        made(tmp_path, "ppo_trainer", [*words, R + "n=1"])


def test_the_parts_of_gdpo_are_those_of_the_reward_function(tmp_path: Path) -> None:
    # core_algos.py, compute_gdpo_outcome_advantage (August): weights of 1 if none are given
    words = ["algorithm.adv_estimator=gdpo", "reward.custom_reward_function.path=r.py", R + "n=4"]
    names = "algorithm.gdpo_reward_keys=[right, format]"
    result = made(tmp_path, "ppo_trainer", [*words, names, "reward.reward_manager.name=gdpo"])
    assert result.config["grader"]["arguments"]["parts"] == {"right": 1.0, "format": 1.0}
    (line,) = [line for line in result.approximate if line.key == "algorithm.adv_estimator"]
    assert "verl whitens over their tokens" in line.difference
    weights = "algorithm.gdpo_reward_weights=[1.0, 0.25]"
    weighed = made(tmp_path, "ppo_trainer", [*words, names, weights])
    assert weighed.config["grader"]["arguments"]["parts"] == {"right": 1.0, "format": 0.25}
    # the parts of a grader that --set names are its own
    graded = made(tmp_path, "ppo_trainer", [words[0], names, weights, R + "n=4"])
    assert graded.config["grader"].get("arguments") is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs the names of the parts"),
        (["algorithm.gdpo_reward_keys=[a, b]", "algorithm.gdpo_reward_weights=[1.0]"], "it has 2 names"),
        (["algorithm.gdpo_reward_keys=[a]", "algorithm.norm_adv_by_std_in_grpo=false"], "remove norm_adv_by_std"),
        (["algorithm.gdpo_reward_keys=[a]", "algorithm.use_kl_in_reward=true"], "use actor.use_kl_loss instead"),
        (["algorithm.gdpo_reward_keys=[a]", R + "n=1"], "use rollout.n above 1"),
    ],
)
def test_gdpo_with_settings_that_would_mean_something_else_is_refused(
    tmp_path: Path, words: list[str], message: str
) -> None:
    words = ["algorithm.adv_estimator=gdpo", "custom_reward_function.path=r.py", R + "n=4", *words]
    with pytest.raises(VerlError, match=message):
        made(tmp_path, "ppo_trainer", words)


# -- losses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "terms"),
    [
        # KL 1 at one token and 3 at three tokens, times 0.1; entropy 1 and 2, 3, 4, times 0.5
        ("token-mean", 0.1 * 10 / 4 - 0.5 * 10 / 4),
        ("seq-mean-token-mean", 0.1 * (1 + 3) / 2 - 0.5 * (1 + 3) / 2),
    ],
)
def test_the_terms_of_gspo_are_reduced_by_the_mode_of_the_actor(tmp_path: Path, mode: str, terms: float) -> None:
    # core_algos.py, compute_policy_loss_gspo reduces its own part by seq-mean-token-mean; workers/utils/losses.py,
    # ppo_loss reduces the KL and the entropy term by actor.loss_agg_mode
    words = ["policy_loss.loss_mode=gspo", "use_kl_loss=true", "kl_loss_coef=0.1", "kl_loss_type=kl"]
    words = [A + word for word in (*words, "entropy_coeff=0.5", f"loss_agg_mode={mode}")]
    config = GSPOConfig.model_validate(made(tmp_path, "ppo_trainer", words).config)
    loss = policy_loss(GSPO.policy_losses, config.algorithm, config.regularisation)
    samples = []
    for tokens, kl, advantage in ((1, 1.0, 2.0), (3, 3.0, 4.0)):
        logprobs = {"old_logprobs": [-1.0] * tokens, "reference_logprobs": [-1.0 - kl] * tokens}
        samples.append(sample([1], [1.0] * tokens, str(tokens), advantages=[advantage] * tokens, **logprobs))
    outputs = Outputs(
        logprobs_N=torch.full((4,), -1.0, dtype=torch.float64),
        entropy_N=torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64),
    )
    # every ratio is 1, so the sequences' own parts are -2 and -4
    assert loss_of(loss, samples, outputs).item() == pytest.approx(-3.0 + terms)


def test_the_gradient_of_gpg_has_no_ratio(tmp_path: Path) -> None:
    # core_algos.py, compute_policy_loss_gpg: -logprob * advantage, whatever the probability before the step was
    words = [A + "policy_loss.loss_mode=gpg", A + "loss_agg_mode=seq-mean-token-mean", A + "clip_ratio_high=0.3"]
    result = made(tmp_path, "ppo_trainer", ["algorithm.adv_estimator=gpg", *words, R + "n=2"])
    config = GRPOConfig.model_validate(result.config)
    loss = policy_loss(POLICY_LOSSES, config.algorithm, config.regularisation)
    # ratios e, e ** -0.5 and 1, advantages 2 and -3; means over one token and over two, then over two sequences
    samples = [
        sample([1], [1.0], "first", advantages=[2.0], old_logprobs=[-2.0]),
        sample([1], [1.0, 1.0], "second", advantages=[-3.0, -3.0], old_logprobs=[-0.5, -1.0]),
    ]
    logprobs_N = torch.full((3,), -1.0, dtype=torch.float32, requires_grad=True)
    loss_of(loss, samples, Outputs(logprobs_N=logprobs_N)).backward()
    assert logprobs_N.grad is not None
    assert logprobs_N.grad.tolist() == [-2 / 2, 3 / 4, 3 / 4]


SEQUENCES = ([-1.2, -2.5, -0.9], [-0.4, -1.1, -3.0], 2.0), ([-0.3, -1.0], [-1.5, -0.2], -3.0)
"""(logprobs, old logprobs, advantage) of two sequences, whose ratios lie on both sides of the clips."""


def verls_geo_mean(logprob: torch.Tensor, old: torch.Tensor, advantage: float) -> torch.Tensor:
    """core_algos.py, compute_policy_loss_geo_mean: the loss of a sequence, with clips at -0.4 and 0.5."""
    difference, sign = logprob - old, 1.0 if advantage > 0 else -1.0
    smallest = torch.min(sign * difference, sign * torch.clamp(difference, -0.4, 0.5))
    return -advantage * torch.exp((sign * smallest).sum() / len(logprob))


def verls_sapo(logprob: torch.Tensor, old: torch.Tensor, advantage: float) -> torch.Tensor:
    """core_algos.py, compute_policy_loss_sapo: the mean over a sequence's tokens, with taus of 1 and 2."""
    tau = 1.0 if advantage > 0 else 2.0
    return (-advantage * torch.sigmoid(tau * (torch.exp(logprob - old) - 1.0)) * (4.0 / tau)).mean()


@pytest.mark.parametrize(
    ("mode", "verls", "words"),
    [
        ("geo_mean", verls_geo_mean, ["clip_ratio_low=0.4", "clip_ratio_high=0.5"]),
        ("sapo", verls_sapo, ["tau_neg=2.0", "clip_ratio_high=0.3"]),
    ],
)
def test_geo_mean_and_sapo_are_verls(tmp_path: Path, mode: str, verls: Any, words: list[str]) -> None:
    words = [A + word for word in (f"policy_loss.loss_mode={mode}", *words)]
    config = GRPOConfig.model_validate(made(tmp_path, "ppo_trainer", words).config)
    loss = policy_loss(POLICY_LOSSES, config.algorithm, config.regularisation)
    samples, theirs = [], []
    leaves = [torch.tensor(logprobs, requires_grad=True) for logprobs, _, _ in SEQUENCES]
    for number, (leaf, (_, old, advantage)) in enumerate(zip(leaves, SEQUENCES, strict=True)):
        columns = {"advantages": [advantage] * len(old), "old_logprobs": old}
        samples.append(sample([1], [1.0] * len(old), str(number), **columns))
        theirs.append(verls(leaf, torch.tensor(old), advantage))
    ours, verl = loss_of(loss, samples, Outputs(logprobs_N=torch.cat(leaves))), torch.stack(theirs).mean()
    assert ours.item() == pytest.approx(verl.item(), rel=1e-5)
    for mine, its in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(verl, leaves), strict=True):
        assert mine.tolist() == pytest.approx(its.tolist(), rel=1e-5)


def test_the_losses_by_covariance_are_verls_on_the_selected_tokens(tmp_path: Path) -> None:
    """core_algos.py, compute_policy_loss_clip_cov, compute_policy_loss_kl_cov, for one micro-batch of two tokens of the
    ratios e^0.5 and 1, with the advantages 2 and -1, of which the first is selected."""
    columns = {"advantages": [2.0, -1.0], "old_logprobs": [-1.5, -1.0], "selected": [1.0, 0.0]}
    samples = [sample([1], [1.0, 1.0], "first", **columns)]
    outputs = Outputs(logprobs_N=torch.tensor([-1.0, -1.0], dtype=torch.float64))
    losses = {}
    for mode, words in (("clip_cov", ["clip_ratio_high=0.3"]), ("kl_cov", ["policy_loss.ppo_kl_coef=0.4"])):
        result = made(tmp_path, "ppo_trainer", [A + word for word in (f"policy_loss.loss_mode={mode}", *words)])
        config = GRPOConfig.model_validate(result.config)
        loss = policy_loss(POLICY_LOSSES, config.algorithm, config.regularisation)
        losses[mode] = loss_of(loss, samples, outputs).item()
        (line,) = [line for line in result.approximate if line.key == A + "policy_loss.loss_mode"]
        assert "verl selects among the tokens of each micro-batch" in line.difference
    # clip_cov: 0 of the selected token, 1 of the other; kl_cov: -2 e^0.5 + 0.4 · 0.5, and 1
    assert losses["clip_cov"] == pytest.approx((0 + 1) / 2)
    assert losses["kl_cov"] == pytest.approx((-2 * np.exp(0.5) + 0.2 + 1) / 2)


@pytest.mark.parametrize(
    ("version", "difference"),
    [("use_legacy_worker_impl=auto", ""), ("use_v1=true", "engine workers add up"), ("nnodes=1", "WHICH")],
)
def test_the_means_of_geo_mean_add_up_in_the_engine_workers(tmp_path: Path, version: str, difference: str) -> None:
    # the engine does not divide the loss by the number of micro-batches, and geo_mean takes torch.mean of each
    words = [A + "policy_loss.loss_mode=geo_mean", A + "ppo_micro_batch_size_per_gpu=2", "trainer." + version]
    result = made(tmp_path, "ppo_trainer", words)
    (line,) = [line for line in result.mapped if line.key == A + "loss_agg_mode"]
    expected = "exact with January 2026; the workers of August 2026 add up" if difference == "WHICH" else difference
    assert expected in line.difference
    assert bool(expected) == bool(line.difference)


def test_settings_of_geo_mean_and_sapo_that_would_change_numbers_are_refused(tmp_path: Path) -> None:
    geo_mean = [A + "policy_loss.loss_mode=geo_mean", A + "clip_ratio_low=1.5", A + "clip_ratio_high=1.5"]
    with pytest.raises(VerlError, match="the lower clip of geo_mean is at most 1"):
        made(tmp_path, "ppo_trainer", geo_mean)
    # verl's loss reads actor.tau_pos; PolicyLossConfig has no such field
    with pytest.raises(VerlError, match=r"policy_loss.tau_pos = 2.0: verl's loss reads .*actor.tau_pos=1.0"):
        made(tmp_path, "ppo_trainer", [A + "policy_loss.loss_mode=sapo", A + "policy_loss.tau_pos=2.0"])


def test_layers_that_verl_excludes_from_an_adapter_are_said_to_get_one(tmp_path: Path) -> None:
    words = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.exclude_modules='.*visual.*'"]
    result = made(tmp_path, "ppo_trainer", words)
    (line,) = [line for line in result.approximate if line.key.endswith("exclude_modules")]
    assert "so that they get one" in line.difference


def test_the_reasoning_effort_of_the_template_itself_is_imported(tmp_path: Path) -> None:
    result = made(tmp_path, "ppo_trainer", ["data.apply_chat_template_kwargs.reasoning_effort=medium"])
    assert "medium in the template of gpt-oss" in "".join(line.difference for line in result.approximate)


def test_terms_of_gspo_that_cannot_be_reduced_like_verls_are_refused(tmp_path: Path) -> None:
    words = [A + "policy_loss.loss_mode=gspo", A + "loss_agg_mode=seq-mean-token-sum"]
    made(tmp_path, "ppo_trainer", words)
    with pytest.raises(VerlError, match="the KL and entropy terms of GSPO have no norm"):
        made(tmp_path, "ppo_trainer", [*words, A + "entropy_coeff=0.1"])


@pytest.mark.parametrize(
    ("words", "norm", "constant"),
    [
        ([], "token_mean", None),
        ([A + "loss_agg_mode=seq-mean-token-mean"], "sequence_mean", None),
        ([A + "loss_agg_mode=seq-mean-token-sum-norm"], "constant", 512.0),
        ([A + "loss_agg_mode=seq-mean-token-sum-norm", A + "loss_scale_factor=100"], "constant", 100.0),
        ([A + "loss_agg_mode=seq-mean-token-mean", "critic.loss_agg_mode=token-mean"], "token_mean", None),
    ],
)
def test_the_critics_norm_follows_the_actors(
    tmp_path: Path, words: list[str], norm: str, constant: float | None
) -> None:
    # trainer/config/critic/critic.yaml: loss_agg_mode is the actor's by default
    credit = PPOConfig.model_validate(made(tmp_path, "ppo_trainer", [*CRITIC, *words]).config).credit
    assert (credit.value_loss_norm, credit.value_norm_constant) == (norm, constant)


OLD = "trainer.use_legacy_worker_impl=auto"
Rank = list[list[tuple[int, float]]]
"""The micro-batches of a rank, each a list of completions: (number of tokens, loss of each of them)."""
TWO_RANKS: list[Rank] = [
    [[(20, 1.0), (200, 3.0)], [(7, 2.0), (90, 5.0)]],
    [[(3, 8.0), (40, 4.0)], [(1, 1.0), (9, 7.0)]],
]
SINGLE: list[Rank] = [[[(20, 1.0)], [(200, 3.0)]], [[(7, 2.0)], [(90, 5.0)]]]


def loss_of_old_workers(mode: str, ranks: list[Rank], longest: int) -> float:
    """workers/actor/dp_actor.py, update_policy (January): core_algos.py, agg_loss of each micro-batch alone, divided by
    the number of micro-batches of the rank; FSDP averages the gradients of the ranks."""
    losses = []
    for rank in ranks:
        for micro_batch in rank:
            sums = [tokens * loss for tokens, loss in micro_batch]
            if mode == "token-mean":
                loss = sum(sums) / sum(tokens for tokens, _ in micro_batch)
            elif mode == "seq-mean-token-mean":
                loss = sum(loss for _, loss in micro_batch) / len(micro_batch)
            elif mode == "seq-mean-token-sum":
                loss = sum(sums) / len(micro_batch)
            else:
                loss = sum(sums) / longest
            losses.append(loss / len(rank) / len(ranks))
    return sum(losses)


def loss_of_engine_workers(mode: str, ranks: list[Rank], longest: int) -> float:
    """workers/utils/losses.py, ppo_loss: agg_loss with the tokens and completions of the mini-batch of all ranks
    (August)."""
    completions = [completion for rank in ranks for micro_batch in rank for completion in micro_batch]
    return loss_of_old_workers(mode, [[completions]], longest * (len(completions) if mode.endswith("norm") else 1))


def our_loss(config: GRPOConfig, ranks: list[Rank]) -> float:
    completions = [completion for rank in ranks for micro_batch in rank for completion in micro_batch]
    constant = config.regularisation.norm_constant
    if config.algorithm.loss_norm == "constant" and constant is None:
        constant = float(config.sampling.max_new_tokens)
    lengths = [tokens for tokens, _ in completions]
    weights = token_weights(
        lengths,
        norm=config.algorithm.loss_norm,
        total_tokens=sum(lengths),
        total_sequences=len(lengths),
        constant=constant,
    )
    losses = [torch.full((tokens,), loss, dtype=torch.float64) for tokens, loss in completions]
    return float((weights * torch.cat(losses)).sum())


def imported_loss(
    tmp_path: Path, ranks: list[Rank], mode: str, *words: str, longest: int = 250
) -> tuple[GRPOConfig, str]:
    """(the imported config, the stated difference of the loss) for a config with these ranks and micro-batches."""
    completions = sum(len(micro_batch) for rank in ranks for micro_batch in rank)
    given = [f"{A}loss_agg_mode={mode}", f"{A}ppo_mini_batch_size={completions}"]
    given += [f"{A}ppo_micro_batch_size_per_gpu={len(ranks[0][0])}"]
    given += [f"trainer.n_gpus_per_node={len(ranks)}"]
    given += [f"data.max_response_length={longest}", R + "n=1", R + "tensor_model_parallel_size=1"]
    result = made(tmp_path, "ppo_trainer", [*given, *words])
    (line,) = [line for line in result.mapped if line.key == A + "loss_agg_mode"]
    return GRPOConfig.model_validate(result.config), line.difference


MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [TWO_RANKS, SINGLE, [[TWO_RANKS[0][0]]]], ids=["two ranks", "single", "one"])
def test_the_loss_of_januarys_workers_is_ours_or_said_to_differ(tmp_path: Path, mode: str, ranks: list[Rank]) -> None:
    config, difference = imported_loss(tmp_path, ranks, mode, OLD)
    same = our_loss(config, ranks) == pytest.approx(loss_of_old_workers(mode, ranks, 250))
    assert same == (difference == "")
    # the mean of the tokens of a micro-batch with several completions is the only one that differs
    assert same == (mode != "token-mean" or ranks is not TWO_RANKS)


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_of_the_engine_workers_is_ours(tmp_path: Path, mode: str) -> None:
    config, difference = imported_loss(tmp_path, TWO_RANKS, mode, "trainer.use_v1=true")
    august = loss_of_engine_workers(mode, TWO_RANKS, 250)
    assert (our_loss(config, TWO_RANKS), difference) == (pytest.approx(august), "")
    # in January a rank's sum is not divided by the completions, and FSDP averages over the ranks
    config, difference = imported_loss(tmp_path, TWO_RANKS, mode, "trainer.use_legacy_worker_impl=disable")
    january = august * 8 / 2 if mode.endswith("norm") else august
    assert (our_loss(config, TWO_RANKS), difference) == (pytest.approx(january), "")


def test_the_critic_of_januarys_engine_workers_is_said_to_differ(tmp_path: Path) -> None:
    # workers/utils/losses.py, value_loss (January) reduces each micro-batch alone, and the engine adds them up
    result = made(tmp_path, "ppo_trainer", [*CRITIC, "trainer.use_legacy_worker_impl=disable"])
    (line,) = [line for line in result.mapped if line.key == "critic.loss_agg_mode"]
    assert "adds up the losses of its micro-batches" in line.difference


def test_a_config_of_no_known_version_says_what_the_versions_do(tmp_path: Path) -> None:
    config, difference = imported_loss(tmp_path, TWO_RANKS, "token-mean")
    assert our_loss(config, TWO_RANKS) == pytest.approx(loss_of_engine_workers("token-mean", TWO_RANKS, 250))
    assert "exact with August 2026; the workers of January 2026 average" in difference
    # the figure of the sentence
    figure: list[Rank] = [[[(100, 1.0)], [(900, 2.0)]]]
    theirs, ours = loss_of_old_workers("token-mean", figure, 1000), loss_of_engine_workers("token-mean", figure, 1000)
    assert f"give {theirs:.2f}, and {ours:.2f} here" in difference


@pytest.mark.parametrize(
    ("mode", "words", "differs"),
    [
        ("token-mean", [], True),
        # FSDP weighs a micro-batch by its completions, so a mean over completions stays one
        ("seq-mean-token-mean", [], False),
        ("seq-mean-token-sum-norm", [], True),
        # Megatron weighs the micro-batches alike (megatron_actor.py, forward_backward_batch)
        ("seq-mean-token-mean", [A + "strategy=megatron"], True),
    ],
)
def test_micro_batches_by_tokens_of_januarys_workers(
    tmp_path: Path, mode: str, words: list[str], differs: bool
) -> None:
    _, difference = imported_loss(tmp_path, TWO_RANKS, mode, OLD, A + "use_dynamic_bsz=true", *words)
    assert (difference != "") == differs


def test_ranks_that_share_a_sequence_have_its_micro_batches_in_common(tmp_path: Path) -> None:
    # 8 GPUs, of which 8 share a sequence: one micro-batch of 4 completions in all, so their mean is one over all tokens
    words = [OLD, "trainer.n_gpus_per_node=8", A + "ppo_micro_batch_size_per_gpu=4"]
    group: list[Rank] = [[[(20, 1.0), (200, 3.0), (7, 2.0), (90, 5.0)]]]
    layouts = [
        [A + "ulysses_sequence_parallel_size=8"],
        [A + "strategy=megatron", A + "megatron.tensor_model_parallel_size=4", A + "megatron.context_parallel_size=2"],
    ]
    for layout in layouts:
        config, difference = imported_loss(tmp_path, group, "token-mean", *words, *layout)
        assert (config.algorithm.loss_norm, difference) == ("token_mean", "")


@pytest.mark.parametrize(
    ("words", "exact"),
    [
        ([], False),
        # 8 ranks with one micro-batch of 4: the tokens of all ranks, if they are balanced
        (["data.train_batch_size=32", "data.balance_dp_token=true"], True),
        (["data.train_batch_size=64", "data.balance_dp_token=true"], False),
        (["data.train_batch_size=32"], False),
        (["data.train_batch_size=4", "trainer.n_gpus_per_node=1"], True),
    ],
)
def test_the_sft_trainer_of_january_averages_micro_batches(tmp_path: Path, words: list[str], exact: bool) -> None:
    # trainer/fsdp_sft_trainer.py, _compute_loss_and_backward and training_step
    result = made(tmp_path, "sft_trainer", words)
    differences = {line.key: line.difference for line in result.mapped}
    assert (differences["data.micro_batch_size_per_gpu"] == "") == exact
    engine = made(tmp_path, "sft_trainer_engine", ["data.use_dynamic_bsz=false"])
    assert {line.key: line.difference for line in engine.mapped}["data.micro_batch_size_per_gpu"] == ""


def test_the_end_of_an_answer_of_januarys_sft_is_said_to_differ(tmp_path: Path) -> None:
    # utils/dataset/sft_dataset.py, SFTDataset: the answer and tokenizer.eos_token; MultiTurnSFTDataset: the template
    keys = {"multiturn.enable=true": "", "multiturn.enable=false": "end-of-sequence token"}
    for word, difference in keys.items():
        result = made(tmp_path, "sft_trainer", ["data." + word])
        (line,) = [line for line in result.mapped if line.key == "data.multiturn.enable"]
        assert difference in line.difference
        assert bool(difference) == bool(line.difference)


def test_the_penalty_for_long_answers_ends_where_ours_does(tmp_path: Path) -> None:
    # experimental/reward_loop/reward_manager/dapo.py: the expected length is max_resp_len less the buffer
    buffer = "reward_model.reward_kwargs.overlong_buffer_cfg."
    on = [buffer + word for word in ("enable=true", "len=100", "penalty_factor=1.0")]
    limit = "reward_model.reward_kwargs.max_resp_len="
    result = made(tmp_path, "ppo_trainer", [*on, limit + "512"])
    assert result.config["rules"]["overlong_buffer"] == 100
    with pytest.raises(VerlError, match="max_resp_len = 400: .*data.max_response_length=512"):
        made(tmp_path, "ppo_trainer", [*on, limit + "400"])
    made(tmp_path, "ppo_trainer", [limit + "400"])


@pytest.mark.parametrize(
    ("words", "sampling"),
    [
        ([R + "val_kwargs.temperature=0.6", R + "val_kwargs.top_p=0.9", R + "val_kwargs.n=4"], (0.6, 0.9, 4)),
        ([R + "val_kwargs.n=4"], (0.0, 1.0, 1)),
    ],
)
def test_the_validation_samples_at_its_temperature_without_do_sample(
    tmp_path: Path, words: list[str], sampling: tuple[float, float, int]
) -> None:
    # experimental/agent_loop/agent_loop.py, generate_sequences reads val_kwargs.temperature and never do_sample
    words = [*words, R + "val_kwargs.do_sample=false", "data.val_files=val.parquet"]
    evaluation = GRPOConfig.model_validate(made(tmp_path, "ppo_trainer", words).config).evaluation
    assert (evaluation.temperature, evaluation.top_p, evaluation.samples_per_prompt) == sampling


@pytest.mark.parametrize(
    ("words", "differs"),
    [([], True), ([A + "ppo_mini_batch_size=1024"], False), ([A + "shuffle=true"], False)],
)
def test_the_order_of_several_mini_batches_is_said_to_differ(tmp_path: Path, words: list[str], differs: bool) -> None:
    # dp_actor.py, update_policy: data.split(ppo_mini_batch_size); ours are shuffled by the run's seed
    result = made(tmp_path, "ppo_trainer", words)
    assert (A + "shuffle" in [line.key for line in result.mapped if line.difference]) == differs


def test_the_kl_of_the_adaptive_controller_is_said_to_differ(tmp_path: Path) -> None:
    # trainer/ppo/ray_trainer.py, apply_kl_penalty: the mean over sequences of the mean over their tokens
    result = made(tmp_path, "ppo_trainer", ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"])
    (line,) = [line for line in result.mapped if line.key == "algorithm.kl_ctrl.type"]
    theirs, ours = (0.2 + 0.1) / 2, (100 * 0.2 + 900 * 0.1) / 1000
    assert f"give {theirs:.2f} there and {ours:.2f} here" in line.difference


@pytest.mark.parametrize("mode", ["cispo", "vanilla", "gspo"])
def test_a_lower_clip_that_never_binds(tmp_path: Path, mode: str) -> None:
    # core_algos.py, compute_policy_loss_cispo: clamp(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high), and ratio > 0
    words = [A + f"policy_loss.loss_mode={mode}", A + "clip_ratio_low=10", A + "clip_ratio_high=0.2"]
    algorithm = made(tmp_path, "ppo_trainer", words).config["algorithm"]
    assert (algorithm["clip_range"], algorithm["clip_range_high"]) == (1.0, 0.2)


def test_a_step_trains_on_the_prompts_that_january_draws(tmp_path: Path) -> None:
    # trainer/ppo/ray_trainer.py, _create_dataloader (January): batches of gen_batch_size; trainer/ppo/v1 (August):
    # steps of train_batch_size
    words = ["data.train_batch_size=256", "data.gen_batch_size=512", A + "ppo_mini_batch_size=256", R + "n=8"]
    for version, prompts in (("auto", 512), ("disable", 512)):
        config = made(tmp_path, "ppo_trainer", [*words, f"trainer.use_legacy_worker_impl={version}"]).config
        assert config["algorithm"]["samples_per_batch"] == prompts * 8
    august = made(tmp_path, "ppo_trainer", [*words, "trainer.use_v1=true"]).config
    assert august["algorithm"]["samples_per_batch"] == 256 * 8
    with pytest.raises(VerlError, match="gen_batch_size = 512: January 2026 trains on these prompts"):
        made(tmp_path, "ppo_trainer", words)


@pytest.mark.parametrize("start", [3.0, 1.0 + 1e-8])
def test_the_value_model_moves_as_with_half_of_our_loss(tmp_path: Path, start: float) -> None:
    # core_algos.py, compute_value_loss: 0.5 times the mean squared error; the optimizer is torch's AdamW
    words = [*CRITIC, "critic.grad_clip=0.5", "critic.optim.lr=0.1", "critic.optim.weight_decay=0.3"]
    config = PPOConfig.model_validate(made(tmp_path, "ppo_trainer", words).config)
    ours = config.value_model.optimizer_over(config.optimizer)

    def train(factor: float, eps: float, max_norm: float) -> list[float]:
        value = torch.nn.Parameter(torch.tensor([start, -start], dtype=torch.float64))
        optimizer = torch.optim.AdamW([value], lr=0.1, weight_decay=0.3, eps=eps)
        for _ in range(3):
            optimizer.zero_grad()
            (factor * (value - torch.tensor([1.0, -1.0])).square().mean()).backward()
            torch.nn.utils.clip_grad_norm_([value], max_norm)
            optimizer.step()
        return value.tolist()

    # the second start has a gradient as small as epsilon
    assert train(1.0, ours.eps, ours.max_grad_norm) == pytest.approx(train(0.5, 1e-8, 0.5), rel=1e-6)
    assert (ours.lr, ours.weight_decay) == (0.1, 0.3)


# -- the length of the run, and its schedules ------------------------------------------------------------------


def rows(tmp_path: Path, count: int, batch: int) -> list[str]:
    """The words for a training file with `count` rows, and for batches of `batch` prompts."""
    pq.write_table(pa.table({"prompt": ["q"] * count}), tmp_path / "rows.parquet")
    return [
        f"data.train_files={tmp_path / 'rows.parquet'}",
        f"data.train_batch_size={batch}",
        f"{A}ppo_mini_batch_size={batch}",
    ]


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        # 10 rows in batches of 4: two whole batches in each of three passes
        (["trainer.total_epochs=3"], 6),
        (["trainer.total_epochs=3", "trainer.total_training_steps=5"], 5),
        (["trainer.total_epochs=3", "trainer.total_training_steps=100"], 6),
        (["trainer.total_epochs=3", "data.train_max_samples=5"], 3),
    ],
)
def test_a_pass_has_whole_batches_only_and_the_passes_end_the_run(tmp_path: Path, words: list[str], steps: int) -> None:
    # trainer/ppo/ray_trainer.py, _create_dataloader (drop_last=True) and fit (a loop over total_epochs)
    algorithm = made(tmp_path, "ppo_trainer", [*rows(tmp_path, 10, 4), *words]).config["algorithm"]
    assert (algorithm["steps"], algorithm.get("epochs")) == (steps, None)


def test_without_the_rows_the_length_is_said_to_be_approximate(tmp_path: Path) -> None:
    result = made(tmp_path, "ppo_trainer", ["trainer.total_epochs=3"])
    assert result.config["algorithm"]["epochs"] == 3
    # prompts that are filtered out cannot be counted without the tokenizer
    words = ["data.filter_overlong_prompts=true", "trainer.total_training_steps=50"]
    limited = made(tmp_path, "ppo_trainer", [*rows(tmp_path, 10, 4), *words])
    assert limited.config["algorithm"]["steps"] == 50
    differences = {line.key: line.difference for line in (*result.mapped, *limited.mapped)}
    assert "no batch" in differences["trainer.total_epochs"]
    assert "also ends after 30 passes" in differences["trainer.total_training_steps"]


def test_files_with_fewer_rows_than_a_batch_are_refused(tmp_path: Path) -> None:
    # ray_trainer.py, _create_dataloader asserts that there is a batch
    with pytest.raises(VerlError, match="fewer rows than a batch"):
        made(tmp_path, "ppo_trainer", rows(tmp_path, 3, 4))


@pytest.mark.parametrize(
    ("words", "rates"),
    [
        (["lr_warmup_steps=4"], [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]),
        # int(0.38 * 10) = 3 steps
        (["lr_warmup_steps_ratio=0.38"], [0.0, 1 / 3, 2 / 3, 1.0, 1.0, 1.0]),
        # int(0.05 * 10) = 0 steps
        (["lr_warmup_steps_ratio=0.05"], [1.0] * 6),
        ([], [1.0] * 6),
    ],
)
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_constant_rate_warms_up_from_zero(tmp_path: Path, role: str, words: list[str], rates: list[float]) -> None:
    # utils/torch_functional.py, get_constant_schedule_with_warmup: step k of W has k / W of the rate
    group = f"{A}optim." if role == "actor" else "critic.optim."
    words = [*CRITIC, "trainer.total_training_steps=10", f"{group}lr=0.5", *(group + word for word in words)]
    config = PPOConfig.model_validate(made(tmp_path, "ppo_trainer", words).config)
    optimizer = config.optimizer if role == "actor" else config.value_model.optimizer_over(config.optimizer)
    schedule = schedule_of(optimizer)
    assert [schedule.at(step, 10) for step in range(6)] == pytest.approx([0.5 * rate for rate in rates])


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        # the actor is trained in the last of 50 steps, and never
        (["trainer.critic_warmup=50"], None),
        (["trainer.critic_warmup=51"], "critic_warmup = 51: the run ends after 50 steps.*never train the actor"),
        (["trainer.critic_warmup=5", "data.train_max_samples=1"], "critic_warmup = 5: the run ends after 0 steps"),
        (["trainer.critic_warmup=5", "data.train_batch_size=0"], "critic_warmup = 5: data.train_batch_size is 0; give"),
        # a null is refused at its own key, and no other key is blamed
        (["trainer.total_epochs=null", "trainer.total_training_steps=9"], "1 key .*total_epochs = None: .*a number"),
        ([f"{A}optim.lr_warmup_steps_ratio=null"], "1 key .*lr_warmup_steps_ratio = None: .*needs a number"),
    ],
)
def test_lengths_that_no_run_can_have(tmp_path: Path, words: list[str], refusal: str | None) -> None:
    words = [*CRITIC, *rows(tmp_path, 100, 2), "trainer.total_epochs=1", *words]
    if refusal is None:
        config = made(tmp_path, "ppo_trainer", words).config
        assert value_only_steps(config["credit"]["value_only_fraction"], 50) == 49
        return
    with pytest.raises(VerlError, match=f"(?s){refusal}"):
        made(tmp_path, "ppo_trainer", words)


@pytest.mark.parametrize(
    ("words", "schedule"),
    [
        ([], "constant_with_warmup"),
        (["optim.warmup_steps_ratio=0"], "constant"),
        (["optim.warmup_steps_ratio=0", "optim.lr_warmup_steps_ratio=0.1"], "constant_with_warmup"),
        (["optim.warmup_steps_ratio=0.2", "optim.lr_warmup_steps_ratio=0"], "constant"),
    ],
)
def test_the_older_ratio_counts_if_the_new_one_is_not_given(tmp_path: Path, words: list[str], schedule: str) -> None:
    # both ratios are 0.1 by default
    words = ["optim.lr_scheduler=constant", *words]
    assert made(tmp_path, "sft_trainer", words).config["optimizer"]["schedule"] == schedule


def test_the_actor_is_trained_from_the_step_of_that_number_on(tmp_path: Path) -> None:
    # ray_trainer.py, fit: steps count from 1, and the actor is trained once critic_warmup <= global_steps
    words = [*CRITIC, "trainer.critic_warmup=10"]
    with pytest.raises(VerlError, match="trainer.critic_warmup = 10: .*total_training_steps"):
        made(tmp_path, "ppo_trainer", words)
    for steps in (40, 300):
        config = made(tmp_path, "ppo_trainer", [*words, f"trainer.total_training_steps={steps}"]).config
        assert value_only_steps(config["credit"]["value_only_fraction"], steps) == 9


MEGATRON = "model_engine=megatron"


@pytest.mark.parametrize(
    ("words", "rates"),
    [
        (["lr_warmup_steps=4"], [0.0, 0.125, 0.25, 0.375, 0.5, 0.5]),
        (["lr_warmup_steps_ratio=0.38"], [0.0, 0.5 / 3, 1.0 / 3, 0.5, 0.5, 0.5]),
        # FSDP's names are not Megatron's
        (["lr_scheduler_type=cosine", "min_lr_ratio=0.1"], [0.5] * 6),
    ],
)
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_megatrons_schedule(tmp_path: Path, role: str, words: list[str], rates: list[float]) -> None:
    # utils/megatron/optimizer.py; Megatron's OptimizerParamScheduler: init_lr + (max_lr - init_lr) step / warm-up
    group = f"{A}optim." if role == "actor" else "critic.optim."
    words = [*CRITIC, MEGATRON, "trainer.total_training_steps=10", f"{group}lr=0.5", *(group + word for word in words)]
    config = PPOConfig.model_validate(made(tmp_path, "ppo_trainer", words).config)
    optimizer = config.optimizer if role == "actor" else config.value_model.optimizer_over(config.optimizer)
    schedule = schedule_of(optimizer)
    assert [schedule.at(step, 10) for step in range(6)] == pytest.approx(rates)


def test_megatrons_optimizer_has_betas_of_its_own_and_a_lowest_rate(tmp_path: Path) -> None:
    # utils/megatron/optimizer.py, init_megatron_optim_config passes no betas; min_lr is a rate and not a share
    words = [A + "optim." + word for word in ("betas=[0.8,0.95]", "lr=2e-6", "min_lr=5e-7", "lr_decay_style=cosine")]
    optimizer = GRPOConfig.model_validate(made(tmp_path, "ppo_trainer", [*words, MEGATRON]).config).optimizer
    assert (optimizer.beta1, optimizer.beta2) == (0.9, 0.999)
    assert (optimizer.schedule, optimizer.min_lr_ratio) == ("cosine", pytest.approx(0.25))
    veomni = [A + "optim." + word for word in ("lr=2e-6", "lr_min=5e-7")]
    optimizer = GRPOConfig.model_validate(
        made(tmp_path, "ppo_trainer", [*veomni, "model_engine=veomni"]).config
    ).optimizer
    # trainer/config/optim/veomni.yaml: a cosine by default
    assert (optimizer.schedule, optimizer.min_lr_ratio) == ("cosine", pytest.approx(0.25))


def test_a_schedule_that_ends_before_the_run_is_refused(tmp_path: Path) -> None:
    words = [MEGATRON, "trainer.total_training_steps=10"]
    made(tmp_path, "ppo_trainer", [*words, A + "optim.lr_decay_steps=10"])
    with pytest.raises(VerlError, match="lr_decay_steps = 5: the schedule ends with the run, after 10 steps"):
        made(tmp_path, "ppo_trainer", [*words, A + "optim.lr_decay_steps=5"])


def test_videos_of_files_that_are_here_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["q"] * 8, "clips": ["v"] * 8}), tmp_path / "rows.parquet")
    words = [f"data.train_files={tmp_path / 'rows.parquet'}", "data.train_batch_size=8", A + "ppo_mini_batch_size=8"]
    made(tmp_path, "ppo_trainer", words)
    with pytest.raises(VerlError, match="video_key = 'clips': the training files have this column"):
        made(tmp_path, "ppo_trainer", [*words, "data.video_key=clips"])


# -- engine ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([R + "tensor_model_parallel_size=2"], {"tensor_parallel": 2, "replicas": 4}),
        ([R + "tensor_model_parallel_size=1"], {"tensor_parallel": 1, "replicas": 8, "placement": "colocated"}),
        ([R + "tensor_model_parallel_size=4", "trainer.nnodes=2"], {"tensor_parallel": 4, "replicas": 4}),
    ],
)
def test_all_gpus_sample(tmp_path: Path, words: list[str], expected: dict[str, Any]) -> None:
    # experimental/agent_loop/agent_loop.py, AgentLoopManager: as many servers as the GPUs of all nodes hold
    sampler = made(tmp_path, "ppo_trainer", words).config["engine"]["sampler"]
    assert {name: sampler[name] for name in expected} == expected


# -- rows ------------------------------------------------------------------------------------------------------


def test_rows_in_the_order_of_the_file_end_with_the_last_whole_batch(tmp_path: Path) -> None:
    # trainer/main_ppo.py, create_rl_sampler: a SequentialSampler if data.shuffle is false
    words = [*rows(tmp_path, 10, 4), "data.shuffle=false", "trainer.total_epochs=3"]
    config = GRPOConfig.model_validate(made(tmp_path, "ppo_trainer", words).config)
    assert (config.data.train.order, config.data.train.limit) == ("file", 8)  # type: ignore[union-attr]
    assert config.algorithm.steps == 6


@pytest.mark.parametrize(("model_type", "has_images"), [("smolvlm", True), ("llama", False)])
def test_images_belong_to_the_prompts_of_a_model_that_takes_them(
    tmp_path: Path, model_type: str, has_images: bool
) -> None:
    # utils/dataset/rl_dataset.py, _build_messages: each <image> stands for the next image of the row
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    row = {
        "prompt": [{"role": "user", "content": "<image>What is <image>?"}],
        "pictures": [{"bytes": b"\x89PNG1", "path": None}, {"bytes": b"\xff\xd82", "path": None}],
    }
    pq.write_table(pa.Table.from_pylist([row, {"prompt": row["prompt"], "pictures": []}]), tmp_path / "rows.parquet")
    words = [f"data.train_files={tmp_path / 'rows.parquet'}", f"actor_rollout_ref.model.path={tmp_path}"]
    words += ["data.image_key=pictures", "data.train_batch_size=2", A + "ppo_mini_batch_size=2"]
    source = GRPOConfig.model_validate(made(tmp_path, "ppo_trainer", words).config).data.train
    assert source.kind == ("python" if has_images else "file")
    if isinstance(source, PythonDataset):
        first, second = image_rows(**source.arguments)  # type: ignore[arg-type]
        urls = ("data:image/png;base64,iVBORzE=", "data:image/jpeg;base64,/9gy")
        png, jpeg = ({"type": "image", "url": url} for url in urls)
        texts = [{"type": "text", "text": text} for text in ("What is ", "?")]
        assert first["prompt"] == [{"role": "user", "content": [png, texts[0], jpeg, texts[1]]}]
        assert second["prompt"] == row["prompt"]


def test_fields_of_a_column_are_found_by_the_names_that_lead_to_them(tmp_path: Path) -> None:
    # January: utils/dataset/sft_dataset.py, SFTDataset reads column[prompt_key][name] for each name of prompt_dict_keys
    words = ["data.prompt_key=extra", "data.prompt_dict_keys=[inner, question]"]
    columns = made(tmp_path, "sft_trainer", words).config["data"]["train"]["columns"]
    assert columns["prompt"] == "extra.inner.question"
    row = {"extra": {"inner": {"question": "q"}, "other": 1}, "answer": "a"}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    for name in ("rows.parquet", "rows.jsonl"):
        named = {"prompt": "extra.inner.question", "completion": "answer"}
        (thread,) = read_threads(FileDataset(path=str(tmp_path / name), columns=named), use="completion")
        assert [turn.text for turn in thread.turns] == ["q", "a"]


@pytest.mark.parametrize("gpus", [1, 8])
def test_an_adapter_is_trained_on_the_ranks(tmp_path: Path, gpus: int) -> None:
    # workers/fsdp_workers.py, _build_model_optimizer: lora_rank above 0 wraps the model of every FSDP worker by peft
    words = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=32"]
    words.append(f"trainer.n_gpus_per_node={gpus}")
    config = GRPOConfig.model_validate(made(tmp_path, "ppo_trainer", words).config)
    assert isinstance(config.engine, LocalEngineSpec)
    assert isinstance(config.engine.trainer, DeepSpeedSpec)
    assert config.engine.trainer.ranks == gpus
    adapter = config.model.adapter
    assert adapter is not None
    assert (adapter.rank, adapter.alpha, adapter.target_modules) == (8, 32, "all-linear")
