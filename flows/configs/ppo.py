"""Config of the `ppo` flow: that of `grpo`, and a value model."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from engine.losses.kl import KLEstimator
from flows.configs.common import GRPOAlgorithm, GRPOConfig, ModelConfig
from flows.configs.defaults import default_of
from flows.configs.optimizer import OptimizerConfig, ScheduleName
from flows.configs.reinforcement import BatchRules, KLPlace, Regularisation
from flows.configs.titles import training_title
from storage.number_types import MAX_RATE, Coefficient, Positive, Rate
from storage.serialization import Frozen
from tasks.batches.ppo import Returns, ValuePlan


class PPOAlgorithm(GRPOAlgorithm):
    """PPO (arXiv:1707.06347). `samples_*` count completions."""

    completions_per_sample: int = Field(1, ge=1)
    """Completions of one prompt."""
    kl_beta: Coefficient = 0.1
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
    gae_lambda: float = Field(default_of(ValuePlan, "lam"), ge=0, le=1)
    """0: each token by the next value; 1: by all that follows."""
    gae_gamma: float = Field(default_of(ValuePlan, "gamma"), gt=0, le=1)
    """Discount per token."""
    returns: Returns = default_of(ValuePlan, "returns")
    """What a value is trained to be: the discounted sum of the rewards, or the advantage plus the old value."""
    value_clip: Positive | None = None
    """How far a value may leave the old one and still gain by it. None: any way."""
    whiten_advantages: bool = default_of(ValuePlan, "whiten_advantages")
    """Shift and scale the advantages of a batch to mean 0 and variance 1 over its tokens."""


OF_SCHEDULE = ("warmup_steps", "warmup_ratio", "min_lr_ratio")
"""Settings of the value model's optimizer that go with a schedule of its own."""


class ValueOptimizer(Frozen):
    """Where the value model's AdamW and schedule are not those of the policy (`optimizer`)."""

    schedule: ScheduleName | None = None
    """None: the policy's, with its warm-up and its lowest rate."""
    warmup_steps: int | None = Field(None, ge=0)
    """Steps over which the rate rises to value_model.lr. None: as the schedule says, or warmup_ratio."""
    warmup_ratio: float | None = Field(None, ge=0, le=1)
    """The same as a share of the run."""
    min_lr_ratio: float | None = Field(None, ge=0, le=1)
    """The lowest rate, as a share of value_model.lr. None: as the schedule says."""
    weight_decay: Rate | None = None
    """Decoupled (AdamW), the same in every step. None: the policy's."""
    beta1: float | None = Field(None, ge=0, lt=1)
    """Share that the mean of the gradients keeps per update. None: the policy's."""
    beta2: float | None = Field(None, ge=0, lt=1)
    """Share that the mean of their squares keeps per update. None: the policy's."""
    max_grad_norm: float | None = Field(None, gt=0, allow_inf_nan=False)
    """A longer gradient is scaled down to this L2 norm. None: the policy's."""

    @model_validator(mode="after")
    def _fits_the_schedule(self) -> Self:
        if self.schedule is None and (given := [name for name in OF_SCHEDULE if getattr(self, name) is not None]):
            raise ValueError(f"{', '.join(given)} without a schedule, which is then the policy's; give schedule too")
        try:
            self.over(OptimizerConfig(), 1.0)
        except ValidationError as error:
            raise ValueError("; ".join(one["msg"].removeprefix("Value error, ") for one in error.errors())) from None
        return self

    def over(self, policy: OptimizerConfig, lr: float) -> OptimizerConfig:
        """The value model's, with what is not said here from the policy's."""
        body = policy.model_dump() | {"lr": lr}
        if self.schedule is not None:
            for name in (*OF_SCHEDULE, "cycles", "decay_ratio"):
                del body[name]
        if self.weight_decay is not None:
            body |= {"weight_decay_schedule": "constant", "weight_decay_end": None}
        return OptimizerConfig.model_validate(body | self.model_dump(exclude_none=True))


class ValueModelConfig(ModelConfig):
    """The value model: a scalar head on its own weights."""

    key: str | None = None  # type: ignore[assignment]  # the policy's
    """A registered model, or a folder. None: the policy's base model, with a new head."""
    name: str = "value"
    """The model's name within the run; not the policy's."""
    lr: float = Field(1e-6, gt=0, le=MAX_RATE)
    """The highest of its schedule, which is the optimizer's unless `optimizer` here says another."""
    optimizer: ValueOptimizer | None = None
    """None: AdamW and schedule as the policy's."""

    def optimizer_over(self, policy: OptimizerConfig) -> OptimizerConfig:
        """The value model's AdamW and schedule."""
        return (self.optimizer or ValueOptimizer()).over(policy, self.lr)


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
        check_valued_run(self.model, self.value_model, self.algorithm, self.credit, self.optimizer)
        if self.rules.dynamic_sampling:
            raise ValueError("rules.dynamic_sampling compares the completions of a group, and PPO has none; leave it")
        return self


def check_valued_run(
    model: ModelConfig,
    value_model: ValueModelConfig,
    algorithm: PPOAlgorithm,
    credit: CreditConfig,
    optimizer: OptimizerConfig,
) -> None:
    """Two models have two names, a share is of something, and a schedule that bends has an end. Raises ValueError."""
    if model.name == value_model.name:
        raise ValueError(f"model.name and value_model.name are both {model.name!r}; give them two names")
    endless = algorithm.steps is None and algorithm.epochs is None
    own = value_model.optimizer_over(optimizer)
    if endless and not own.endless:
        raise ValueError(
            f"neither algorithm.steps nor algorithm.epochs is given, and value_model.optimizer.schedule="
            f"{own.schedule!r} has no end to bend to; give steps, or use 'constant'"
        )
    if endless and credit.value_only_fraction > 0:
        raise ValueError(
            "without algorithm.steps or epochs, credit.value_only_fraction is a share of nothing; give a length, or "
            "value_only_fraction=0"
        )
