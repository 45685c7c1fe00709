"""The configs of the flows that train in environments: `env_grpo` and `env_gspo`."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from engine import import_paths
from engine.protocol import SamplingParams
from flows.configs.common import EvaluationConfig, GRPOAlgorithm, GRPOConfig, OptimizerConfig, RolloutConfig
from flows.configs.inputs import PromptDataConfig
from flows.configs.ppo import (
    CreditConfig,
    GSPOAlgorithm,
    PPOAlgorithm,
    PPORegularisation,
    ValuedConfig,
    ValueModelConfig,
    check_has_gspo,
)
from flows.configs.reinforcement import (
    SEGMENT_SECONDS,
    BatchRules,
    KLPlace,
    Regularisation,
    SamplingRules,
    check_weight_updates,
)
from storage.serialization import Coefficient, Divisor, Frozen, Positive, default_of
from tasks.environments.spec import check_agent
from tasks.plans import AgentPlan, EpisodePlan, WeightUpdates


class EnvironmentConfig(Frozen):
    """The environment that the policy acts in, and the limits of an episode."""

    path: str = Field(title="Import path", pattern=import_paths.PATTERN)
    """Import path of the environment, `package.module:name`: an EnvironmentFactory, or an Environment that is
    constructed with the episode's metadata."""
    arguments: dict[str, JsonValue] = {}
    """Keyword arguments of the constructor of the environment."""
    max_turns: int = Field(default_of(EpisodePlan, "max_turns"), ge=1)
    """Largest number of the policy's answers in an episode."""
    max_tokens: int | None = Field(None, ge=2)
    """Longest conversation of an episode, in tokens: prompt, answers and the environment's turns. None: the model's
    context."""
    episode_seconds: float | None = Field(None, gt=0)
    """Time limit of an episode's environment, in seconds. A run in which this limit acts cannot be repeated byte by
    byte. None: no limit."""
    reaction_seconds: float = Field(default_of(EpisodePlan, "reaction_seconds"), gt=0)
    """Time limit of one reaction of the environment, in seconds. An environment that fails or exceeds it is created
    again once; then the episode is masked."""
    concurrency: int = Field(default_of(EpisodePlan, "concurrency"), ge=1)
    """Number of environments that react at the same time."""
    max_masked_fraction: float = Field(default_of(EpisodePlan, "max_masked_fraction"), ge=0, le=1)
    """Largest fraction of a shard's episodes that may fail. The run fails above it."""


class AgentConfig(Frozen):
    """The agent that plays the episodes by calling the policy, and the limits of an episode."""

    path: str | None = Field(None, title="Import path", pattern=import_paths.PATTERN)
    """Import path of the agent, `package.module:name`: an async function of the task and a client of the openai package
    that returns the reward. None: the agent is a command."""
    command: tuple[str, ...] = ()
    """Program and arguments of the agent. It reads the task as JSON from its standard input, calls OPENAI_BASE_URL, and
    prints its reward as JSON in its last line. Empty: the agent is a function."""
    max_calls: int = Field(default_of(AgentPlan, "max_calls"), ge=1)
    """Largest number of the policy's answers in an episode."""
    max_tokens: int | None = Field(None, ge=2)
    """Longest prompt and answer together, in tokens. None: the model's context."""
    seconds: float = Field(default_of(AgentPlan, "seconds"), gt=0)
    """Time limit of an episode, in seconds, without the time in which the agent waits for answers. A run in which this
    limit acts cannot be repeated byte by byte."""
    memory_mib: int | None = Field(None, title="Memory in MiB", ge=64)
    """Largest address space of each process of the agent, in MiB. None: no limit."""
    retries: int = Field(default_of(AgentPlan, "retries"), ge=0)
    """How often an agent that fails is started again, before its episode is masked."""
    concurrency: int = Field(default_of(AgentPlan, "concurrency"), ge=1)
    """Number of agents that run at the same time."""
    max_masked_fraction: float = Field(default_of(AgentPlan, "max_masked_fraction"), ge=0, le=1)
    """Largest fraction of a shard's episodes that may fail. The run fails above it."""

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        check_agent(self.path, self.command)
        return self


class EnvironmentDataConfig(PromptDataConfig):
    """The prompts that episodes begin with, and held-out prompts for the evaluation."""

    truncation: Literal["error", "drop"] = "error"  # type: ignore[assignment]  # a conversation cannot be cut
    """What happens to an episode whose first prompt is longer than max_prompt_tokens. error: the run fails. drop: the
    episode is left out and counted."""


class ENVGRPOAlgorithm(GRPOAlgorithm):
    """The algorithm GRPO (arXiv:2402.03300) with an advantage per turn. `samples_*` count episodes."""

    kl_beta: Coefficient = 0.1
    """Coefficient of the KL term. With 0, no reference model is computed."""
    advantage_estimator: Literal["group", "group_sample_std", "centred", "leave_one_out"] = "group"
    """How the advantages follow from the grades of all turns of one prompt's episodes. group: grade minus the mean,
    divided by the standard deviation (group_sample_std: the sample standard deviation). centred: grade minus the mean.
    leave_one_out: grade minus the mean of the others."""


