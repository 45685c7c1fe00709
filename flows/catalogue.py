"""The catalogue of the training flows. What needs a list of them derives it from here: the commands of `ostinato run`,
the configs of `recurring` and `sweep`, child runs, recorded configs, the deployments (prefect.yaml), and the training
classes that `from flows import …` gives.

What a training reads, computes and measures is said by methods of its config class. The configs of preferences, reward
models and `sft_to_gspo` are here, the others in flows.configs. A new training is a loss (engine.losses), a module with
its class and its flow, and here its config and its entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, Union

from pydantic import Field, create_model, model_validator

from engine.losses.pairs import DPOSpec, DPOVariant, KTOSpec, ORPOSpec, SimPOSpec
from engine.losses.spec import LossSpec
from engine.models.hub import hub_repo_of_key
from engine.protocol import SamplingParams
from flows.configs.common import (
    EvaluationConfig,
    GRPOConfig,
    OptimizerConfig,
    SFTAlgorithm,
    SFTConfig,
    SFTOptimizer,
    StageConfig,
    SupervisedConfig,
    TrainingConfig,
    training_title,
)
from flows.configs.distill import DistillConfig
from flows.configs.environments import ENVGRPOConfig, ENVGSPOConfig, ENVPPOConfig
from flows.configs.inputs import DataConfig, GraderConfig, PromptDataConfig
from flows.configs.ppo import GSPOAlgorithm, GSPOConfig, PPOConfig
from flows.configs.reinforcement import ENDING_RULES, BatchRules, Regularisation, RunRules
from flows.configs.rejection import RFTConfig
from flows.configs.validation import ValidationConfig
from storage.registry.hub import resolve_commit
from storage.serialization import MAX_RATE, Coefficient, Divisor, Frozen, default_of
from storage.store.objects import ObjectStore
from tasks.batches.truncation import check_uncut
from tasks.datasets.spec import DatasetUse, DeclaredDataset, HeldoutPairs, RowsTrainingSource, TrainingSource

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from prefect import Flow

    from flows.distill import Distillation
    from flows.dpo import DPO
    from flows.env_grpo import ENVGRPO
    from flows.env_gspo import ENVGSPO
    from flows.env_ppo import ENVPPO
    from flows.grpo import GRPO
    from flows.gspo import GSPO
    from flows.kto import KTO
    from flows.orpo import ORPO
    from flows.ppo import PPO
    from flows.reward_model import RewardModelling
    from flows.rft import RFT
    from flows.sft import SFT
    from flows.simpo import SimPO

    # the training classes, which the package flows imports from here
    __all__ = [
        "DPO", "ENVGRPO", "ENVGSPO", "ENVPPO", "GRPO", "GSPO", "KTO", "ORPO", "PPO", "RFT", "SFT", "Distillation",
        "RewardModelling", "SimPO",
    ]  # fmt: skip


class PreferenceOptimizer(OptimizerConfig):
    """The optimizer of training on preferences, AdamW or Muon, with the schedules of its rate and weight decay."""

    lr: float = Field(1e-6, gt=0, le=MAX_RATE)
    """Highest learning rate of the schedule."""


class PreferenceDataConfig(DataConfig):
    """The preferences to train on, and held-out preferences for the validation loss."""

    train: RowsTrainingSource
    """Preferences to train on. Rows have `chosen` and `rejected`: messages, or texts together with a `prompt`."""
    heldout: HeldoutPairs | None = None
    """Preferences of the validation loss, on which the model is never trained. None: no validation loss."""

    @property
    def sources(self) -> dict[str, tuple[TrainingSource, DatasetUse]]:
        return {"dataset": (self.train, "preference")}


class RewardDataConfig(DataConfig):
    """The preferences or ratings to train on, and held-out ones for the validation loss."""

    train: RowsTrainingSource
    """Dataset to train on. Rows have `chosen` and `rejected`, or are rated conversations."""
    heldout: HeldoutPairs | None = None
    """Rows of the validation loss, of the same kind as train. The model is never trained on them. None: no validation
    loss."""
    use: Literal["preference", "rating"] = "preference"
    """What the reward model learns. preference: the chosen answer scores higher than the rejected one. rating: an
    answer scores the number `res` of its metadata (metadata_columns: [res], where it is a column)."""

    @property
    def sources(self) -> dict[str, tuple[TrainingSource, DatasetUse]]:
        return {"dataset": (self.train, self.use)}


class PreferenceAlgorithm(SFTAlgorithm):
    """Settings of every algorithm with a loss of pairs."""

    epochs: int | None = Field(None, ge=1)
    """Number of passes over the pairs (instead of steps)."""
    samples_per_batch: int = Field(32, ge=1)
    """Pairs per step."""

    @property
    def loss(self) -> LossSpec:
        """The loss that the settings describe."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _pairs_are_not_cut(self) -> Self:
        check_uncut(self.lengths)
        return self

    @model_validator(mode="after")
    def _loss_is_valid(self) -> Self:
        _ = self.loss
        return self


