"""Configs of the flows. They are frozen, refuse unknown keys, and are checked before a model loads.

`SEMANTIC` names the groups that decide the result. A run is resumed only with equal semantic groups. The others (where
artifacts are stored, how the engine computes, how often it writes checkpoints) may change between attempts.

A field's docstring is its tooltip in Prefect's form. The default of a setting is spelled once: here, or in the record
of the engine, the tasks or the store that `default_of` names.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from engine.losses.base import KLEstimator, LossNorm
from engine.losses.policy_gradient import GRPOSpec
from engine.protocol import SamplingParams
from engine.specs.engine import EngineSpec, LocalEngineSpec
from flows.configs.forms import REQUIRED_IN_FORM, FormConfig
from flows.configs.optimizer import OptimizerConfig, SFTOptimizer
from flows.configs.reinforcement import ENDING_RULES, BatchRules, Regularisation, RunRules, old_logprobs_of_step
from flows.configs.validation import EvaluationConfig, Every, LoggingConfig, ValidationConfig, checked_run
from storage.chain.records import OldLogprobs
from storage.chain.retention import Retention
from storage.serialization import Coefficient, Frozen, Positive, default_of, left_out
from storage.store import keys
from tasks.batches.truncation import Cut, LengthPlan
from tasks.datasets.spec import (
    HeldoutRows,
    MixtureDataset,
    TrainingSource,
)
from tasks.plans import AdvantageEstimator, BatchPlan, check_pass_k

if TYPE_CHECKING:
    from flows.configs.ppo import ValueModelConfig
from flows.configs.inputs import DataConfig, GraderConfig, ModelConfig, PromptDataConfig

SEMANTIC = (
    "model", "value_model", "teacher", "data", "grader", "environment", "agent", "sampling", "algorithm", "credit",
    "regularisation", "rules", "optimizer", "seed",
)  # fmt: skip


class GRPOAlgorithm(Frozen):
    """The algorithm GRPO (arXiv:2402.03300). `samples_*` count completions."""

    steps: int | None = Field(None, ge=1, json_schema_extra=REQUIRED_IN_FORM)
    """Number of gradient steps of the run. Give steps or epochs; with neither, the run has no end."""
    epochs: int | None = Field(None, ge=1)
    """Number of passes over the prompts (instead of steps)."""
    samples_per_batch: int = Field(128, ge=1)
    """Completions per step. A multiple of completions_per_sample."""
    samples_per_mini_batch: int = Field(128, ge=1)
    """Completions per optimizer update. From samples_per_batch on, a batch is one update."""
    mini_epochs_per_batch: int = Field(1, ge=1)
    """Passes over the batch of a step before new completions are sampled."""
    completions_per_sample: int = Field(8, ge=1)
    """Completions per prompt. They form a group, within which rewards are compared."""
    clip_range: float = Field(default_of(GRPOSpec, "clip_low"), gt=0, le=1)
    """Clip range of the ratio of new and old probability: beyond 1 ± clip_range, a further change has no gradient."""
    clip_range_high: Positive | None = None
    """Clip range above 1, when it differs from clip_range (clip-higher, arXiv:2503.14476). None: clip_range."""
    dual_clip: float | None = Field(None, gt=1)
    """Upper bound of the ratio of tokens with a negative advantage (dual clip, arXiv:1912.09729). None: no bound."""
    kl_beta: Coefficient = default_of(GRPOSpec, "kl_beta")
    """Coefficient of the KL term. With 0, no reference model is computed."""
    kl_estimator: KLEstimator = default_of(GRPOSpec, "kl_estimator")
    """Estimator of the KL divergence per token. With d the policy's log-probability minus the reference's: k1 is d, abs
    is |d|, k2 is d²/2, k3 is exp(-d) - 1 + d."""
    loss_norm: LossNorm = default_of(GRPOSpec, "norm")
    """Normalisation of the loss. token_mean: mean over all tokens. sequence_mean: mean over each completion's tokens,
    then over completions. token_sum: sum. constant: sum divided by the number of completions and the longest possible
    completion (Dr. GRPO, arXiv:2503.20783)."""
    advantage_estimator: AdvantageEstimator = default_of(BatchPlan, "advantage_estimator")
    """How the advantages follow from the rewards of one prompt's completions. group: reward minus the mean, divided by
    the standard deviation (group_sample_std: the sample standard deviation). centred: reward minus the mean.
    leave_one_out: reward minus the mean of the others. max_rl: reward minus the mean, divided by the mean (MaxRL,
    arXiv:2602.02710). pass_at_k: the estimate of the gradient of the highest reward of pass_k completions
    (arXiv:2505.15201). gdpo: each part of the reward by itself, as group, then their weighted sum, whitened over the
    batch (arXiv:2601.05242); the grader gives the parts, as CombinedGrader does. raw: reward. reinforce_plus_plus:
    reward whitened over the batch (with _baseline: after subtracting the group's mean)."""
    pass_k: int | None = Field(None, ge=2, exclude_if=lambda k: k is None)
    """Number of completions per prompt of which the best counts, with advantage_estimator=pass_at_k. At most
    completions_per_sample."""
    old_logprobs: OldLogprobs = default_of(BatchPlan, "old_logprobs")
    """Source of the old policy's log-probabilities, which the clip ranges refer to. trainer: those of the policy before
    the step, computed by the trainer. sampler: those of the policy that sampled, as the sampler reported them."""
    prompts_per_shard: int = Field(16, ge=1)
    """Prompts per shard. A shard is sampled, graded and committed as a whole; a crash repeats at most one."""

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        if self.samples_per_batch % self.completions_per_sample:
            raise ValueError(
                f"samples_per_batch={self.samples_per_batch} splits a group; use a multiple of "
                f"completions_per_sample={self.completions_per_sample}"
            )
        check_pass_k(self.advantage_estimator, self.pass_k)
        if self.pass_k is not None and self.pass_k > self.completions_per_sample:
            raise ValueError(
                f"pass_k={self.pass_k} is more than completions_per_sample={self.completions_per_sample}: a prompt has "
                "no such number of completions; lower it, or sample more"
            )
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"both steps={self.steps} and epochs={self.epochs} were given; give one of them")
        return self


