"""Config of the `ppo` flow: that of `grpo`, and a value model."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from engine.losses.spec import KLEstimator
from flows.config import GRPOAlgorithm, GRPOConfig, ModelConfig
from flows.reinforcement_config import BatchRules, KLPlace, Regularisation
from flows.titles import training_title
from storage.models import Frozen
from tasks.value_batches import Returns


class PPOAlgorithm(GRPOAlgorithm):
    """PPO (arXiv:1707.06347). `samples_*` count completions."""

    completions_per_sample: int = Field(1, ge=1)
    """Completions of one prompt."""
    kl_beta: float = Field(0.1, ge=0)
    """Weight of the KL penalty; 0 skips the reference model altogether."""
    kl_estimator: KLEstimator = "k1"
    """Per token, with d the policy's log-probability less the reference's: k1 is d, abs |d|, k2 d²/2, k3 exp(-d) - 1 +
    d."""
    advantage_estimator: Literal["gae"] = "gae"  # type: ignore[assignment]  # the value model's
    """From the value model (GAE, arXiv:1506.02438); see `credit`."""


class CreditConfig(Frozen):
    """How the tokens of a completion are credited with its reward, and when the policy begins to be trained."""

    value_only_fraction: float = Field(0.25, ge=0, lt=1)
    """Share of the run, at its beginning, in which the value model alone is trained."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """0: each token by the next value; 1: by all that follows."""
    gae_gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token."""
    returns: Returns = "rewards"
    """What a value is trained to be: the discounted sum of the rewards, or the advantage plus the old value."""
    value_clip: float | None = Field(None, gt=0)
    """How far a value may leave the old one and still gain by it. None: any way."""
    whiten_advantages: bool = False
    """Shift and scale the advantages of a batch to mean 0 and variance 1 over its tokens."""


class ValueModelConfig(ModelConfig):
    """The value model: a scalar head on its own weights."""

    key: str | None = None  # type: ignore[assignment]  # the policy's
    """A registered model, or a folder. None: the policy's base model, with a new head."""
    name: str = "value"
    """The model's name within the run; not the policy's."""
    lr: float = Field(1e-6, gt=0)
    """The highest of its schedule, which is the optimizer's."""


class PPORegularisation(Regularisation):
    """What the policy's loss has besides the clipped ratio."""

    kl_in: KLPlace = "reward"
    """Where the KL term stands: taken off the reward, token by token, or in the loss."""


class PPOConfig(GRPOConfig):
    """`ostinato run ppo`: reinforcement learning from graded rollouts with a value model."""

    value_model: ValueModelConfig = ValueModelConfig()
    algorithm: PPOAlgorithm = PPOAlgorithm()
    credit: CreditConfig = CreditConfig()
    regularisation: PPORegularisation = PPORegularisation()
    rules: BatchRules = BatchRules()

    @property
    def title(self) -> str:
        """The flow run's name."""
        return training_title("ppo", self.model.key, self.data.train, self.seed)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        check_valued_run(self.model, self.value_model, self.algorithm, self.credit)
        if self.rules.dynamic_sampling:
            raise ValueError("rules.dynamic_sampling compares the completions of a group, and PPO has none; leave it")
        return self


def check_valued_run(
    model: ModelConfig, value_model: ValueModelConfig, algorithm: PPOAlgorithm, credit: CreditConfig
) -> None:
    """Two models have two names, and a share is of something. Raises ValueError."""
    if model.name == value_model.name:
        raise ValueError(f"model.name and value_model.name are both {model.name!r}; give them two names")
    if algorithm.steps is None and algorithm.epochs is None and credit.value_only_fraction > 0:
        raise ValueError(
            "without algorithm.steps or epochs, credit.value_only_fraction is a share of nothing; give a length, or "
            "value_only_fraction=0"
        )
