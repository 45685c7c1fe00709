"""Configs of the flows: frozen, documented under each field, unknown keys refused, checked before a model loads.

`SEMANTIC` names the groups that decide the result. A run is resumed only under equal semantic groups; the others
(where things are stored, how the engine computes, how often it checkpoints) may change between attempts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, GetJsonSchemaHandler, JsonValue, field_validator, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from engine.losses.base import LossNorm
from engine.losses.kl import KLEstimator
from engine.losses.policy_gradient import GRPOSpec
from engine.protocol import SamplingParams
from engine.specs.adapters import FullSpec, LoraSpec
from engine.specs.engine import EngineSpec, LocalEngineSpec
from flows.configs.defaults import default_of
from flows.configs.logging import LoggingConfig
from flows.configs.optimizer import OptimizerConfig, SFTOptimizer
from flows.configs.reinforcement import BatchRules, Regularisation
from flows.configs.titles import training_title
from flows.configs.validation import EvaluationConfig, ValidationConfig
from storage.chain.records import OldLogprobs
from storage.chain.retention import Retention
from storage.errors import InvalidKey
from storage.number_types import Coefficient, Positive
from storage.serialization import Frozen
from storage.store.keys import validate_name
from tasks.batches.rl import AdvantageEstimator, BatchPlan
from tasks.batches.truncation import Cut, LengthPlan
from tasks.datasets.spec import FileDataset, PythonDataset, ReasoningGymDataset
from tasks.graders.spec import Workers
from tasks.sampling.completions import PromptShard, Truncation
from tasks.sampling.grading import Grading

SEMANTIC = (
    "model", "value_model", "data", "grader", "environment", "sampling", "algorithm", "credit", "regularisation",
    "rules", "optimizer", "seed",
)  # fmt: skip
DatasetSource = Annotated[FileDataset | PythonDataset | ReasoningGymDataset, Field(discriminator="kind")]
RowsSource = Annotated[FileDataset | PythonDataset, Field(discriminator="kind")]


class ModelConfig(Frozen):
    """The model to train."""

    key: str
    """A registered model (`name` or `name@version`), or a local Hugging Face folder."""
    name: str = "policy"
    """The model's name within the run."""
    publish_as: str | None = None
    """Registry name of the trained model. None: the run's key."""
    adapter: LoraSpec | None = None
    """Train a LoRA adapter instead of all weights; runs on one base model then share its memory. `{}` is rank 16."""

    @property
    def trainable(self) -> FullSpec | LoraSpec:
        return self.adapter or FullSpec()

    @field_validator("name", "publish_as")
    @classmethod
    def _is_a_name(cls, value: str | None) -> str | None:
        try:
            return None if value is None else validate_name(value)
        except InvalidKey as error:  # said now, and not when the training is over
            raise ValueError(str(error)) from error


class DataConfig(Frozen):
    """What to train on."""

    train: DatasetSource
    """The training data."""


class PromptDataConfig(DataConfig):
    """Prompts to train on, and prompts never to train on."""

    heldout: DatasetSource | None = None
    """Prompts of the evaluation before and after training."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longest prompt. None: what the model's context leaves beside sampling.max_new_tokens."""
    truncation: Truncation = default_of(PromptShard, "truncation")
    """What happens to a longer prompt: error, left, right (cut there), or drop (counted)."""


class GraderConfig(Frozen):
    """Who rewards a completion."""

    path: str = Field(title="Import path")
    """`package.module:name` of a BaseGrader or of a function `f(thread, **arguments)`."""
    arguments: dict[str, JsonValue] = {}
    """What the class is made with, or what the function is called with besides the thread."""
    workers: Workers = "none"
    """Where grades run. none: in the run's process. local: in worker processes on this machine, so that a grader that
    crashes the interpreter fails its grade and the run goes on. cluster: the same on every machine of a Ray cluster."""
    timeout_seconds: float = Field(default_of(Grading, "timeout_seconds"), gt=0)
    """Seconds per grade and attempt. The time in which a judge waits for its engine does not count."""
    retries: int = Field(default_of(Grading, "retries"), ge=0)
    """Further attempts at a grade whose grader failed; then the completion is masked."""
    concurrency: int = Field(default_of(Grading, "concurrency"), ge=1)
    """Grades at a time."""
    max_masked_fraction: float = Field(default_of(Grading, "max_masked_fraction"), ge=0, le=1)
    """The run fails when more of a shard's completions than this cannot be graded."""


