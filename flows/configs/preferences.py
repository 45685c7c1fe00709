"""Configs of the flows that train on preferences: `dpo` and `reward_model`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from engine.losses.pairs import DPOSpec, DPOVariant
from flows.configs.common import DataConfig, OptimizerConfig, RowsSource, SFTAlgorithm, TrainingConfig
from flows.configs.defaults import default_of
from flows.configs.titles import training_title
from flows.configs.validation import ValidationConfig
from storage.number_types import MAX_RATE, Divisor
from tasks.batches.truncation import check_uncut


class PreferenceOptimizer(OptimizerConfig):
    """AdamW and its schedule."""

    lr: float = Field(1e-6, gt=0, le=MAX_RATE)
    """The highest of the schedule."""


class PreferenceDataConfig(DataConfig):
    """Preferences to train on."""

    train: RowsSource
    """Rows of `chosen` and `rejected`: messages, or texts beside a `prompt`."""
    heldout: RowsSource | None = None
    """Rows of the validation loss."""


class RewardDataConfig(DataConfig):
    """What a reward model learns from."""

    train: RowsSource
    """Rows of `chosen` and `rejected`, or rated conversations."""
    heldout: RowsSource | None = None
    """Rows of the validation loss; of the same kind."""
    use: Literal["preference", "rating"] = "preference"
    """preference: the chosen answer is to score higher than the rejected one. rating: an answer is to score what its
    metadata says in `res` (metadata_columns: [res], where it is a column)."""


class DPOAlgorithm(SFTAlgorithm):
    """Direct preference optimisation (arXiv:2305.18290)."""

    epochs: int | None = Field(None, ge=1)
    """Passes over the pairs."""
    samples_per_batch: int = Field(32, ge=1)
    """Pairs of one step."""
    kl_beta: Divisor = default_of(DPOSpec, "beta")
    """How closely the policy is held to the one it started from: less lets it go further for the same pairs."""
    loss_variant: DPOVariant = default_of(DPOSpec, "variant")
    """sigmoid: as in the paper. ipo: the margin is drawn to 1 / (2 kl_beta) and not beyond (arXiv:2310.12036). cdpo:
    as if a share of the preferences, label_smoothing, were the wrong way round."""
    label_smoothing: float | None = Field(None, gt=0, lt=0.5)
    """Of cdpo alone."""

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
    """Reward modelling: of pairs by Bradley and Terry (arXiv:2203.02155), of ratings by squared error."""

    samples_per_batch: int = Field(64, ge=1)
    """Pairs, or rated conversations, of one step."""

    @model_validator(mode="after")
    def _conversations_are_not_cut(self) -> Self:
        check_uncut(self.lengths)
        return self


class DPOConfig(TrainingConfig):
    """`ostinato run dpo`: direct preference optimisation."""

    data: PreferenceDataConfig
    algorithm: DPOAlgorithm = DPOAlgorithm()
    optimizer: PreferenceOptimizer = PreferenceOptimizer()
    validation: ValidationConfig = ValidationConfig()

    @property
    def title(self) -> str:
        """The flow run's name."""
        return training_title("dpo", self.model.key, self.data.train, self.seed)


class RewardModelConfig(TrainingConfig):
    """`ostinato run reward_model`: a model that scores conversations, for graders."""

    data: RewardDataConfig
    algorithm: RewardModelAlgorithm = RewardModelAlgorithm()
    optimizer: PreferenceOptimizer = PreferenceOptimizer()
    validation: ValidationConfig = ValidationConfig()

    @property
    def title(self) -> str:
        """The flow run's name."""
        return training_title("reward model", self.model.key, self.data.train, self.seed)