class ENVGSPOAlgorithm(GSPOAlgorithm, ENVGRPOAlgorithm):
    """The algorithm GSPO (arXiv:2507.18071) with one grade per episode. `samples_*` count episodes."""

    kl_beta: Coefficient = default_of(ENVGRPOAlgorithm, "kl_beta")
    """Coefficient of the KL term. With 0, no reference model is computed."""
    advantage_estimator: Literal["group", "group_sample_std", "centred", "leave_one_out"] = "group"
    """How the advantages follow from the grades of one prompt's episodes. group: grade minus the mean, divided by the
    standard deviation (group_sample_std: the sample standard deviation). centred: grade minus the mean. leave_one_out:
    grade minus the mean of the others."""


class EpisodeRegularisation(Regularisation):
    """Further terms and variants of the policy loss."""

    norm_constant: Divisor | None = None
    """Tokens per episode that loss_norm=constant divides by. None: sampling.max_new_tokens times
    environment.max_turns or agent.max_calls."""
    kl_in: Literal["loss"] = "loss"
    """Where the KL term is. In environments it is in the loss, because rewards belong to turns."""
    kl_horizon: Positive = default_of(Regularisation, "kl_horizon")
    """Number of episodes over which the adaptive controller may change kl_beta by a fifth."""


class EpisodeRules(SamplingRules):
    """Rules for which policy the episodes of a step are sampled from, and for when a run ends early."""

    max_staleness: int = Field(default_of(BatchRules, "max_staleness"), ge=0)
    """Age in steps of the policy that episodes are sampled from. Above 0, episodes are played while earlier steps
    train, and the loss corrects for their age: by regularisation.importance_cap or importance_mask, or by
    algorithm.old_logprobs=sampler. Without any of them, importance_cap is 2."""
    weight_updates: WeightUpdates = Field("between", exclude_if=lambda value: value == "between")
    """When episodes that are being played get newer weights. between: never. in_flight: as soon as a step is committed,
    also within an answer; no token is older than max_staleness steps. An episode that a crash ended is played again
    from its beginning."""
    segment_seconds: Positive = Field(SEGMENT_SECONDS, exclude_if=lambda seconds: seconds == SEGMENT_SECONDS)
    """Seconds of sampling after which an answer takes newer weights from a sampler that shares the trainer's, with
    weight_updates=in_flight. Others take them at once."""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        check_weight_updates(self.max_staleness, self.weight_updates, self.segment_seconds)
        return self


class ENVGRPOConfig(RolloutConfig):
    """`ostinato run env_grpo`: reinforcement learning from episodes with an environment."""

    flow: ClassVar[str] = "env_grpo"

    data: EnvironmentDataConfig
    environment: EnvironmentConfig | None = Field(None, exclude_if=lambda value: value is None)
    """The environment that plays the episodes. None: an agent does."""
    agent: AgentConfig | None = Field(None, exclude_if=lambda value: value is None)
    """The agent that plays the episodes. None: an environment does."""
    sampling: SamplingParams = default_of(GRPOConfig, "sampling")
    algorithm: ENVGRPOAlgorithm = ENVGRPOAlgorithm()
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    regularisation: EpisodeRegularisation = EpisodeRegularisation()
    rules: EpisodeRules = EpisodeRules()

    @property
    def batch_rules(self) -> BatchRules:
        return BatchRules(**dict(self.rules))

    @property
    def longest_rollout(self) -> int:
        # every turn may have a completion of the maximum length
        return self.most_turns * self.sampling.max_new_tokens

    @property
    def most_turns(self) -> int:
        """The largest number of answers in an episode."""
        if self.agent is not None:
            return self.agent.max_calls
        assert self.environment is not None  # one of both is given
        return self.environment.max_turns

    @model_validator(mode="after")
    def _is_played_by_one(self) -> Self:
        if (self.environment is None) == (self.agent is None):
            number = "both" if self.agent else "neither"
            raise ValueError(f"episodes are played by an environment or by an agent, and {number} was given; give one")
        if self.agent is not None and self.data.max_prompt_tokens is not None:
            raise ValueError(
                f"data.max_prompt_tokens={self.data.max_prompt_tokens}: an agent writes its prompts itself; leave it "
                "out, and limit them by agent.max_tokens"
            )
        return self


class ENVGSPOConfig(ENVGRPOConfig):
    """`ostinato run env_gspo`: reinforcement learning from episodes with an environment, one grade per episode."""

    flow: ClassVar[str] = "env_gspo"

    algorithm: ENVGSPOAlgorithm = ENVGSPOAlgorithm()

    @model_validator(mode="after")
    def _no_loss_per_token(self) -> Self:
        check_has_gspo(None, self.regularisation.policy_loss)
        return self


class ENVPPOAlgorithm(PPOAlgorithm):
    """The algorithm PPO (arXiv:1707.06347) over the policy's own tokens of an episode. `samples_*` count episodes."""


class ENVPPORegularisation(EpisodeRegularisation):
    """Further terms and variants of the policy loss."""

    kl_in: KLPlace = default_of(PPORegularisation, "kl_in")  # type: ignore[assignment]  # every token has a reward of its own
    """Where the KL term is: subtracted from the reward of each token, or in the loss."""


class ENVPPOConfig(ENVGRPOConfig, ValuedConfig):
    """`ostinato run env_ppo`: reinforcement learning from episodes with an environment, with a value model."""

    flow: ClassVar[str] = "env_ppo"

    value_model: ValueModelConfig = ValueModelConfig()
    algorithm: ENVPPOAlgorithm = ENVPPOAlgorithm()  # type: ignore[assignment]  # its advantages are the value model's
    credit: CreditConfig = CreditConfig()
    regularisation: ENVPPORegularisation = ENVPPORegularisation()