class GRPOAlgorithm(Frozen):
    """GRPO (arXiv:2402.03300). `samples_*` count completions."""

    steps: int | None = Field(None, ge=1)
    """Gradient steps. Give steps or epochs."""
    epochs: int | None = Field(None, ge=1)
    """Passes over the prompts."""
    samples_per_batch: int = Field(128, ge=1)
    """Completions of one step; a multiple of completions_per_sample."""
    samples_per_mini_batch: int = Field(128, ge=1)
    """Completions of one optimizer update."""
    mini_epochs_per_batch: int = Field(1, ge=1)
    """Passes over a batch before new completions are sampled."""
    completions_per_sample: int = Field(8, ge=1)
    """Completions of one prompt: a group."""
    clip_range: float = Field(default_of(GRPOSpec, "clip_low"), gt=0, le=1)
    """How far the ratio of new and old probability may leave 1 and still have a gradient."""
    clip_range_high: Positive | None = None
    """Upper clip when it differs from the lower (clip-higher, arXiv:2503.14476)."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound of the ratio where the advantage is negative (arXiv:1912.09729)."""
    kl_beta: Coefficient = default_of(GRPOSpec, "kl_beta")
    """Weight of the KL term; 0 skips the reference model altogether."""
    kl_estimator: KLEstimator = default_of(GRPOSpec, "kl_estimator")
    """Per token, with d the policy's log-probability less the reference's: k1 is d, abs |d|, k2 d²/2, k3 exp(-d) - 1 +
    d."""
    loss_norm: LossNorm = default_of(GRPOSpec, "norm")
    """token_mean: over all tokens. sequence_mean: over each completion's tokens, then over completions. token_sum: not
    at all. constant: by completions x the longest that one can be (Dr. GRPO, arXiv:2503.20783)."""
    advantage_estimator: AdvantageEstimator = default_of(BatchPlan, "advantage_estimator")
    """From the rewards of one prompt's completions. group: less their mean, over their standard deviation (sample_std:
    with n - 1). centred: less their mean. leave_one_out: less the mean of the others."""
    old_logprobs: OldLogprobs = default_of(BatchPlan, "old_logprobs")
    """Whose log-probabilities stand for the policy that sampled: the trainer's, computed anew, or the sampler's own."""
    prompts_per_shard: int = Field(16, ge=1)
    """Prompts that are sampled, graded and committed together; a crash costs at most one such shard."""

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        if self.samples_per_batch % self.completions_per_sample:
            raise ValueError(
                f"samples_per_batch={self.samples_per_batch} splits a group; use a multiple of "
                f"completions_per_sample={self.completions_per_sample}"
            )
        if self.samples_per_mini_batch > self.samples_per_batch:
            raise ValueError(
                f"samples_per_mini_batch={self.samples_per_mini_batch} exceeds samples_per_batch="
                f"{self.samples_per_batch}; lower it to at most that"
            )
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"both steps={self.steps} and epochs={self.epochs} were given; give one of them")
        return self


class SFTAlgorithm(Frozen):
    """Supervised fine-tuning on completions."""

    steps: int | None = Field(None, ge=1)
    """Gradient steps. Give steps or epochs; neither means one epoch."""
    epochs: int | None = Field(None, ge=1)
    """Passes over the conversations."""
    samples_per_batch: int = Field(512, ge=1)
    """Conversations of one step."""
    max_tokens: int | None = Field(None, ge=1)
    """Longest conversation. None: the model's context."""
    truncation: Cut = default_of(LengthPlan, "truncation")
    """What happens to a longer one: error, left (its last tokens are kept), right (its first), drop (it is left out and
    counted)."""

    @property
    def lengths(self) -> LengthPlan:
        return LengthPlan(max_tokens=self.max_tokens, truncation=self.truncation)

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"both steps={self.steps} and epochs={self.epochs} were given; give one of them")
        return self


class CheckpointConfig(Frozen):
    """When to write weights. No committed step is lost without any of them: a resume then redoes more."""

    frequency: float | None = Field(0.2, gt=0, le=1)
    """A named, kept checkpoint at every such fraction of the run. None: none."""
    every_steps: int | None = Field(None, ge=1)
    """A named, kept checkpoint every so many steps (instead of `frequency`)."""
    recovery_seconds: float = Field(300.0, gt=0)
    """A recovery checkpoint when redoing the steps since the last would take longer than this."""
    recovery_steps: int | None = Field(None, ge=1)
    """A recovery checkpoint every so many steps, however quick they are."""
    keep_last: int = Field(default_of(Retention, "keep_last"), ge=1)
    """Recovery checkpoints kept."""
    keep_named: int | None = Field(None, ge=1)
    """The latest so many named checkpoints of each model are kept, and older ones are removed. None: all are kept. A
    checkpoint that a fork, an unfinished run, a champion or a rebase refers to is always kept."""
    keep_every: int | None = Field(None, ge=1)
    """Checkpoints of every so many steps are kept too."""
    keep_best: int | None = Field(None, ge=1)
    """So many checkpoints with the best `metric` are kept too."""
    metric: str | None = None
    """A metric of the steps' records, like "loss"."""
    best: Literal["min", "max"] = default_of(Retention, "best")
    """Which values of the metric are the best."""

    @model_validator(mode="after")
    def _best_of_something(self) -> Self:
        if (self.keep_best is None) != (self.metric is None):
            raise ValueError(
                f"keep_best={self.keep_best} and metric={self.metric!r} go together; give both, or neither"
            )
        return self

    @property
    def retention(self) -> Retention:
        return Retention(**self.model_dump(include=set(Retention.model_fields)))


