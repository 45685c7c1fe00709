"""The keyword arguments of the training classes, as types: an editor lists them, and a type checker refuses others.

An option with the name of a field of a config (flows.configs) is declared as that field is: a test compares the two,
and prints the lines to write here. The default, the bounds and the description are in the config class. `read_options`
makes a config of the options of a class. The options of the training classes in environments are read and checked here
as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypedDict, TypeVar

from pydantic import JsonValue, ValidationError

from engine.losses.base import KLEstimator, LossNorm, TermsNorm
from engine.losses.policy_gradient import ImportanceMask, PolicyLoss
from flows.callbacks import Callback
from flows.configs.common import GRPOAlgorithm, SFTAlgorithm
from flows.configs.distill import Divergence
from flows.configs.optimizer import OptimizerConfig
from flows.configs.overrides import ConfigError, describe_validation
from flows.configs.ppo import CreditConfig
from flows.configs.reinforcement import (
    BatchRules,
    CovarianceSettings,
    ImportPath,
    KLControl,
    KLPlace,
    RefillEnd,
    Regularisation,
    RunRules,
    SamplingRules,
)
from flows.configs.rejection import RFTAlgorithm
from flows.display.terminal import TerminalProgress
from flows.loggers import StageNotifier
from flows.training.checkpointing import CheckpointSchedule
from flows.training.schedules import Schedule
from storage.chain.records import OldLogprobs
from storage.serialization import Coefficient, Divisor, Frozen, Positive, default_of
from tasks.batches.advantages import ESTIMATORS
from tasks.batches.truncation import Cut
from tasks.environments.base import EnvironmentFactory
from tasks.environments.spec import EnvironmentSpec, in_process_spec
from tasks.plans import (
    AdvantageEstimator,
    AgentPlan,
    EpisodePlan,
    KeepKind,
    Returns,
    RoundStart,
    Truncation,
    WeightUpdates,
)

Config = TypeVar("Config", bound=Frozen)

NOT_OF_EPISODES = (
    "dynamic_sampling", "mask_truncated", "overlong_buffer", "overlong_penalty", "max_refill_rounds", "refill_end",
    "max_skipped_steps",
)  # fmt: skip
"""Options that act on single answers, of which an episode has several."""


class LoopOptions(TypedDict, total=False):
    """Options of every training class."""

    optimizer: OptimizerConfig
    """A group of settings as a config has it. Single options change it. The same holds for the other groups."""
    lr_scheduler: Schedule | None
    """Replaces the learning rate."""
    logger: TerminalProgress | None
    max_grad_norm: float
    weight_decay: float | Schedule
    betas: tuple[float, float]
    """beta1 and beta2 of AdamW."""
    eps: float
    skip_nan_gradients: bool
    checkpoint_frequency: float | None
    checkpoint_every_steps: int | None
    checkpoints: CheckpointSchedule | None
    """Replaces `checkpoint_frequency` and `checkpoint_every_steps`."""
    data_seed: int
    callbacks: Sequence[Callback]
    stage_notifier: StageNotifier | None
    max_idle_steps: int | None
    patience: int | None
    max_hours: Positive | None
    max_gpu_hours: Positive | None
    restart_from_checkpoint: str | None
    """A named checkpoint, `run/stage/name`. The stage begins with its weights."""


class SupervisedOptions(LoopOptions, total=False):
    """Options of SFT and RewardModelling."""

    algorithm: SFTAlgorithm
    rules: RunRules
    lr: float
    max_steps: int | None
    epochs: int | None
    samples_per_batch: int
    max_tokens: int | None
    truncation: Cut


class AlgorithmOptions(TypedDict, total=False):
    """Fields of flows.configs.common.GRPOAlgorithm."""

    epochs: int | None
    samples_per_batch: int
    samples_per_mini_batch: int
    mini_epochs_per_batch: int
    completions_per_sample: int
    clip_range: float
    clip_range_high: Positive | None
    dual_clip: float | None
    kl_beta: Coefficient
    kl_estimator: KLEstimator
    loss_norm: LossNorm
    advantage_estimator: AdvantageEstimator
    pass_k: int | None
    old_logprobs: OldLogprobs
    prompts_per_shard: int


class RegularisationOptions(TypedDict, total=False):
    """Fields of flows.configs.reinforcement.Regularisation."""

    policy_loss: PolicyLoss | ImportPath
    policy_loss_arguments: dict[str, JsonValue]
    tau_positive: Positive
    tau_negative: Positive
    covariance: CovarianceSettings | None
    entropy_coef: Coefficient
    importance_cap: Positive | None
    importance_mask: ImportanceMask | None
    norm_constant: Divisor | None
    kl_in: KLPlace
    kl_importance: bool
    kl_controller: KLControl
    kl_target: Divisor
    kl_horizon: Positive
    terms_norm: TermsNorm | None
    gamma: float


class BatchOptions(TypedDict, total=False):
    """Fields of flows.configs.reinforcement.BatchRules, except those of RunRules and SamplingRules."""

    dynamic_sampling: bool
    max_refill_rounds: int
    refill_end: RefillEnd
    max_staleness: int
    weight_updates: WeightUpdates
    segment_seconds: Positive
    mask_truncated: bool
    overlong_buffer: int | None
    overlong_penalty: Positive
    max_skipped_steps: int


class SamplingOptions(TypedDict, total=False):
    """Fields of flows.configs.reinforcement.SamplingRules, except those of RunRules."""

    max_tokens_sampled: int | None


class PolicyOptions(
    LoopOptions, AlgorithmOptions, RegularisationOptions, BatchOptions, SamplingOptions, total=False
):
    """Options of every training class of reinforcement learning."""

    algorithm: GRPOAlgorithm
    regularisation: Regularisation
    rules: BatchRules
    max_prompt_tokens: int | None
    truncation: Truncation


class GRPOOptions(PolicyOptions, total=False):
    """Options of GRPO and GSPO."""

    lr: float


class DistillOptions(GRPOOptions, total=False):
    """Options of Distillation."""

    teacher_beta: Coefficient
    divergence: Divergence
    divergence_beta: float
    teacher_top_k: int
    teacher_column: str | None
    on_policy: float


class RFTOptions(LoopOptions, SamplingOptions, total=False):
    """Options of RFT: fields of flows.configs.rejection.RFTAlgorithm, and those of its fine-tuning and sampling."""

    algorithm: RFTAlgorithm
    rules: SamplingRules
    lr: float
    max_prompt_tokens: int | None
    truncation: Truncation
    rounds: int
    prompts_per_round: int | None
    completions_per_sample: int
    keep: KeepKind
    keep_per_prompt: int
    min_reward: float
    start_from: RoundStart
    epochs: int
    samples_per_batch: int
    prompts_per_shard: int


class CriticOptions(TypedDict, total=False):
    """Options of the value model of PPO: fields of flows.configs.ppo.CreditConfig, and its optimizer."""

    credit: CreditConfig
    value_optimizer: OptimizerConfig
    value_only_fraction: float
    gae_lambda: float
    gae_gamma: float
    returns: Returns
    value_clip: Positive | None
    whiten_advantages: bool
    value_loss_norm: LossNorm
    value_norm_constant: Divisor | None
    lr_value: float
    value_lr_scheduler: Schedule | None
    """Replaces `lr_value`."""
    value_weight_decay: float | Schedule | None
    """None: the value of the policy. The same holds for the next three."""
    value_betas: tuple[float, float] | None
    value_eps: float | None
    value_max_grad_norm: float | None


class PPOOptions(PolicyOptions, CriticOptions, total=False):
    """Options of PPO."""

    lr_policy: float
    lr_scheduler_policy: Schedule | None
    """An alias of `lr_scheduler`."""
    lr_scheduler_value: Schedule | None
    """An alias of `value_lr_scheduler`."""


class EpisodeLimits(TypedDict, total=False):
    """Fields of flows.configs.environments.EnvironmentConfig."""

    max_turns: int
    max_tokens: int | None
    episode_seconds: float | None
    reaction_seconds: float
    concurrency: int
    max_masked_fraction: float


class EpisodeOptions(GRPOOptions, EpisodeLimits, total=False):
    """Options of ENVGRPO and ENVGSPO."""


class EpisodePPOOptions(PPOOptions, EpisodeLimits, total=False):
    """Options of ENVPPO."""


def check_names(owner: str, options: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises TypeError for an option that the class `owner` does not have."""
    known = sorted(names)
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"its options are {', '.join(known)}"
            raise TypeError(f"{owner}() got an unexpected keyword argument {name!r}; {hint}")


