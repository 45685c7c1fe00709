"""Configs of the flows that train in environments."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, JsonValue, model_validator

from engine.protocol import SamplingParams
from flows.configs.common import (
    EvaluationConfig,
    GRPOAlgorithm,
    GRPOConfig,
    OptimizerConfig,
    PromptDataConfig,
    TrainingConfig,
    check_sampled_run,
)
from flows.configs.defaults import default_of
from flows.configs.gspo import GSPOAlgorithm, check_has_gspo
from flows.configs.reinforcement import BatchRules, Regularisation
from flows.configs.titles import training_title
from storage.number_types import Coefficient, Divisor, Positive
from storage.serialization import Frozen
from tasks.sampling.episodes import EpisodePlan


class EnvironmentConfig(Frozen):
    """What the policy acts in."""

    path: str = Field(title="Import path")
    """`package.module:name` of an EnvironmentFactory, or of an Environment that is made with the episode's metadata."""
    arguments: dict[str, JsonValue] = {}
    """What it is made with."""
    max_turns: int = Field(default_of(EpisodePlan, "max_turns"), ge=1)
    """Answers of one episode."""
    max_tokens: int | None = Field(None, ge=2)
    """Tokens of one episode: prompt, answers and what the environment says. None: the model's context."""
    episode_seconds: float | None = Field(None, gt=0)
    """What an episode's environment may take altogether. A run in which this acts cannot be repeated to the byte."""
    reaction_seconds: float = Field(default_of(EpisodePlan, "reaction_seconds"), gt=0)
    """What one reaction may take. An environment that fails or takes longer is made anew once; then the episode is
    masked."""
    concurrency: int = Field(default_of(EpisodePlan, "concurrency"), ge=1)
    """Environments that react at a time."""
    max_masked_fraction: float = Field(default_of(EpisodePlan, "max_masked_fraction"), ge=0, le=1)
    """The run fails when more of a shard's episodes than this cannot be played."""


class EnvironmentDataConfig(PromptDataConfig):
    """Prompts that episodes begin with, and prompts never to train on."""

    truncation: Literal["error", "drop"] = "error"  # type: ignore[assignment]  # a conversation cannot be cut
    """What happens to an episode whose first prompt is longer: error, or drop (counted)."""


class ENVGRPOAlgorithm(GRPOAlgorithm):
    """GRPO (arXiv:2402.03300) with an advantage per turn. `samples_*` count episodes."""

    kl_beta: Coefficient = 0.1
    """Weight of the KL term; 0 skips the reference model altogether."""
    advantage_estimator: Literal["group", "group_sample_std", "centred", "leave_one_out"] = "group"
    """From the grades of all turns of one prompt's episodes. group: less their mean, over their standard deviation
    (sample_std: with n - 1). centred: less their mean. leave_one_out: less the mean of the others."""


class ENVGSPOAlgorithm(GSPOAlgorithm, ENVGRPOAlgorithm):
    """GSPO (arXiv:2507.18071): one grade per episode. `samples_*` count episodes."""

    kl_beta: Coefficient = default_of(ENVGRPOAlgorithm, "kl_beta")
    """Weight of the KL term; 0 skips the reference model altogether."""
    advantage_estimator: Literal["group", "group_sample_std", "centred", "leave_one_out"] = "group"
    """From the grades of one prompt's episodes. group: less their mean, over their standard deviation (sample_std: with
    n - 1). centred: less their mean. leave_one_out: less the mean of the others."""


class EpisodeRegularisation(Regularisation):
    """What the policy's loss has besides the clipped ratio."""

    norm_constant: Divisor | None = None
    """Of loss_norm=constant: the tokens per episode to divide by. None: sampling.max_new_tokens of each turn."""
    kl_in: Literal["loss"] = "loss"
    """Where the KL term stands: a turn's advantage has no place for it."""
    kl_horizon: Positive = default_of(Regularisation, "kl_horizon")
    """Episodes over which kl_beta may change by a fifth."""


class EpisodeRules(Frozen):
    """From which policy the episodes of a step come."""

    max_staleness: int = Field(default_of(BatchRules, "max_staleness"), ge=0)
    """Episodes come from the policy of so many steps before, so that they are played while other steps train."""


class ENVGRPOConfig(TrainingConfig):
    """`ostinato run env_grpo`: reinforcement learning from episodes with an environment."""

    data: EnvironmentDataConfig
    environment: EnvironmentConfig
    sampling: SamplingParams = default_of(GRPOConfig, "sampling")
    algorithm: ENVGRPOAlgorithm = ENVGRPOAlgorithm()
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    regularisation: EpisodeRegularisation = EpisodeRegularisation()
    rules: EpisodeRules = EpisodeRules()

    @property
    def title(self) -> str:
        """The flow run's name."""
        return training_title("env_grpo", self.model.key, self.data.train, self.seed)

    @model_validator(mode="after")
    def _endless_runs_are_constant(self) -> Self:
        algorithm = self.algorithm
        check_sampled_run(algorithm, self.optimizer, self.checkpoints, self.sampling, self.evaluation)
        self.regularisation.check(algorithm.loss_norm, algorithm.kl_beta, algorithm.old_logprobs)
        return self


class ENVGSPOConfig(ENVGRPOConfig):
    """`ostinato run env_gspo`: reinforcement learning from episodes with an environment, one grade per episode."""

    algorithm: ENVGSPOAlgorithm = ENVGSPOAlgorithm()

    @property
    def title(self) -> str:
        """The flow run's name."""
        return training_title("env_gspo", self.model.key, self.data.train, self.seed)

    @model_validator(mode="after")
    def _no_loss_per_token(self) -> Self:
        check_has_gspo(None, self.regularisation.policy_loss)
        return self