class StorageConfig(Frozen):
    """Where artifacts are kept. In a deployment, the default stands for the deployment's store."""

    url: str = "ostinato-data"
    """A folder, file:///folder, s3://bucket/prefix or memory://name."""


class FlowConfig(Frozen):
    """What every flow's config has."""

    run: str = ""
    """The run's key: the same key resumes the run. Empty: made from the flow run's id."""
    seed: int = 0
    """Of everything that is drawn: the order of the data, completions, adapters."""
    engine: EngineSpec = LocalEngineSpec()
    """Who trains and samples: this process, or a server. In a deployment, the default stands for the deployment's."""
    storage: StorageConfig = StorageConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """What a person must fill in comes first in a form, where it runs comes last."""
        reference = super().__get_pydantic_json_schema__(core_schema, handler)
        schema = handler.resolve_ref_schema(reference)
        fields = schema.get("properties", {})
        last = [name for name in FlowConfig.model_fields if name in fields]
        schema["properties"] = {name: fields[name] for name in [*(own for own in fields if own not in last), *last]}
        return reference

    def semantic(self) -> dict[str, Any]:
        """What decides the result, without names and patience."""
        body = self.model_dump(mode="json", include=set(SEMANTIC))
        for model in (body["model"], body.get("value_model", {})):
            model.pop("publish_as", None)
        body["data"].pop("heldout", None)
        patience = ("timeout_seconds", "reaction_seconds", "retries", "concurrency", "max_masked_fraction", "workers")
        for name in patience:
            body.get("grader", {}).pop(name, None)
            body.get("environment", {}).pop(name, None)
        return body

    def other(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude=set(SEMANTIC))


class TrainingConfig(FlowConfig):
    """What the config of every training flow has."""

    model: ModelConfig
    data: DataConfig

    if TYPE_CHECKING:  # each has its own; a field here would stand before theirs in a form
        algorithm: Any
        optimizer: OptimizerConfig


class GRPOConfig(TrainingConfig):
    """`ostinato run grpo`: reinforcement learning from graded rollouts."""

    data: PromptDataConfig
    grader: GraderConfig
    sampling: SamplingParams = SamplingParams(max_new_tokens=256)
    algorithm: GRPOAlgorithm = GRPOAlgorithm()
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    regularisation: Regularisation = Regularisation()
    rules: BatchRules = BatchRules()

    @property
    def title(self) -> str:
        """The flow run's name."""
        return training_title("grpo", self.model.key, self.data.train, self.seed)

    @model_validator(mode="after")
    def _endless_runs_are_constant(self) -> Self:
        check_sampled_run(self.algorithm, self.optimizer, self.checkpoints, self.sampling, self.evaluation)
        algorithm = self.algorithm
        self.regularisation.check(algorithm.loss_norm, algorithm.kl_beta, algorithm.old_logprobs)
        return self


def check_sampled_run(
    algorithm: GRPOAlgorithm,
    optimizer: OptimizerConfig,
    checkpoints: CheckpointConfig,
    sampling: SamplingParams,
    evaluation: EvaluationConfig,
) -> None:
    """A run without an end has nothing that depends on its progress, and completions of a group differ. Raises
    ValueError."""
    endless = algorithm.steps is None and algorithm.epochs is None
    if endless and not optimizer.endless:
        raise ValueError(
            f"neither algorithm.steps nor algorithm.epochs is given, so the run ends only when it is stopped, and "
            f"optimizer.schedule={optimizer.schedule!r} has no end to bend to; give steps, or use 'constant', or "
            "'inverse_sqrt' with warmup_steps, and a constant weight decay"
        )
    if endless and checkpoints.frequency is not None and checkpoints.every_steps is None:
        raise ValueError(
            "a run without steps or epochs has no fractions; set checkpoints.frequency=null and, for named "
            "checkpoints, checkpoints.every_steps"
        )
    evaluation.check_length("evaluation", endless=endless)
    if sampling.temperature == 0:
        raise ValueError("sampling.temperature=0 gives a group equal completions and no advantage; use e.g. 1.0")


class SFTDataConfig(DataConfig):
    """Conversations to train on, and conversations never to train on."""

    heldout: DatasetSource | None = None
    """Conversations of the validation loss."""


class SFTConfig(TrainingConfig):
    """`ostinato run sft`: supervised fine-tuning on conversations."""

    data: SFTDataConfig
    algorithm: SFTAlgorithm = SFTAlgorithm()
    optimizer: SFTOptimizer = SFTOptimizer()
    validation: ValidationConfig = ValidationConfig()

    @property
    def title(self) -> str:
        """The flow run's name."""
        return training_title("sft", self.model.key, self.data.train, self.seed)
