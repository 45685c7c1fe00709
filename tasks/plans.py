"""What a step or an evaluation is: prompts, graders, environments, batches. Configs and tasks share these classes, so
this module imports no Prefect."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, JsonValue, model_validator

from engine.protocol import SamplingParams
from storage.chain.records import PolicyRef, StepOldLogprobs
from storage.serialization import Frozen, canonical_json, digest
from storage.store.artifacts import ArtifactRef
from tasks.batches.advantages import BATCH_ESTIMATORS, DECOUPLED, PASS_AT_K, Overlong, RewardKL, TokenSelection
from tasks.environments.spec import AgentSpec, EnvironmentSpec
from tasks.graders.spec import GraderSpec

Truncation = Literal["error", "left", "right", "drop"]
AdvantageEstimator = Literal[
    "group", "group_sample_std", "centred", "leave_one_out", "max_rl", "pass_at_k", "gdpo", "raw",
    "reinforce_plus_plus", "reinforce_plus_plus_baseline",
]  # fmt: skip
Returns = Literal["rewards", "advantages"]
WeightUpdates = Literal["between", "in_flight"]
"""When the samplers may get newer weights: between completions only, or at any token of a completion."""


DatasetAnswers = Literal["none", "replaced", "taken"]
"""The last turns of the prompts' rows. none: they belong to the prompts. replaced: they are answers, in whose place
completions are sampled. taken: they are answers, and the completions are these."""


class TooManyMasked(Exception):
    """More completions could not be graded than the run allows."""


class PromptShard(Frozen):
    """Some prompts of a step, by their rows in the dataset. A shard is sampled as one fixed batch."""

    base: ArtifactRef
    """The model whose tokenizer renders the prompts."""
    dataset: ArtifactRef
    index: int = Field(ge=0)
    rows: tuple[int, ...]
    completions: int = Field(ge=1)
    """Completions per prompt."""
    repetitions: tuple[int, ...] = ()
    """How often each row occurred earlier in the same step, which happens when a batch reaches into the next epoch. The
    completions of a repeated row are numbered on, so that no two of a step share a random stream. Empty: no row is
    repeated."""
    max_prompt_tokens: int | None = None
    truncation: Truncation = "error"
    segment_seconds: float | None = Field(None, gt=0, exclude_if=lambda value: value is None)
    """Seconds of sampling after which the tokens of unfinished completions are committed, and go on under the newest
    policy, as they do when new weights arrive. None: each completion is sampled from one policy without a cut."""
    dataset_answers: DatasetAnswers = Field("none", exclude_if=lambda answers: answers == "none")
    resampled: bool = Field(False, exclude_if=lambda value: not value)
    """Whether the step has sampled these prompts before, in shards of which no completion got a grade."""


class Grading(Frozen):
    """The grader of a run, with its timeout, retries and concurrency."""

    grader: GraderSpec
    timeout_seconds: float = Field(60.0, gt=0)
    """Seconds per grade and attempt, without the time in which a judge waits for its engine."""
    retries: int = Field(2, ge=0)
    concurrency: int = Field(32, ge=1)
    max_masked_fraction: float = Field(0.2, ge=0, le=1)
    """The run fails if a larger fraction of a shard's completions could not be graded."""
    keep_answers: bool = Field(False, exclude_if=lambda value: not value)
    """Whether the graded table has the answers that the grader extracted, as a majority vote needs them."""


KeepKind = Literal["top", "threshold", "distinct"]
RoundStart = Literal["base", "last"]
"""The weights that a round of rejection sampling fine-tunes."""


class KeepRule(Frozen):
    """Which completions of each prompt a round of rejection sampling keeps."""

    kind: KeepKind
    per_prompt: int = Field(ge=1)
    min_reward: float


class EpisodePlan(Frozen):
    """The environment of a run, with the limits of an episode and the timeouts of the environment."""

    environment: EnvironmentSpec
    max_turns: int = Field(8, ge=1)
    """Answers per episode."""
    max_tokens: int | None = Field(None, ge=2)
    """Tokens per segment: prompt, answers and the environment's turns. None: the model's context."""
    episode_seconds: float | None = Field(None, gt=0)
    """Seconds that the environment may take in an episode. A run in which this limit acts cannot be repeated byte for
    byte."""
    reaction_seconds: float = Field(60.0, gt=0)
    """Seconds that one reaction of the environment may take; a longer one is a failure."""
    concurrency: int = Field(64, ge=1)
    """Environments that react concurrently."""
    max_masked_fraction: float = Field(0.2, ge=0, le=1)
    """The run fails if a larger fraction of a shard's episodes could not be played."""


def check_pass_k(estimator: str, pass_k: int | None) -> None:
    """Raises ValueError for pass_at_k without k, and for k with another estimator."""
    if (estimator == PASS_AT_K) != (pass_k is not None):
        raise ValueError(
            f"advantage_estimator={estimator!r} and pass_k={pass_k}: pass_at_k needs pass_k, and no other estimator "
            "has it; give both, or neither"
        )


class AgentPlan(Frozen):
    """The agent of a run, with the limits of an episode."""

    agent: AgentSpec
    max_calls: int = Field(32, ge=1)
    """Answers per episode."""
    max_tokens: int | None = Field(None, ge=2)
    """Tokens of a prompt and its answer. None: the model's context."""
    seconds: float = Field(600.0, gt=0)
    """Seconds that the agent may take in an episode, without those in which it waits for answers."""
    memory_mib: int | None = Field(None, ge=64)
    """Address space of each process of the agent, in MiB. None: no limit."""
    retries: int = Field(1, ge=0)
    """How often an agent that fails is started again."""
    concurrency: int = Field(16, ge=1)
    """Agents that run at the same time."""
    max_masked_fraction: float = Field(0.2, ge=0, le=1)
    """The run fails if a larger fraction of a shard's episodes could not be played."""