class PreferenceConfig(SupervisedConfig):
    """Fields of every training with a loss of pairs. A subclass has its flow and its algorithm."""

    data: PreferenceDataConfig
    algorithm: PreferenceAlgorithm
    optimizer: PreferenceOptimizer = PreferenceOptimizer()
    rules: RunRules = RunRules()
    validation: ValidationConfig = ValidationConfig()

    @property
    def needs_reference(self) -> bool:
        return self.algorithm.loss.needs_reference


class DPOAlgorithm(PreferenceAlgorithm):
    """The algorithm of direct preference optimisation (arXiv:2305.18290)."""

    kl_beta: Divisor = default_of(DPOSpec, "beta")
    """Strength of the KL constraint to the policy that the run starts from. With a smaller value the policy moves
    further."""
    loss_variant: DPOVariant = default_of(DPOSpec, "variant")
    """Variant of the loss. sigmoid: that of the paper. ipo: the squared distance of the margin from 1 / (2 kl_beta)
    (arXiv:2310.12036). cdpo: the sigmoid loss of preferences of which a fraction, label_smoothing, is reversed."""
    label_smoothing: float | None = Field(None, gt=0, lt=0.5)
    """Fraction of preferences that are assumed to be reversed. Required by loss_variant=cdpo, and refused by the
    others."""
    length_normalised: bool = default_of(DPOSpec, "length_normalised")
    """Compare the means of the answers' log-probabilities instead of their sums, so that a longer answer has no greater
    weight for its length. kl_beta is then larger: 5 in arXiv:2411.15124."""
    rpo_alpha: Coefficient = default_of(DPOSpec, "rpo_alpha")
    """Weight of the cross entropy of the preferred answer, the mean over its tokens, which is added to the loss
    (arXiv:2404.19733). It keeps the preferred answers likely. 0: not added."""
    reference_free: bool = default_of(DPOSpec, "reference_free")
    """Compare the answers without the reference: the log-probabilities of the policy take the place of the log-ratios,
    and a step needs no pass of the reference."""

    @property
    def loss(self) -> DPOSpec:
        return DPOSpec(
            beta=self.kl_beta, variant=self.loss_variant, label_smoothing=self.label_smoothing,
            length_normalised=self.length_normalised, rpo_alpha=self.rpo_alpha, reference_free=self.reference_free,
        )  # fmt: skip


class DPOConfig(PreferenceConfig):
    """`ostinato run dpo`: direct preference optimisation."""

    flow: ClassVar[str] = "dpo"

    algorithm: DPOAlgorithm = DPOAlgorithm()


class SimPOAlgorithm(PreferenceAlgorithm):
    """The algorithm of simple preference optimisation (arXiv:2405.14734)."""

    beta: Divisor = default_of(SimPOSpec, "beta")
    """Scale of an answer's reward, which is the mean log-probability of its tokens. The paper has 2.0 to 2.5."""
    simpo_gamma: Coefficient = default_of(SimPOSpec, "gamma")
    """Margin by which the reward of the preferred answer should be greater than that of the other one. The paper has
    0.3 to 1.6."""

    @property
    def loss(self) -> SimPOSpec:
        return SimPOSpec(beta=self.beta, gamma=self.simpo_gamma)


class SimPOConfig(PreferenceConfig):
    """`ostinato run simpo`: preference optimisation without a reference model."""

    flow: ClassVar[str] = "simpo"

    algorithm: SimPOAlgorithm = SimPOAlgorithm()


class ORPOAlgorithm(PreferenceAlgorithm):
    """The algorithm of odds ratio preference optimisation (arXiv:2403.07691)."""

    beta: Coefficient = default_of(ORPOSpec, "beta")
    """Weight of the term of the odds ratio, besides the cross entropy of the preferred answer. The paper has 0.1 to
    0.25 (its lambda)."""

    @property
    def loss(self) -> ORPOSpec:
        return ORPOSpec(beta=self.beta)


