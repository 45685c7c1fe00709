"""The config of the `sft_to_gspo` flow: one model, two stages."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import model_validator

from engine.protocol import SamplingParams
from flows.configs.common import (
    EvaluationConfig,
    GraderConfig,
    OptimizerConfig,
    PromptDataConfig,
    SFTAlgorithm,
    SFTConfig,
    SFTOptimizer,
    StageConfig,
    TrainingConfig,
)
from flows.configs.defaults import default_of
from flows.configs.gspo import GSPOAlgorithm, GSPOConfig
from flows.configs.reinforcement import BatchRules, Regularisation, RunRules
from flows.configs.titles import training_title
from storage.serialization import Frozen
from tasks.datasets.spec import DatasetUse, TrainingSource


class SFTToGSPODataConfig(PromptDataConfig):
    """The conversations of the first stage, the prompts of the second, and held-out prompts for the evaluation."""

    train: TrainingSource
    """Conversations that the first stage trains on."""
    prompts: TrainingSource
    """Prompts that the second stage answers; the answers are graded."""

    @property
    def inputs(self) -> dict[str, tuple[TrainingSource, DatasetUse]]:
        return {"dataset": (self.train, "completion"), "prompts": (self.prompts, "prompt")}

    @property
    def heldout_use(self) -> DatasetUse:
        return "prompt"


class SFTStage(Frozen):
    """The first stage: supervised fine-tuning."""

    algorithm: SFTAlgorithm = SFTAlgorithm()
    optimizer: SFTOptimizer = SFTOptimizer()
    rules: RunRules = RunRules()


class GSPOStage(Frozen):
    """The second stage: GSPO. It starts from the last policy of the first stage, which is also the reference of its KL
    term."""

    algorithm: GSPOAlgorithm = GSPOAlgorithm()
    regularisation: Regularisation = Regularisation()
    rules: BatchRules = BatchRules()
    optimizer: OptimizerConfig = OptimizerConfig()


class SFTToGSPOConfig(TrainingConfig):
    """`ostinato run sft_to_gspo`: fine-tuning on conversations, then reinforcement learning from graded rollouts."""

    flow: ClassVar[str] = "sft_to_gspo"

    data: SFTToGSPODataConfig
    grader: GraderConfig
    sampling: SamplingParams = default_of(GSPOConfig, "sampling")
    sft: SFTStage = SFTStage()
    gspo: GSPOStage = GSPOStage()
    evaluation: EvaluationConfig = EvaluationConfig()

    @property
    def title(self) -> str:
        return training_title("sft to gspo", self.model.key, self.data.prompts, self.seed)

    @property
    def stages(self) -> dict[str, StageConfig]:
        return {"sft": self.first, "gspo": self.second}

    @property
    def first(self) -> SFTConfig:
        """The first stage as a run of its own would be configured."""
        return SFTConfig(data={"train": self.data.train}, **_fields(self.sft), **self._common())  # type: ignore[arg-type]

    @property
    def second(self) -> GSPOConfig:
        """The second stage as a run of its own would be configured."""
        prompts = self.data.model_dump(exclude={"train", "prompts", "heldout"})
        data = prompts | {"train": self.data.prompts, "heldout": self.data.heldout}
        groups = {"data": data, "grader": self.grader, "sampling": self.sampling, "evaluation": self.evaluation}
        return GSPOConfig(**groups, **_fields(self.gspo), **self._common())  # type: ignore[arg-type]

    @model_validator(mode="after")
    def _stages_are_runs(self) -> Self:
        """Refuses what a run of either stage would refuse."""
        _ = self.stages
        return self

    def semantic(self) -> dict[str, Any]:
        body = super().semantic()
        stages = {}
        for name, config in self.stages.items():
            part = config.semantic()
            stages[name] = {key: part[key] for key in part.keys() - body.keys()}
        return body | stages

    def _common(self) -> dict[str, Any]:
        """The fields that both stages share with the whole run."""
        names = ("model", "run", "seed", "engine", "storage", "checkpoints", "logging")
        return {name: getattr(self, name) for name in names}


def _fields(record: Frozen) -> dict[str, Any]:
    """The fields of a record by name, not dumped."""
    return {name: getattr(record, name) for name in type(record).model_fields}