def read_options(
    config_type: type[Config], options: Mapping[str, Any], group: Config | None = None, **values: Any
) -> Config:
    """The group, or the defaults of its class, with the options that its fields name, and with `values`. Raises
    ConfigError, a ValueError, that names each wrong option."""
    named = {name: options[name] for name in config_type.model_fields if name in options} | values
    if not isinstance(group, config_type | None):
        raise TypeError(f"a {type(group).__name__} was given as a group of settings; give a {config_type.__name__}")
    try:
        if group is not None:
            return type(group).model_validate(dict(group) | named)
        return config_type.model_validate(named)
    except ValidationError as error:
        raise ConfigError(describe_validation(error, config_type, named)) from None


def episode_plan(
    environment: EnvironmentFactory | EnvironmentSpec | EpisodePlan | AgentPlan, options: EpisodeLimits
) -> EpisodePlan | AgentPlan:
    """The environment, and the limits of its episodes that the options give; or the agent with its own limits. Raises
    ValueError for limits of an environment that are given with an agent."""
    limits = {name: value for name, value in options.items() if name in EpisodeLimits.__annotations__}
    if isinstance(environment, AgentPlan):
        if limits:
            raise ValueError(f"{sorted(limits)} limit episodes with an environment; give the limits in the AgentPlan")
        return environment
    if isinstance(environment, EpisodePlan):
        return EpisodePlan.model_validate(dict(environment) | limits)
    # a factory exists in this process only, so the spec says that
    if isinstance(environment, EnvironmentFactory):
        environment = in_process_spec(environment)
    return EpisodePlan.model_validate({"environment": environment, **limits})


def check_episode_options(options: Mapping[str, Any]) -> None:
    """Raises ValueError for options that act on single answers."""
    values = {**dict(options.get("rules", ())), **options}
    changed = []
    for name in NOT_OF_EPISODES:
        if name in values and values[name] != default_of(BatchRules, name):
            changed.append(name)
    if changed:
        raise ValueError(f"{changed} act on single answers, and an episode has several; leave them out")
    if "grader" in options:
        raise ValueError("the environment grades the turns of an episode; leave the grader out")


def check_turn_options(options: Mapping[str, Any]) -> None:
    """Raises ValueError for options that have no meaning where each turn has one advantage."""
    kl_in = options.get("kl_in", "loss")
    if kl_in != "loss":
        raise ValueError(f"kl_in={kl_in!r}: in environments the KL term is in the loss; leave it out")
    estimator = options.get("advantage_estimator")
    if estimator is not None and estimator not in ESTIMATORS:
        raise ValueError(
            f"advantage_estimator={estimator!r} has no advantage per turn; take one of {', '.join(ESTIMATORS)}"
        )