class ORPOConfig(PreferenceConfig):
    """`ostinato run orpo`: fine-tuning on the preferred answers that also moves away from the others."""

    flow: ClassVar[str] = "orpo"

    algorithm: ORPOAlgorithm = ORPOAlgorithm()


class LabelledDataConfig(PreferenceDataConfig):
    """The labelled answers to train on, and held-out ones for the validation loss."""

    train: RowsTrainingSource
    """Answers to train on. Rows have a `prompt` with a `completion`, or `messages`, and a `label`: true for a desirable
    answer, false for another."""
    heldout: HeldoutPairs | None = None
    """Labelled answers of the validation loss, on which the model is never trained. None: no validation loss."""

    @property
    def sources(self) -> dict[str, tuple[TrainingSource, DatasetUse]]:
        return {"dataset": (self.train, "rating")}


class KTOAlgorithm(PreferenceAlgorithm):
    """The algorithm of Kahneman-Tversky optimisation (arXiv:2402.01306)."""

    epochs: int | None = Field(None, ge=1)
    """Number of passes over the answers (instead of steps)."""
    samples_per_batch: int = Field(32, ge=2)
    """Answers per step. Their KL baseline is estimated over the whole step: the paper uses 8 to 128."""
    kl_beta: Divisor = default_of(KTOSpec, "beta")
    """Strength of the KL constraint to the policy that the run starts from. With a smaller value the policy moves
    further."""
    desirable_weight: Coefficient = default_of(KTOSpec, "desirable_weight")
    """Weight of the desirable answers. Where they are fewer than the others, the paper raises it, until it times their
    number is 1 to 1.33 times the same product of the others."""
    undesirable_weight: Coefficient = default_of(KTOSpec, "undesirable_weight")
    """Weight of the undesirable answers."""

    @property
    def loss(self) -> KTOSpec:
        return KTOSpec(
            beta=self.kl_beta, desirable_weight=self.desirable_weight, undesirable_weight=self.undesirable_weight
        )


class KTOConfig(PreferenceConfig):
    """`ostinato run kto`: preference optimisation on answers that are labelled one by one."""

    flow: ClassVar[str] = "kto"

    data: LabelledDataConfig
    algorithm: KTOAlgorithm = KTOAlgorithm()

    @property
    def passes_before_gradient(self) -> int:
        return 3  # the reference of the answers, and both policies of the mismatched pairs


class RewardModelAlgorithm(SFTAlgorithm):
    """The algorithm of reward modelling: the Bradley-Terry loss of pairs (arXiv:2203.02155), or the squared error of
    ratings."""

    samples_per_batch: int = Field(64, ge=1)
    """Pairs, or rated conversations, per step."""

    @model_validator(mode="after")
    def _conversations_are_not_cut(self) -> Self:
        check_uncut(self.lengths)
        return self


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


class SFTToGSPODataConfig(PromptDataConfig):
    """The conversations of the first stage, the prompts of the second, and held-out prompts for the evaluation."""

    train: TrainingSource
    """Conversations that the first stage trains on."""
    prompts: TrainingSource
    """Prompts that the second stage answers; the answers are graded."""

    @property
    def sources(self) -> dict[str, tuple[TrainingSource, DatasetUse]]:
        return {"dataset": (self.train, "completion"), "prompts": (self.prompts, "prompt")}

    @property
    def heldout_use(self) -> DatasetUse:
        return "prompt"


class SFTStage(Frozen):
    """The first stage: supervised fine-tuning."""

    algorithm: SFTAlgorithm = SFTAlgorithm()
    optimizer: SFTOptimizer = SFTOptimizer()
    rules: RunRules = RunRules()

    @model_validator(mode="after")
    def _does_not_end_early(self) -> Self:
        rules = [name for name in ENDING_RULES if getattr(self.rules, name, None) is not None]
        if rules:
            raise ValueError(
                f"{rules} would end the first stage, and the second stage cannot be continued when the first one is; "
                "give them as gspo.rules, which count both stages, or set sft.algorithm.steps"
            )
        return self


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


class ChosenTraining(Frozen):
    """A training flow with its config, in the config of `recurring` or `sweep`. Each flow has a subclass."""

    kind: str
    config: TrainingConfig

    def with_full_versions(self, store: ObjectStore) -> Self:
        """A copy with the full versions of its registered datasets, and with commits in place of branches of the hub,
        so that all child runs use the same. Raises DatasetError, HubError, BadModelFolder."""
        data: Any = self.config.data
        uses: dict[str, DatasetUse] = {"heldout": data.heldout_use}
        for name, (_, use) in data.sources.items():
            uses["train" if name == "dataset" else name] = use
        sources = {name: getattr(data, name) for name in uses}
        resolved = {}
        for name, source in sources.items():
            if isinstance(source, DeclaredDataset):
                resolved[name] = source.resolved(store, uses[name])
        model = self.config.model
        repo = hub_repo_of_key(model.key)
        if repo is not None:
            model = model.model_copy(update={"key": resolve_commit(repo).uri})
        changes = {"model": model, "data": data.model_copy(update=resolved)}
        return self.model_copy(update={"config": self.config.model_copy(update=changes)})


