"""The configs of the `gspo` and `ppo` flows: that of `grpo` with one ratio per completion, and with a value model."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator

from engine.losses.base import KLEstimator, LossNorm
from engine.losses.policy_gradient import GSPOSpec
from engine.losses.values import MSESpec
from flows.configs.common import GRPOAlgorithm, GRPOConfig, RolloutConfig
from flows.configs.inputs import ModelConfig
from flows.configs.optimizer import OptimizerConfig, ScheduleName
from flows.configs.reinforcement import KLPlace, Regularisation
from storage.serialization import MAX_RATE, Coefficient, Divisor, Frozen, Positive, Rate, default_of
from tasks.plans import Returns, ValuePlan


class PPOAlgorithm(GRPOAlgorithm):
    """The algorithm PPO (arXiv:1707.06347). `samples_*` count completions."""

    completions_per_sample: int = Field(1, ge=1)
    """Completions per prompt."""
    kl_beta: Coefficient = 0.1
    """Coefficient of the KL penalty. With 0, no reference model is computed."""
    kl_estimator: KLEstimator = "k1"
    """Estimator of the KL divergence per token. With d the policy's log-probability minus the reference's: k1 is d, abs
    is |d|, k2 is d²/2, k3 is exp(-d) - 1 + d."""
    advantage_estimator: Literal["gae"] = "gae"  # type: ignore[assignment]  # the value model's
    """How the advantages are computed: from the value model by GAE (arXiv:1506.02438). Its settings are in the group
    credit."""


class CreditConfig(Frozen):
    """How the tokens of a completion are credited with its reward, and when the policy's training begins."""

    value_only_fraction: float = Field(0.25, ge=0, lt=1)
    """Fraction of the run, at its beginning, in which only the value model is trained."""
    gae_lambda: float = Field(default_of(ValuePlan, "lam"), ge=0, le=1)
    """Lambda of GAE. 0: an advantage depends on the next value alone. 1: on all later rewards."""
    gae_gamma: float = Field(default_of(ValuePlan, "gamma"), gt=0, le=1)
    """Discount factor of later rewards, per token."""
    returns: Returns = default_of(ValuePlan, "returns")
    """Target of the value model. rewards: the discounted sum of the rewards. advantages: the advantage plus the old
    value."""
    value_clip: Positive | None = None
    """Clip range of a new value around the old value, beyond which the value loss has no gradient. None: no clip."""
    whiten_advantages: bool = default_of(ValuePlan, "whiten_advantages")
    """Shift and scale the advantages to mean 0 and variance 1 over the tokens of a batch."""
    value_loss_norm: LossNorm = Field(default_of(MSESpec, "norm"), exclude_if=lambda norm: norm == "token_mean")
    """Normalisation of the value loss. The values are those of algorithm.loss_norm."""
    value_norm_constant: Divisor | None = Field(None, exclude_if=lambda constant: constant is None)
    """Tokens per completion that value_loss_norm=constant divides by. That norm needs it."""

    @model_validator(mode="after")
    def _constant_goes_with_its_norm(self) -> Self:
        if (self.value_loss_norm == "constant") != (self.value_norm_constant is not None):
            raise ValueError(
                f"value_loss_norm={self.value_loss_norm!r} and value_norm_constant={self.value_norm_constant}; give "
                "a constant with the norm 'constant', and with no other"
            )
        return self


SCHEDULE_SETTINGS = ("warmup_steps", "warmup_ratio", "min_lr_ratio")
"""Settings of the value model's optimizer that need a schedule of its own."""


class ValueOptimizer(Frozen):
    """Settings in which the optimizer of the value model differs from the policy's (the group optimizer)."""

    schedule: ScheduleName | None = None
    """Shape of the value model's learning rate over the run. None: the policy's, with its warm-up and its lowest
    rate."""
    warmup_steps: int | None = Field(None, ge=0)
    """Steps over which the value model's learning rate rises to value_model.lr. None: the default of the schedule, or
    warmup_ratio."""
    warmup_ratio: float | None = Field(None, ge=0, le=1)
    """Fraction of the run over which the value model's learning rate rises to value_model.lr (instead of
    warmup_steps)."""
    min_lr_ratio: float | None = Field(None, ge=0, le=1)
    """Lowest learning rate of the value model after the warm-up, as a fraction of value_model.lr. None: the default of
    the schedule."""
    weight_decay: Rate | None = None
    """Decoupled weight decay of the value model, the same in every step. None: the policy's."""
    beta1: float | None = Field(None, ge=0, lt=1)
    """Exponential decay rate of the first moment of the value model's AdamW (beta1). None: the policy's."""
    beta2: float | None = Field(None, ge=0, lt=1)
    """Exponential decay rate of the second moment of the value model's AdamW (beta2). None: the policy's."""
    eps: Divisor | None = Field(None, exclude_if=lambda eps: eps is None)
    """Epsilon of the value model's AdamW. None: the policy's."""
    max_grad_norm: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Largest L2 norm of the value model's gradient in an update. A larger gradient is scaled down to it. None: the
    policy's."""

    @model_validator(mode="after")
    def _fits_the_schedule(self) -> Self:
        settings = [name for name in SCHEDULE_SETTINGS if getattr(self, name) is not None]
        if settings and self.schedule is None:
            raise ValueError(f"{', '.join(settings)} without a schedule, which is then the policy's; give schedule too")
        try:
            self.over(OptimizerConfig(), 1.0)
        except ValidationError as error:
            messages = [problem["msg"].removeprefix("Value error, ") for problem in error.errors()]
            raise ValueError("; ".join(messages)) from None
        return self

    def over(self, policy: OptimizerConfig, lr: float) -> OptimizerConfig:
        """The optimizer of the value model: the policy's settings, except for those that are set here."""
        body = policy.model_dump() | {"lr": lr}
        if self.schedule is not None:
            for name in (*SCHEDULE_SETTINGS, "cycles", "decay_ratio"):
                del body[name]
        if self.weight_decay is not None:
            body |= {"weight_decay_schedule": "constant", "weight_decay_end": None}
        return OptimizerConfig.model_validate(body | self.model_dump(exclude_none=True))