class SFTAlgorithm(Frozen):
    """The algorithm of supervised fine-tuning on conversations."""

    steps: int | None = Field(None, ge=1)
    """Number of gradient steps of the run. Give steps or epochs; with neither, the run is one epoch."""
    epochs: int | None = Field(None, ge=1)
    """Number of passes over the conversations (instead of steps)."""
    samples_per_batch: int = Field(512, ge=1)
    """Conversations per step."""
    max_tokens: int | None = Field(None, ge=1)
    """Longest conversation, in tokens. None: the model's context."""
    truncation: Cut = default_of(LengthPlan, "truncation")
    """What happens to a conversation longer than max_tokens. error: the run fails. left: its last tokens are kept.
    right: its first tokens are kept. drop: it is left out and counted."""

    @property
    def lengths(self) -> LengthPlan:
        """How long a conversation may be."""
        return LengthPlan(max_tokens=self.max_tokens, truncation=self.truncation)

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"both steps={self.steps} and epochs={self.epochs} were given; give one of them")
        return self


class CheckpointConfig(Frozen):
    """When checkpoints are written, and which are kept. Without any checkpoint no committed step is lost: a resume
    recomputes more of them."""

    frequency: float | None = Field(0.2, gt=0, le=1)
    """Fraction of the run after which a named checkpoint is written, again and again. It is skipped within a minute, or
    ten times the duration of a save, of the last checkpoint: its step only gets the name. The last step's is always
    written. None: none by fraction."""
    every_steps: int | None = Field(None, ge=1)
    """Number of steps after which a named checkpoint is written, again and again (instead of frequency)."""
    recovery_seconds: float = Field(300.0, gt=0)
    """Age of the last checkpoint, in seconds, above which a recovery checkpoint is written. With the duration of a
    save, it bounds the time that a resume needs to recompute steps. Training stops while the engine copies the
    weights: the time between checkpoints grows where that is more than 2 % of it."""
    recovery_steps: int | None = Field(None, ge=1)
    """Number of steps after which a recovery checkpoint is written, however fast they are, but not before the last
    checkpoint is saved. None: by time alone."""
    keep_last: int = Field(default_of(Retention, "keep_last"), ge=1)
    """Number of recovery checkpoints that are kept during the run."""
    max_redo_seconds: float = Field(600.0, ge=0)
    """A finished run keeps its last checkpoint if its gradient steps took more seconds than this in all. With fewer, a
    fork at its last step recomputes the steps from the base model. 0: a finished run always keeps its last
    checkpoint."""
    keep_named: int | None = Field(None, ge=1)
    """Number of named checkpoints of each model that are kept; older ones are removed. None: all are kept, and when the
    run is finished, those of fractions of the run are reduced to their names. A checkpoint that a fork, an unfinished
    run, a champion or a rebase refers to is always kept."""
    keep_every: int | None = Field(None, ge=1)
    """Interval of steps whose checkpoints are kept as well. None: none by interval."""
    keep_best: int | None = Field(None, ge=1)
    """Number of checkpoints with the best `metric` that are kept as well. None: none by metric."""
    metric: str | None = None
    """Metric of the steps by which keep_best chooses, for example "loss"."""
    best: Literal["min", "max"] = default_of(Retention, "best")
    """Whether the smallest (min) or the largest (max) values of `metric` are the best."""

    @model_validator(mode="after")
    def _best_of_something(self) -> Self:
        if (self.keep_best is None) != (self.metric is None):
            raise ValueError(
                f"keep_best={self.keep_best} and metric={self.metric!r} go together; give both, or neither"
            )
        return self

    @property
    def retention(self) -> Retention:
        """Which checkpoints are kept."""
        return Retention(**self.model_dump(include=set(Retention.model_fields)))


