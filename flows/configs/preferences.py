"""The configs of the flows that train on preferences: `dpo` and `reward_model`."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from engine.losses.pairs import DPOSpec, DPOVariant
from flows.configs.common import DataConfig, OptimizerConfig, SFTAlgorithm, SupervisedConfig
from flows.configs.defaults import default_of
from flows.configs.reinforcement import RunRules
from flows.configs.titles import training_title
from flows.configs.validation import ValidationConfig
from storage.serialization import MAX_RATE, Divisor
from tasks.batches.truncation import check_uncut
from tasks.datasets.spec import DatasetUse, HeldoutRowsSource, RowsTrainingSource, TrainingSource


class PreferenceOptimizer(OptimizerConfig):
    """The optimizer of training on preferences, AdamW, and the schedules of its learning rate and weight decay."""

    lr: float = Field(1e-6, gt=0, le=MAX_RATE)
    """Highest learning rate of the schedule."""


class PreferenceDataConfig(DataConfig):
    """The preferences to train on, and held-out preferences for the validation loss."""

    train: RowsTrainingSource
    """Preferences to train on. Rows have `chosen` and `rejected`: messages, or texts together with a `prompt`."""
    heldout: HeldoutRowsSource | None = None
    """Preferences of the validation loss, on which the model is never trained. None: no validation loss."""

    @property
    def inputs(self) -> dict[str, tuple[TrainingSource, DatasetUse]]:
        return {"dataset": (self.train, "preference")}


class RewardDataConfig(DataConfig):
    """The preferences or ratings to train on, and held-out ones for the validation loss."""

    train: RowsTrainingSource
    """Dataset to train on. Rows have `chosen` and `rejected`, or are rated conversations."""
    heldout: HeldoutRowsSource | None = None
    """Rows of the validation loss, of the same kind as train. The model is never trained on them. None: no validation
    loss."""
    use: Literal["preference", "rating"] = "preference"
    """What the reward model learns. preference: the chosen answer scores higher than the rejected one. rating: an
    answer scores the number `res` of its metadata (metadata_columns: [res], where it is a column)."""

    @property
    def inputs(self) -> dict[str, tuple[TrainingSource, DatasetUse]]:
        return {"dataset": (self.train, self.use)}


class DPOAlgorithm(SFTAlgorithm):
    """The algorithm of direct preference optimisation (arXiv:2305.18290)."""

    epochs: int | None = Field(None, ge=1)
    """Number of passes over the pairs (instead of steps)."""
    samples_per_batch: int = Field(32, ge=1)
    """Pairs per step."""
    kl_beta: Divisor = default_of(DPOSpec, "beta")
    """Strength of the KL constraint to the policy that the run starts from. With a smaller value the policy moves
    further."""
    loss_variant: DPOVariant = default_of(DPOSpec, "variant")
    """Variant of the loss. sigmoid: that of the paper. ipo: the squared distance of the margin from 1 / (2 kl_beta)
    (arXiv:2310.12036). cdpo: the sigmoid loss of preferences of which a fraction, label_smoothing, is reversed."""
    label_smoothing: float | None = Field(None, gt=0, lt=0.5)
    """Fraction of preferences that are assumed to be reversed. Required by loss_variant=cdpo, and refused by the
    others."""

    @model_validator(mode="after")
    def _pairs_are_not_cut(self) -> Self:
        check_uncut(self.lengths)
        return self

    @model_validator(mode="after")
    def _smoothing_goes_with_cdpo(self) -> Self:
        _ = self.loss
        return self

    @property
    def loss(self) -> DPOSpec:
        """The loss that these settings describe."""
        return DPOSpec(beta=self.kl_beta, variant=self.loss_variant, label_smoothing=self.label_smoothing)


class RewardModelAlgorithm(SFTAlgorithm):
    """The algorithm of reward modelling: the Bradley-Terry loss of pairs (arXiv:2203.02155), or the squared error of
    ratings."""

    samples_per_batch: int = Field(64, ge=1)
    """Pairs, or rated conversations, per step."""

    @model_validator(mode="after")
    def _conversations_are_not_cut(self) -> Self:
        check_uncut(self.lengths)
        return self


class DPOConfig(SupervisedConfig):
    """`ostinato run dpo`: direct preference optimisation."""

    flow: ClassVar[str] = "dpo"

    data: PreferenceDataConfig
    algorithm: DPOAlgorithm = DPOAlgorithm()
    optimizer: PreferenceOptimizer = PreferenceOptimizer()
    rules: RunRules = RunRules()
    validation: ValidationConfig = ValidationConfig()

    @property
    def needs_reference(self) -> bool:
        return True


class RewardModelConfig(SupervisedConfig):
    """`ostinato run reward_model`: a model that scores conversations, for graders."""

    flow: ClassVar[str] = "reward_model"
    has_scalar_head: ClassVar[bool] = True

    data: RewardDataConfig
    algorithm: RewardModelAlgorithm = RewardModelAlgorithm()
    optimizer: PreferenceOptimizer = PreferenceOptimizer()
    rules: RunRules = RunRules()
    validation: ValidationConfig = ValidationConfig()

    @property
    def title(self) -> str:
        return training_title("reward model", self.model.key, self.data.train, self.seed)