class ValueModelConfig(ModelConfig):
    """The value model: a model of its own weights with a scalar head."""

    key: str | None = None  # type: ignore[assignment]  # the policy's
    """Model to start from, as in the policy's key. None: the policy's base model with a new head."""
    name: str = "value"
    """Name of the value model within the run. It differs from the policy's."""
    lr: float = Field(1e-6, gt=0, le=MAX_RATE)
    """Highest learning rate of the value model."""
    optimizer: ValueOptimizer | None = None
    """Settings in which the optimizer of the value model differs from the policy's. None: it differs in the learning
    rate alone."""

    def optimizer_over(self, policy: OptimizerConfig) -> OptimizerConfig:
        """The optimizer and the schedule of the value model."""
        return (self.optimizer or ValueOptimizer()).over(policy, self.lr)


class PPORegularisation(Regularisation):
    """Further terms and variants of the policy loss."""

    kl_in: KLPlace = "reward"
    """Where the KL term is: subtracted from the reward of each token, or in the loss."""


class ValuedConfig(RolloutConfig):
    """Fields that the config of every flow with a value model has."""

    if TYPE_CHECKING:
        value_model: ValueModelConfig
        algorithm: PPOAlgorithm
        credit: CreditConfig

    @property
    def critic(self) -> ValueModelConfig:
        return self.value_model

    def check_rows(self, rows: int) -> None:
        steps = self.count_steps(rows)
        if steps is not None:
            value_only_steps(self.credit.value_only_fraction, steps)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        """Refuses two models of one name, a run that leaves the policy no step, and a run without an end in which
        something depends on its progress."""
        algorithm, fraction = self.algorithm, self.credit.value_only_fraction
        if self.model.name == self.value_model.name:
            raise ValueError(f"model.name and value_model.name are both {self.model.name!r}; give them two names")
        endless = algorithm.steps is None and algorithm.epochs is None
        value_optimizer = self.value_model.optimizer_over(self.optimizer)
        if endless and not value_optimizer.endless:
            raise ValueError(
                f"neither algorithm.steps nor algorithm.epochs is given, and value_model.optimizer.schedule="
                f"{value_optimizer.schedule!r} has no end to bend to; give steps, or use 'constant'"
            )
        if algorithm.steps is not None:
            value_only_steps(fraction, algorithm.steps)
        if endless and fraction > 0:
            raise ValueError(
                "without algorithm.steps or epochs, credit.value_only_fraction is a share of nothing; give a length, "
                "or value_only_fraction=0"
            )
        return self


class PPOConfig(GRPOConfig, ValuedConfig):
    """`ostinato run ppo`: reinforcement learning from graded rollouts with a value model."""

    flow: ClassVar[str] = "ppo"

    value_model: ValueModelConfig = ValueModelConfig()
    algorithm: PPOAlgorithm = PPOAlgorithm()
    credit: CreditConfig = CreditConfig()
    regularisation: PPORegularisation = PPORegularisation()

    @model_validator(mode="after")
    def _has_no_groups(self) -> Self:
        if self.rules.dynamic_sampling:
            raise ValueError("rules.dynamic_sampling compares the completions of a group, and PPO has none; leave it")
        return self


def value_only_steps(fraction: float, total_steps: int) -> int:
    """The number of iterations that train only the value model: step k of N while k / N < fraction.

    Raises ValueError if no iteration is left for the policy.
    """
    steps = sum(step / total_steps < fraction for step in range(total_steps))
    if steps == total_steps:
        raise ValueError(
            f"credit.value_only_fraction={fraction} leaves no step in which the policy is trained, of {total_steps} in "
            "all; lower it, or train longer"
        )
    return steps


class GSPOAlgorithm(GRPOAlgorithm):
    """The algorithm GSPO (arXiv:2507.18071). `samples_*` count completions."""

    clip_range: float = Field(default_of(GSPOSpec, "clip_low"), gt=0, le=1)
    """Clip range of the ratio of a whole completion, a mean over its tokens: beyond 1 ± clip_range, a further change
    has no gradient."""
    dual_clip: float | None = Field(None, gt=1)
    """Setting of GRPO, whose ratios are per token. Leave it empty for GSPO."""
    loss_norm: LossNorm = default_of(GSPOSpec, "norm")
    """Normalisation of the loss. sequence_mean: every completion has the same weight, whatever its length. The other
    values are those of GRPO."""

    @model_validator(mode="after")
    def _no_ratio_per_token(self) -> Self:
        check_has_gspo(self.dual_clip)
        return self


def check_has_gspo(dual_clip: float | None, policy_loss: str = "clip") -> None:
    """Raises ValueError for settings of GRPO that GSPO does not have."""
    if dual_clip is not None:
        raise ValueError(f"dual_clip={dual_clip} bounds a ratio per token, which GSPO does not have; leave it out")
    if policy_loss != "clip":
        raise ValueError(f"policy_loss={policy_loss!r} is of ratios per token, which GSPO does not have; leave it out")


class GSPOConfig(GRPOConfig):
    """`ostinato run gspo`: reinforcement learning from graded rollouts, one ratio per completion."""

    flow: ClassVar[str] = "gspo"

    algorithm: GSPOAlgorithm = GSPOAlgorithm()

    @model_validator(mode="after")
    def _no_loss_per_token(self) -> Self:
        check_has_gspo(None, self.regularisation.policy_loss)
        return self