@dataclass(frozen=True)
class Training:
    """A training flow."""

    config: type[TrainingConfig]
    """Its config class, which has the flow's name."""
    summary: str
    """What it does: the help of its command, and the description of its deployment and of its choice in a form."""
    tag: str
    """The tag of its deployment besides "ostinato" and "training"."""

    @property
    def name(self) -> str:
        """The name of its flow, of the flow's module in `flows`, and of its command and deployment."""
        return self.config.flow

    @property
    def dataset_use(self) -> DatasetUse | None:
        """The use of the dataset `data.train`. None: `data` needs other datasets besides."""
        data: Any = self.config.model_fields["data"].annotation
        needed = [name for name, info in data.model_fields.items() if info.is_required()]
        if needed != ["train"]:
            return None
        use: DatasetUse = data.model_construct(train=None).sources["dataset"][1]
        return use

    def import_flow(self) -> Flow[[Any], Coroutine[Any, Any, dict[str, Any]]]:
        """Imports the flow, and Prefect with it, which takes seconds."""
        return getattr(import_module(f"flows.{self.name}"), self.name)  # type: ignore[no-any-return]

    def choice(self) -> type[ChosenTraining]:
        """The subclass of `ChosenTraining` for this flow. `GRPOConfig` gives `GRPOTraining`."""
        fields: dict[str, Any] = {"kind": (Literal[self.name], self.name), "config": (self.config, ...)}
        name = self.config.__name__.removesuffix("Config") + "Training"
        return create_model(name, __base__=ChosenTraining, __module__=__name__, __doc__=self.summary, **fields)


_TRAININGS = (
    Training(GRPOConfig, "Reinforcement learning from graded rollouts (GRPO).", "rl"),
    Training(SFTConfig, "Supervised fine-tuning on conversations (SFT).", "sft"),
    Training(DPOConfig, "Direct preference optimisation on pairs of answers (DPO).", "preference"),
    Training(SimPOConfig, "Preference optimisation on pairs of answers without a reference (SimPO).", "preference"),
    Training(ORPOConfig, "Fine-tuning on preferred answers and preferences in one loss (ORPO).", "preference"),
    Training(KTOConfig, "Preference optimisation on answers with a label each (KTO).", "preference"),
    Training(GSPOConfig, "Reinforcement learning from graded rollouts, one ratio per completion (GSPO).", "rl"),
    Training(PPOConfig, "Reinforcement learning from graded rollouts with a value model (PPO).", "rl"),
    Training(DistillConfig, "Distillation: learning from a teacher on the model's own completions.", "rl"),
    Training(SFTToGSPOConfig, "SFT, then GSPO, on one model in one run.", "rl"),
    Training(ENVGRPOConfig, "Reinforcement learning from episodes with an environment (GRPO).", "rl"),
    Training(ENVGSPOConfig, "Reinforcement learning from episodes with an environment (GSPO).", "rl"),
    Training(ENVPPOConfig, "Reinforcement learning from episodes with an environment and a value model (PPO).", "rl"),
    Training(RFTConfig, "Rounds of sampling, keeping the best completions by a grader, and SFT on them (RFT).", "rl"),
    Training(RewardModelConfig, "A model that scores conversations, from preferences or ratings.", "preference"),
)
TRAININGS = {training.name: training for training in _TRAININGS}
"""Every training flow, by its name."""

if TYPE_CHECKING:
    AnyTraining = ChosenTraining
    LanguageTraining = ChosenTraining
else:
    _CHOICES = {training: training.choice() for training in _TRAININGS}
    _LANGUAGE = [choice for training, choice in _CHOICES.items() if not training.config.has_scalar_head]
    AnyTraining = Annotated[Union[tuple(_CHOICES.values())], Field(discriminator="kind")]  # noqa: UP007
    """Every training flow with its config."""
    LanguageTraining = Annotated[Union[tuple(_LANGUAGE)], Field(discriminator="kind")]  # noqa: UP007
    """The training flows of models that generate text, which an evaluation suite can judge."""
