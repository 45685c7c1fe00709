"""The conditions under which verl reads a key. keys.toml refers to them by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flows.verl.read import Verl, VerlError
from flows.verl.values import ACTOR, ROLLOUT, flow_of
from flows.verl.workers import strategy_of


@dataclass(frozen=True)
class Condition:
    """A condition on a verl config. `otherwise` says why the key has no effect if the condition does not hold."""

    holds: Callable[[Verl], bool]
    otherwise: str


def _model_of(verl: Verl) -> str:
    return "actor_rollout_ref.model." if verl.kind == "ppo_trainer" else "model."


def _on(*keys: str) -> Callable[[Verl], bool]:
    """A condition that holds if any of the keys has a true value."""
    return lambda verl: any(bool(verl.get(key)) for key in keys)


def _loss_mode(verl: Verl) -> str:
    return str(verl.get(ACTOR + "policy_loss.loss_mode"))


CONDITIONS: dict[str, Condition] = {
    "adaptive_kl": Condition(
        lambda verl: bool(verl.get("algorithm.use_kl_in_reward")) and verl.get("algorithm.kl_ctrl.type") == "adaptive",
        "the KL controller is fixed",
    ),
    "agent": Condition(
        lambda verl: verl.get(ROLLOUT + "agent.default_agent_loop") != "single_turn_agent", "no agent loop is used"
    ),
    "async": Condition(lambda verl: verl.get("trainer.v1.trainer_mode") != "sync", "the trainer mode is sync"),
    "automodel": Condition(lambda verl: strategy_of(verl) == "automodel", "the trainer is not Automodel"),
    "bypass": Condition(_on("algorithm.rollout_correction.bypass_mode"), "bypass_mode is false"),
    "clipped": Condition(lambda verl: _loss_mode(verl) == "vanilla", "this loss has no second clip"),
    "cpu_offload": Condition(_on("model.fsdp_config.cpu_offload"), "cpu_offload is false"),
    "critic": Condition(lambda verl: flow_of(verl) == "ppo", "there is no critic: adv_estimator is not gae"),
    "critic_lora": Condition(lambda verl: (verl.get("critic.model.lora_rank") or 0) > 0, "the critic's lora_rank is 0"),
    "distillation": Condition(_on("distillation.enabled"), "distillation is off"),
    "filter_groups": Condition(_on("algorithm.filter_groups.enable"), "filter_groups is off"),
    "importance": Condition(
        lambda verl: (
            verl.get("algorithm.rollout_correction.rollout_is") == "token"
            and not verl.get("algorithm.rollout_correction.bypass_mode")
        ),
        "rollout_is is null, or bypass_mode is true, which needs no weights",
    ),
    "kl_in_reward": Condition(_on("algorithm.use_kl_in_reward"), "use_kl_in_reward is false"),
    "kl_loss": Condition(_on(ACTOR + "use_kl_loss"), "use_kl_loss is false"),
    "lora": Condition(lambda verl: (verl.get(_model_of(verl) + "lora_rank") or 0) > 0, "lora_rank is 0"),
    "megatron": Condition(lambda verl: strategy_of(verl) == "megatron", "the trainer is not Megatron"),
    "megatron_lora": Condition(
        lambda verl: strategy_of(verl) == "megatron" and (verl.get("actor_rollout_ref.model.lora.rank") or 0) > 0,
        "the strategy is not megatron, or lora.rank is 0",
    ),
    "mtp_rollout": Condition(
        lambda verl: bool(
            verl.get(_model_of(verl) + "mtp.enable") and verl.get(_model_of(verl) + "mtp.enable_rollout")
        ),
        "multi-token-prediction heads do not sample: mtp.enable or mtp.enable_rollout is false",
    ),
    "multi_turn": Condition(_on(ROLLOUT + "multi_turn.enable"), "multi_turn is off"),
    "multiturn": Condition(_on("data.multiturn.enable"), "multiturn is off"),
    "other_loss": Condition(
        lambda verl: _loss_mode(verl) not in ("vanilla", "gspo", "cispo", "gpg", "geo_mean", "sapo"),
        "this loss is not used",
    ),
    "pf_ppo": Condition(_on("algorithm.use_pf_ppo"), "use_pf_ppo is false"),
    "resume_path": Condition(
        lambda verl: verl.get("trainer.resume_mode") == "resume_path", "resume_mode is not resume_path"
    ),
    "reward_model": Condition(
        _on("reward_model.enable", "reward.reward_model.enable"), "there is no reward model: enable is false"
    ),
    "sapo": Condition(lambda verl: _loss_mode(verl) == "sapo", "the loss is not sapo"),
    "validation": Condition(_on("data.val_files"), "there are no val_files"),
    "veomni": Condition(lambda verl: strategy_of(verl) == "veomni", "the trainer is not VeOmni"),
    "vllm": Condition(lambda verl: verl.get(ROLLOUT + "name") not in ("hf",), "the sampler is not vLLM"),
}


def unmet_condition(verl: Verl, when: str | None) -> str | None:
    """Returns why a key with this condition has no effect, or None if the condition holds."""
    if when is None:
        return None
    try:
        holds = CONDITIONS[when].holds(verl)
    except TypeError as error:
        raise VerlError(
            f"a key that decides whether others are read has a value of the wrong type ({error}); they are read unless "
            f"{CONDITIONS[when].otherwise}"
        ) from error
    return None if holds else CONDITIONS[when].otherwise