class BatchPlan(Frozen):
    """Settings of an RL batch: how rewards become advantages, and which logprobs its rows have."""

    reference: PolicyRef | None
    """The policy whose logprobs the KL term compares with; None if the coefficient of the KL term is 0."""
    advantage_estimator: AdvantageEstimator = "group"
    pass_k: int | None = Field(None, ge=2, exclude_if=lambda k: k is None)
    """The k of "pass_at_k". No other estimator has it."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount factor of later rewards, per token. Only "reinforce_plus_plus" reads it."""
    old_logprobs: StepOldLogprobs = "trainer"
    """Where the step takes the old logprobs from. Only with "trainer", the engine computes them for the batch."""
    temperature: float = 1.0
    reward_kl: RewardKL | None = None
    """A KL penalty that is subtracted from the reward; it needs `reference`."""
    teacher: PolicyRef | None = None
    """The teacher of a distillation. Its logprob minus the sampler's, times `teacher_beta`, is added to the advantage
    of each token, unless `teacher_top_k` is given."""
    teacher_beta: float = 1.0
    teachers: dict[str, PolicyRef] = Field({}, exclude_if=lambda teachers: not teachers)
    """Instead of one teacher, the teacher of each value that prompts have in `teacher_column`."""
    teacher_column: str | None = Field(None, exclude_if=lambda column: column is None)
    teacher_top_k: int | None = Field(None, exclude_if=lambda top: top is None)
    """Number of the teacher's most probable tokens whose logprobs the batch has, for a loss that reads them. None: the
    batch has the teacher's logprobs of the trained tokens."""
    dataset_answers: bool = Field(False, exclude_if=lambda answers: not answers)
    """Whether completions of the batch may be answers of the dataset, which no policy sampled."""
    selection: TokenSelection | None = Field(None, exclude_if=lambda selection: selection is None)
    """The tokens that the loss treats in its own way."""
    overlong: Overlong | None = None
    mask_truncated: bool = False
    """Leaves truncated answers out of the loss. Their rewards still count in the statistics of their groups."""
    drop_equal_groups: bool = False
    max_staleness: int = 0
    """How many steps older than the trained policy the sampling policy may be."""
    weight_updates: WeightUpdates = "between"
    per_trajectory: bool = False
    """Gives every token of an episode the advantage of its one grade; otherwise each turn has an advantage of its
    own."""

    @model_validator(mode="after")
    def _k_goes_with_its_estimator(self) -> Self:
        check_pass_k(self.advantage_estimator, self.pass_k)
        return self

    @model_validator(mode="after")
    def _penalty_has_logprobs(self) -> Self:
        penalties = [name for name in ("reward_kl", "overlong") if getattr(self, name) is not None]
        if self.advantage_estimator == DECOUPLED and penalties:
            raise ValueError(
                f"advantage_estimator='gdpo' normalises the parts of the grades, and {penalties} is a penalty on their "
                "sum; leave it out (kl_in='loss'), or give it as a grader of its own"
            )
        for name in ("reward_kl", "selection"):
            if getattr(self, name) is not None and self.old_logprobs == "forward":
                raise ValueError(f"{name} needs the old logprobs before the step; use old_logprobs='trainer'")
        return self

    @property
    def has_teacher(self) -> bool:
        """Whether the batch is scored by a teacher."""
        return self.teacher is not None or bool(self.teachers)

    @property
    def rules(self) -> dict[str, JsonValue]:
        """The manifest's entry `rules`. It tells why completions are missing or the sampling policy is older."""
        names = {"mask_truncated", "drop_equal_groups", "max_staleness", "weight_updates"}
        rules = self.model_dump(include=names, exclude_defaults=True)
        return {"rules": rules} if rules else {}

    @property
    def needs_whole_batch(self) -> bool:
        """Whether the advantages depend on logprobs or on the whole batch, which is then held in memory."""
        by_logprobs = self.reward_kl is not None or self.selection is not None
        return by_logprobs or self.advantage_estimator in BATCH_ESTIMATORS


class ValuePlan(Frozen):
    """Settings of the advantages and returns of a batch (GAE, arXiv:1506.02438)."""

    value: PolicyRef
    """The value model."""
    gamma: float = Field(1.0, gt=0, le=1)
    lam: float = Field(0.95, ge=0, le=1)
    returns: Returns = "rewards"
    """The target of the value model: the discounted sum of the rewards, or the advantage plus the value."""
    whiten_advantages: bool = False
    """Normalises the advantages over all tokens of the batch to mean 0 and standard deviation 1."""


class EvaluationPlan(Frozen):
    """Prompts, sampling, and the grader or the environment of an evaluation. Equal plans of one policy give one
    artifact."""

    prompts: PromptShard
    sampling: SamplingParams
    source: Grading | EpisodePlan | AgentPlan
    label: str = "held-out"
    """Name for readers. It is not part of the artifact's key."""

    def name(self, policy: PolicyRef) -> str:
        body = self.model_dump(mode="json", include={"prompts", "sampling"})
        # Neither the place where the grader runs nor the patience with an environment changes the result.
        if isinstance(self.source, Grading):
            body["grading"] = self.source.model_dump(mode="json", exclude={"grader": {"workers"}})
        else:
            no_effect = {"reaction_seconds", "retries", "concurrency", "max_masked_fraction"}
            body["episodes"] = self.source.model_dump(mode="json", exclude=no_effect)
        return f"{policy.step:06d}-{digest(canonical_json(body))[:12]}"