class StorageConfig(Frozen):
    """Where artifacts are stored. In a deployment, the default means the deployment's store."""

    url: str = "ostinato-data"
    """URL of the store: a folder, file:///folder, s3://bucket/prefix or memory://name."""

    @model_validator(mode="before")
    @classmethod
    def _of_url(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value


class FlowConfig(FormConfig):
    """Fields that the config of every flow has."""

    run: str = ""
    """Key of the run. The same key resumes the run. Empty: derived from the id of the flow run."""
    seed: int = 0
    """Seed of all random numbers: the order of the data, the completions, and the initial adapters."""
    engine: EngineSpec = LocalEngineSpec()
    """Engine that trains and samples: in this process, or a server. In a deployment, the default means the deployment's
    engine."""
    storage: StorageConfig = StorageConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    @field_validator("run")
    @classmethod
    def _is_run(cls, run: str) -> str:
        return checked_run(run)

    def semantic(self) -> dict[str, Any]:
        """The part of the config that decides the result. Names, time limits and retries are left out."""
        body = self.model_dump(mode="json", include=set(SEMANTIC))
        for model in (body["model"], body.get("value_model", {})):
            model.pop("publish_as", None)
            model.pop("publish_unchanged", None)
            model.pop("publish_dtype", None)
        body["data"].pop("heldout", None)
        # limits, which change no reward
        limits = ("timeout_seconds", "reaction_seconds", "retries", "concurrency", "max_masked_fraction", "workers")
        for name in limits:
            body.get("grader", {}).pop(name, None)
            body.get("environment", {}).pop(name, None)
            body.get("agent", {}).pop(name, None)
        # when a run is given up, or ends
        rules = body.get("rules", {})
        for name in ("max_skipped_steps", "max_idle_steps", *ENDING_RULES):
            rules.pop(name, None)
        if not rules:
            body.pop("rules", None)
        return body

    def other(self) -> dict[str, Any]:
        """The part of the config that may change between attempts: all that `semantic` leaves out."""
        return left_out(self.model_dump(mode="json"), self.semantic())


class TrainingConfig(FlowConfig):
    """Fields that the config of every training flow has."""

    flow: ClassVar[str]
    """Name of the flow. Its module, its function, its command and its deployment have this name."""
    has_scalar_head: ClassVar[bool] = False
    """Whether the trained model gives scores instead of text."""

    model: ModelConfig
    data: DataConfig

    @property
    def title(self) -> str:
        """The name of the flow run."""
        return training_title(self.flow, self.model.key, self.data.train, self.seed)

    @property
    def critic(self) -> ValueModelConfig | None:
        """The value model that is trained beside the policy. None: there is none."""
        return None

    @property
    def teacher_keys(self) -> tuple[str, ...]:
        """The keys of the models that the policy is distilled from. Empty: there are none."""
        return ()

    @property
    def stages(self) -> dict[str, StageConfig]:
        """The stages in their order, each configured as a run of its own would be, by the field of its settings. The
        field of a run with one stage is empty."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _engine_trains_the_adapters(self) -> Self:
        if isinstance(self.engine, LocalEngineSpec):  # a served engine checks for itself
            for model in (self.model, self.critic):
                if model is not None:
                    self.engine.check_trainable(model.trainable)
        return self


class StageConfig(TrainingConfig):
    """Fields that the config of every training flow with one stage has, and what a step of it computes."""

    # each flow has its own type; a field here would come before theirs in the form
    if TYPE_CHECKING:
        algorithm: Any
        optimizer: OptimizerConfig
        rules: RunRules

    @model_validator(mode="after")
    def _engine_has_the_optimizer(self) -> Self:
        if isinstance(self.engine, LocalEngineSpec):
            self.engine.check_optimizer(self.optimizer.kind)
        return self

    @property
    def stages(self) -> dict[str, StageConfig]:
        return {"": self}

    @property
    def measurements(self) -> Every:
        """How often the model is measured on the held-out rows."""
        raise NotImplementedError

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the policy with the one that the stage began with."""
        return False

    @property
    def rows_per_step(self) -> int:
        """Rows of the dataset that a step reads."""
        raise NotImplementedError

    @property
    def shards_per_step(self) -> int:
        """Shards of prompts that a step samples and grades."""
        return 0

    @property
    def passes_before_gradient(self) -> int:
        """Forward passes over the tokens of a step before the gradient."""
        return int(self.needs_reference)

    @property
    def passes_of_gradient(self) -> int:
        """Forward and backward passes over the tokens of a step."""
        return 1

    def tokens_per_step(self, rows: int, row_tokens: int) -> int:
        """Largest number of tokens that a step trains on. The dataset has `rows` rows of `row_tokens` tokens."""
        raise NotImplementedError

    def tokens_per_heldout_row(self, row_tokens: int) -> int:
        """Largest number of tokens that a measurement reads or samples for a held-out row of `row_tokens` tokens."""
        raise NotImplementedError

    def count_steps(self, rows: int) -> int | None:
        """The number of steps of a whole run over `rows` rows, or None for a run without an end."""
        raise NotImplementedError

    def check_rows(self, rows: int) -> None:
        """Raises ValueError if a run over this many rows would train no policy."""

    @model_validator(mode="after")
    def _patience_has_measurements(self) -> Self:
        every = self.measurements
        measured = self.data.heldout is not None and (every.every is not None or every.every_steps is not None)
        if self.rules.patience is not None and not measured:
            raise ValueError(
                f"rules.patience={self.rules.patience} counts measurements on held-out rows during the run, and there "
                "are none; give data.heldout and evaluation.every_steps (validation.every_steps where nothing is "
                "sampled), or leave patience out"
            )
        return self

    @model_validator(mode="after")
    def _batch_holds_the_mixture(self) -> Self:
        if isinstance(self.data.train, MixtureDataset):
            self.data.train.check_batch(self.rows_per_step)
        return self


class SupervisedConfig(StageConfig):
    """Fields that the config of every flow that trains on the rows of a dataset has."""

    if TYPE_CHECKING:
        algorithm: SFTAlgorithm
        validation: ValidationConfig

    @property
    def measurements(self) -> Every:
        return self.validation

    @property
    def rows_per_step(self) -> int:
        return self.algorithm.samples_per_batch

    def tokens_per_step(self, rows: int, row_tokens: int) -> int:
        return min(self.rows_per_step, rows) * row_tokens

    def tokens_per_heldout_row(self, row_tokens: int) -> int:
        return row_tokens * (1 + self.needs_reference)

    def count_steps(self, rows: int) -> int | None:
        if self.algorithm.steps is not None:
            return self.algorithm.steps
        return -(-(self.algorithm.epochs or 1) * rows // min(self.rows_per_step, rows))


class RolloutConfig(StageConfig):
    """Fields that the config of every flow that trains on rollouts of prompts has."""

    data: PromptDataConfig

    if TYPE_CHECKING:
        sampling: SamplingParams
        algorithm: GRPOAlgorithm
        evaluation: EvaluationConfig
        regularisation: Regularisation
        rules: Any

    @property
    def longest_rollout(self) -> int:
        """Largest number of tokens that the policy writes in one rollout."""
        return self.sampling.max_new_tokens

    @property
    def batch_rules(self) -> BatchRules:
        """The rules of a training class."""
        return self.rules  # type: ignore[no-any-return]

    @property
    def measurements(self) -> Every:
        return self.evaluation

    @property
    def needs_reference(self) -> bool:
        return self.algorithm.kl_beta > 0

    @property
    def rows_per_step(self) -> int:
        return self.algorithm.samples_per_batch // self.algorithm.completions_per_sample

    @property
    def shards_per_step(self) -> int:
        return -(-self.rows_per_step // self.algorithm.prompts_per_shard)

    @property
    def passes_before_gradient(self) -> int:
        # sampling, and where needed the logprobs of the trainer and of the reference
        scored = old_logprobs_of_step(self.algorithm, self.regularisation) == "trainer"
        return 1 + scored + self.needs_reference

    @property
    def passes_of_gradient(self) -> int:
        return self.algorithm.mini_epochs_per_batch

    def tokens_per_step(self, rows: int, row_tokens: int) -> int:
        # a prompt is read once for its whole group
        return self.rows_per_step * row_tokens + self.algorithm.samples_per_batch * self.longest_rollout

    def tokens_per_heldout_row(self, row_tokens: int) -> int:
        return row_tokens + self.evaluation.samples_per_prompt * self.longest_rollout

    def count_steps(self, rows: int) -> int | None:
        if self.algorithm.steps is not None or self.algorithm.epochs is None:
            return self.algorithm.steps
        return -(-self.algorithm.epochs * rows // self.rows_per_step)

    @model_validator(mode="after")
    def _endless_runs_are_constant(self) -> Self:
        """Refuses a run without an end in which something depends on its progress, and temperature 0."""
        endless = self.algorithm.steps is None and self.algorithm.epochs is None
        # schedules over the run, and checkpoints by its fractions, need an end
        if endless and not self.optimizer.endless:
            raise ValueError(
                f"neither algorithm.steps nor algorithm.epochs is given, so the run ends only when it is stopped, and "
                f"optimizer.schedule={self.optimizer.schedule!r} has no end to bend to; give steps, or use 'constant', "
                "or 'inverse_sqrt' with warmup_steps, and a constant weight decay"
            )
        if endless and self.checkpoints.frequency is not None and self.checkpoints.every_steps is None:
            raise ValueError(
                "a run without steps or epochs has no fractions; set checkpoints.frequency=null and, for named "
                "checkpoints, checkpoints.every_steps"
            )
        self.evaluation.check_length("evaluation", endless=endless)
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature=0 gives a group equal completions and no advantage; use e.g. 1.0")
        self.regularisation.check(self.algorithm, self.sampling, max_staleness=self.rules.max_staleness)
        return self


class GRPOConfig(RolloutConfig):
    """`ostinato run grpo`: reinforcement learning from graded rollouts."""

    flow: ClassVar[str] = "grpo"

    grader: GraderConfig
    sampling: SamplingParams = SamplingParams(max_new_tokens=256)
    algorithm: GRPOAlgorithm = GRPOAlgorithm()
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    regularisation: Regularisation = Regularisation()
    rules: BatchRules = BatchRules()


class SFTDataConfig(DataConfig):
    """The conversations to train on, and held-out conversations for the validation loss."""

    heldout: HeldoutRows | None = None
    """Conversations of the validation loss, on which the model is never trained. None: no validation loss."""


class SFTConfig(SupervisedConfig):
    """`ostinato run sft`: supervised fine-tuning on conversations."""

    flow: ClassVar[str] = "sft"

    data: SFTDataConfig
    algorithm: SFTAlgorithm = SFTAlgorithm()
    optimizer: SFTOptimizer = SFTOptimizer()
    rules: RunRules = RunRules()
    validation: ValidationConfig = ValidationConfig()


def model_title(key: str) -> str:
    """The last part of a model's key: `models/smollm2-135m` -> smollm2-135m. A long version is cut: `helper@<digest>`
    -> helper@ and the first letters of the digest."""
    return keys.short_key(PurePath(key).name) or key


def training_title(flow: str, key: str, source: TrainingSource, seed: int) -> str:
    """The name of a training run: `grpo smollm2-135m on chain_sum, seed 3`."""
    return f"{flow} {model_title(key)} on {source.title}, seed {seed}"
