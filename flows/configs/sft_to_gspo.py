"""Config of the `sft_to_gspo` flow: one model, two stages."""

from __future__ import annotations

from typing import Any, Self

from pydantic import model_validator

from engine.protocol import SamplingParams
from flows.configs.common import (
    DatasetSource,
    EvaluationConfig,
    GraderConfig,
    OptimizerConfig,
    PromptDataConfig,
    SFTAlgorithm,
    SFTConfig,
    SFTOptimizer,
    TrainingConfig,
)
from flows.configs.defaults import default_of
from flows.configs.gspo import GSPOAlgorithm, GSPOConfig
from flows.configs.reinforcement import BatchRules, Regularisation
from flows.configs.titles import training_title
from storage.serialization import Frozen

STAGES = ("sft", "gspo")


class SFTToGSPODataConfig(PromptDataConfig):
    """Conversations to learn from first, prompts to practise on then, and prompts never to train on."""

    train: DatasetSource
    """Conversations: what the first stage imitates."""
    prompts: DatasetSource
    """Prompts: what the second stage answers, and is graded on."""


class SFTStage(Frozen):
    """The first stage: supervised fine-tuning."""

    algorithm: SFTAlgorithm = SFTAlgorithm()
    optimizer: SFTOptimizer = SFTOptimizer()


class GSPOStage(Frozen):
    """The second stage: reinforcement learning from where the first ended, which is also the reference of its KL
    term."""

    algorithm: GSPOAlgorithm = GSPOAlgorithm()
    regularisation: Regularisation = Regularisation()
    rules: BatchRules = BatchRules()
    optimizer: OptimizerConfig = OptimizerConfig()


class SFTToGSPOConfig(TrainingConfig):
    """`ostinato run sft_to_gspo`: fine-tuning on conversations, then reinforcement learning from graded rollouts."""

    data: SFTToGSPODataConfig
    grader: GraderConfig
    sampling: SamplingParams = default_of(GSPOConfig, "sampling")
    sft: SFTStage = SFTStage()
    gspo: GSPOStage = GSPOStage()
    evaluation: EvaluationConfig = EvaluationConfig()

    @property
    def title(self) -> str:
        """The flow run's name."""
        return training_title("sft to gspo", self.model.key, self.data.prompts, self.seed)

    @property
    def first(self) -> SFTConfig:
        """The first stage as a run of its own would be configured."""
        return SFTConfig(data={"train": self.data.train}, **_fields(self.sft), **self._common())  # type: ignore[arg-type]

    @property
    def second(self) -> GSPOConfig:
        """The second stage as a run of its own would be configured."""
        prompts = self.data.model_dump(exclude={"train", "prompts", "heldout"})
        data = prompts | {"train": self.data.prompts, "heldout": self.data.heldout}
        own = {"data": data, "grader": self.grader, "sampling": self.sampling, "evaluation": self.evaluation}
        return GSPOConfig(**own, **_fields(self.gspo), **self._common())  # type: ignore[arg-type]

    @model_validator(mode="after")
    def _stages_are_runs(self) -> Self:
        """What a stage alone would refuse is refused here."""
        _ = self.first, self.second
        return self

    def semantic(self) -> dict[str, Any]:
        body = super().semantic()
        parts = zip(STAGES, (self.first.semantic(), self.second.semantic()), strict=True)
        return body | {name: {key: part[key] for key in part.keys() - body.keys()} for name, part in parts}

    def other(self) -> dict[str, Any]:
        return {name: value for name, value in super().other().items() if name not in STAGES}

    def _common(self) -> dict[str, Any]:
        names = ("model", "run", "seed", "engine", "storage", "checkpoints", "logging")
        return {name: getattr(self, name) for name in names}


def _fields(record: Frozen) -> dict[str, Any]:
    return {name: getattr(record, name) for name in type(record).model_fields}
