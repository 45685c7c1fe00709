"""Tests of the options that the training classes in environments refuse before they use a model."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import ValidationError

from engine.handles import TrainingModel
from engine.losses.policy_gradient import ProbabilityMask, SequenceRatioMask, TokenRatioMask
from engine.protocol import SamplingParams
from engine.text.threads import StringThread
from flows.configs.common import GRPOAlgorithm
from flows.configs.environments import ENVGRPOConfig, ENVGSPOConfig, ENVPPOConfig
from flows.configs.optimizer import OptimizerConfig
from flows.configs.ppo import CreditConfig, PPOAlgorithm, PPORegularisation
from flows.configs.reinforcement import BatchRules, Regularisation
from flows.env_grpo import ENVGRPO
from flows.env_gspo import ENVGSPO
from flows.env_ppo import ENVPPO
from flows.grpo import GRPO
from flows.gspo import GSPO
from flows.ppo import PPO
from flows.training.options import NOT_OF_EPISODES
from flows.training.schedules import ConstantScheduler
from storage.chain.records import PolicyRef
from tasks.graders.spec import grader_spec
from tests.fixtures.guessing import GuessFactory, guess_config

GRADER = grader_spec("tests.fixtures.grading:even_share")
PROMPTS = [StringThread([("user", "1")], {"secret": 1})]
POLICY, VALUE = (
    cast(TrainingModel, SimpleNamespace(name=name, sampling=SamplingParams())) for name in ("policy", "value")
)
"""A model that is only passed on."""


def env_grpo(**options: Any) -> ENVGRPO:
    return ENVGRPO(PROMPTS, POLICY, GuessFactory(), max_num_grpo_steps=2, **options)


def env_gspo(**options: Any) -> ENVGSPO:
    return ENVGSPO(PROMPTS, POLICY, GuessFactory(), max_num_gspo_steps=2, **options)


def env_ppo(**options: Any) -> ENVPPO:
    return ENVPPO(PROMPTS, POLICY, VALUE, GuessFactory(), max_num_ppo_steps=2, **options)


SINGLE: dict[str, Any] = {
    "dynamic_sampling": True, "max_refill_rounds": 2, "refill_end": "fail",
    "mask_truncated": True, "overlong_buffer": 8, "overlong_penalty": 0.5,
    "max_skipped_steps": 3,
}  # fmt: skip


@pytest.mark.parametrize("make", [env_grpo, env_gspo, env_ppo])
@pytest.mark.parametrize("name", sorted(SINGLE))
def test_rules_about_single_answers_are_refused(make: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"\['{name}'\] act on single answers"):
        make(**{name: SINGLE[name]})


def test_at_their_defaults_they_say_nothing() -> None:
    assert sorted(SINGLE) == sorted(NOT_OF_EPISODES)
    off = {"dynamic_sampling": False, "mask_truncated": False, "overlong_buffer": None, "overlong_penalty": 1.0}
    assert [make(**off).stage for make in (env_grpo, env_gspo, env_ppo)] == ["env_grpo", "env_gspo", "env_ppo"]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        *((make, {"kl_in": "reward"}, "in environments the KL term is in the loss") for make in (env_grpo, env_gspo)),
        *(
            (make, {"advantage_estimator": name}, "has no advantage per turn; take one of group")
            for make, name in product(
                (env_grpo, env_gspo), ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae")
            )
        ),
        *(
            (env_ppo, {"advantage_estimator": name}, "PPO's are the value model's")
            for name in ("reinforce_plus_plus", "group")
        ),
        (env_gspo, {"policy_loss": "cispo"}, "which GSPO does not have"),
        (env_gspo, {"dual_clip": 3.0}, "which GSPO does not have"),
        (env_ppo, {"value_only_fraction": 1.0}, "less than 1"),
        *((make, {"grader": None}, "the environment grades the turns") for make in (env_grpo, env_gspo, env_ppo)),
    ],
)
def test_what_has_no_meaning_in_an_environment_is_refused(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def grpo(**options: Any) -> GRPO:
    return GRPO(PROMPTS, POLICY, GRADER, max_num_grpo_steps=2, **options)


def ppo(**options: Any) -> PPO:
    return PPO(PROMPTS, POLICY, VALUE, GRADER, max_num_ppo_steps=2, **options)


def gspo(**options: Any) -> GSPO:
    return GSPO(PROMPTS, POLICY, GRADER, max_num_gspo_steps=2, **options)


@pytest.mark.parametrize("make", [grpo, gspo])
def test_the_k_of_pass_at_k_goes_with_its_estimator_and_with_the_completions(make: Any) -> None:
    loop = make(advantage_estimator="pass_at_k", pass_k=4, completions_per_sample=4, kl_beta=0.0)
    plan = loop.batch_plan(cast(PolicyRef, None), 0.0)
    assert (plan.advantage_estimator, plan.pass_k) == ("pass_at_k", 4)
    with pytest.raises(ValueError, match="pass_k=5 is more than completions_per_sample=4"):
        make(advantage_estimator="pass_at_k", pass_k=5, completions_per_sample=4)
    with pytest.raises(ValueError, match="advantage_estimator='pass_at_k' and pass_k=None: pass_at_k needs pass_k"):
        make(advantage_estimator="pass_at_k")
    with pytest.raises(ValueError, match="advantage_estimator='group' and pass_k=2"):
        make(pass_k=2)
    with pytest.raises(ValueError, match="greater than or equal to 2"):
        make(advantage_estimator="pass_at_k", pass_k=1)
    # a run without it has the semantic part of before
    assert "pass_k" not in make().algorithm.model_dump()


@pytest.mark.parametrize("make", [ppo, env_grpo, env_gspo, env_ppo])
def test_pass_at_k_is_of_the_completions_of_a_group(make: Any) -> None:
    with pytest.raises(ValueError, match="pass_k=2|has no advantage per turn|PPO's are the value model's"):
        make(advantage_estimator="pass_at_k", pass_k=2)
    with pytest.raises(ValueError, match="pass_k=2"):
        make(pass_k=2)


@pytest.mark.parametrize("make", [grpo, gspo, ppo, env_grpo, env_gspo, env_ppo])
def test_a_cap_on_weights_that_are_all_1_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="importance_cap=2.0 has no effect with old_logprobs='sampler'"):
        make(importance_cap=2.0, old_logprobs="sampler")
    assert make(importance_cap=2.0).loss.importance_cap == 2.0


@pytest.mark.parametrize("make", [grpo, gspo, ppo, env_grpo, env_gspo, env_ppo])
def test_completions_of_an_older_policy_have_a_correction(make: Any) -> None:
    """Decoupled PPO, unless another correction was given."""
    assert (make().loss.importance_cap, make().loss.importance_mask) == (None, None)
    assert make(max_staleness=1).loss.importance_cap == 2.0
    assert make(max_staleness=1, importance_cap=3.0).loss.importance_cap == 3.0
    assert make(max_staleness=1, old_logprobs="sampler").loss.importance_cap is None
    masked = make(max_staleness=1, importance_mask=TokenRatioMask(high=2.0)).loss
    assert (masked.importance_cap, masked.importance_mask) == (None, TokenRatioMask(low=0.5, high=2.0))
    grouped = make(max_staleness=1, regularisation=make().regularisation, importance_mask={"kind": "probability"}).loss
    assert grouped.importance_mask == ProbabilityMask(low=0.2, high=0.2)


@pytest.mark.parametrize("make", [grpo, gspo, ppo, env_grpo, env_gspo, env_ppo])
def test_a_mask_that_keeps_every_token_is_refused(make: Any) -> None:
    for mask in (TokenRatioMask(), SequenceRatioMask()):
        with pytest.raises(ValueError, match=f"kind '{mask.kind}' has no effect with old_logprobs='sampler'.* take"):
            make(importance_mask=mask, old_logprobs="sampler")
    with pytest.raises(ValueError, match=r"importance_cap=5.0 has no effect with importance_mask.high=5.0.* leave"):
        make(importance_mask=TokenRatioMask(), importance_cap=5.0)
    assert make(importance_mask=TokenRatioMask(), importance_cap=4.9).loss.importance_cap == 4.9
    assert make(importance_mask=ProbabilityMask(), old_logprobs="sampler").loss.importance_mask == ProbabilityMask()


@pytest.mark.parametrize("setting", [{"top_p": 0.9}, {"top_k": 5}])
@pytest.mark.parametrize(
    ("group", "option"),
    [
        ("regularisation", {"importance_cap": 2.0}), ("algorithm", {"old_logprobs": "sampler"}),
        ("regularisation", {"importance_mask": ProbabilityMask()}), ("rules", {"max_staleness": 1}),
    ],
)  # fmt: skip
def test_probabilities_of_a_part_of_the_vocabulary_are_not_divided_by_those_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: dict[str, float], group: str, option: dict[str, Any]
) -> None:
    (name, value) = next(iter(setting.items()))
    for make in (grpo, gspo, ppo, env_grpo, env_gspo, env_ppo):
        with monkeypatch.context() as patch:
            patch.setattr(POLICY, "sampling", SamplingParams(**setting))
            with pytest.raises(ValueError, match=f"which {name}={value} raise.*leave top_p and top_k out"):
                make(**option)
            assert make().rules.max_staleness == 0  # the trainer's logprobs are of all tokens
    with pytest.raises(ValueError, match=f"which {name}={value} raise.*leave top_p and top_k out"):
        config_of(ENVGRPOConfig, tmp_path, sampling=setting, **{group: option})


def test_ppo_has_the_value_models_advantages_alone() -> None:
    with pytest.raises(ValueError, match="PPO's are the value model's"):
        ppo(advantage_estimator="leave_one_out")


def test_a_penalty_of_ppo_may_stand_in_the_loss() -> None:
    inside, outside = env_ppo(kl_in="loss"), env_ppo()
    assert (inside.loss.kl_beta, inside.reward_kl) == (0.1, None)
    assert outside.loss.kl_beta == 0.0 and outside.reward_kl is not None and outside.reward_kl.beta == 0.1


def config_of(flow: type[ENVGRPOConfig], tmp_path: Path, **groups: Any) -> ENVGRPOConfig:
    return flow.model_validate(guess_config(tmp_path, tmp_path, run="r") | groups)


def test_configs_have_the_options_of_the_classes(tmp_path: Path) -> None:
    plain = config_of(ENVGRPOConfig, tmp_path)
    assert set(plain.semantic()["rules"]) == {"max_staleness"}
    regularisation = {"entropy_coef": 0.1, "importance_cap": 2.0}
    config = config_of(ENVGRPOConfig, tmp_path, regularisation=regularisation, rules={"max_staleness": 1})
    assert config.semantic()["regularisation"]["entropy_coef"] == 0.1
    assert config.semantic()["rules"] == {"max_staleness": 1}
    assert plain.regularisation.kl_in == "loss"
    assert ENVPPOConfig.model_fields["regularisation"].default.kl_in == "reward"


@pytest.mark.parametrize(
    ("flow", "groups", "message"),
    [
        (ENVGRPOConfig, {"regularisation": {"kl_in": "reward"}}, "regularisation.kl_in"),
        (ENVGRPOConfig, {"regularisation": {"norm_constant": 9.0}}, "loss_norm"),
        (ENVGRPOConfig, {"rules": {"dynamic_sampling": True}}, "rules.dynamic_sampling"),
        (ENVGSPOConfig, {"regularisation": {"policy_loss": "cispo"}}, "GSPO does not have"),
    ],
)
def test_options_without_a_meaning_in_an_environment_are_no_config(
    tmp_path: Path, flow: type[ENVGRPOConfig], groups: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        config_of(flow, tmp_path, **groups)


def test_groups_of_settings_are_taken_as_a_whole_and_checked_like_single_options() -> None:
    algorithm, rules = PPOAlgorithm(steps=7, samples_per_batch=8, kl_beta=0.2), BatchRules(max_staleness=1)
    regularisation, credit = PPORegularisation(importance_cap=2.0), CreditConfig(gae_lambda=0.5)
    rates = OptimizerConfig(lr=1e-3, schedule="constant", beta1=0.5)
    trainer = PPO(
        PROMPTS, POLICY, VALUE, GRADER, algorithm=algorithm, regularisation=regularisation, rules=rules, credit=credit,
        value_optimizer=rates,
    )  # fmt: skip
    groups = (trainer.algorithm, trainer.regularisation, trainer.rules, trainer.critic.credit)
    assert groups == (algorithm, regularisation, rules, credit) and trainer.max_steps == 7
    assert trainer.critic.schedule == ConstantScheduler(1e-3) and trainer.critic.optimizer.betas == (0.5, 0.999)
    # single options change them
    changed = PPO(PROMPTS, POLICY, VALUE, GRADER, algorithm=algorithm, credit=credit, kl_beta=0, gae_lambda=1)
    assert changed.algorithm == PPOAlgorithm(steps=7, samples_per_batch=8, kl_beta=0)
    assert changed.critic.credit == CreditConfig(gae_lambda=1)
    with pytest.raises(ValueError, match="both steps=7 and epochs=1"):
        PPO(PROMPTS, POLICY, VALUE, GRADER, algorithm=algorithm, epochs=1)
    # what the class does not have is refused
    with pytest.raises(TypeError, match="a GRPOAlgorithm was given as a group of settings; give a PPOAlgorithm"):
        ppo(algorithm=GRPOAlgorithm())
    with pytest.raises(ValueError, match="dynamic_sampling compares the completions of a group, and PPO has none"):
        ppo(rules=BatchRules(dynamic_sampling=True))
    for make in (env_grpo, env_gspo, env_ppo):
        with pytest.raises(ValueError, match=r"\['dynamic_sampling'\] act on single answers"):
            make(rules=BatchRules(dynamic_sampling=True))
    with pytest.raises(ValueError, match="which GSPO does not have"):
        gspo(regularisation=Regularisation(policy_loss="cispo"))
