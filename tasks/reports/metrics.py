"""Records of a step, an evaluation and a sample, which progress lines, pages and reports show."""

from collections.abc import Sequence

from pydantic import ConfigDict, Field

from storage.serialization import Frozen
from tasks.evaluation.statistics import mean_interval

ACTIVITIES = ("rollout", "grade", "train", "sync", "storage", "orchestration")
"""Activities of a step in the order of the loop: the keys of `StepMetrics.seconds`."""

LANES = {"train": "trainer", "rollout": "samplers", "grade": "graders"}
"""The activities that can overlap with `max_staleness`, and who works then: the keys of `StepMetrics.lanes`."""


class PartMetrics(Frozen):
    """What a step took from one part of a mixture."""

    rows: int
    """Rows that the step drew from the part."""
    epoch: float
    """Passes over the part since the run began. Rows that are left out for their length count as rows of the part."""


class StepMetrics(Frozen):
    """Metrics of a finished step. A measure that the algorithm does not have (the reward of an SFT step) is None."""

    # JSON has no number for NaN, and null would not be read back
    model_config = ConfigDict(ser_json_inf_nan="strings")

    step: int
    """0-based, as in the artifact keys. Displays show step + 1."""
    total_steps: int | None = None
    reward_mean: float | None = None
    """Mean over the graded completions, without masked ones."""
    reward_std: float | None = None
    by_source: dict[str, float] = {}
    """Mean reward per `data_source` of the prompts' metadata."""
    reward_parts: dict[str, float] = Field({}, exclude_if=lambda parts: not parts)
    """Mean value of each part of the rewards, before its weight, by the name of its grader."""
    by_part: dict[str, PartMetrics] = Field({}, exclude_if=lambda parts: not parts)
    """What the step took from each part of a mixture, by its name. Empty for a single dataset."""
    kl_mean: float | None = None
    """Mean per-token KL to the reference, nats."""
    teacher_kl: float | None = Field(None, exclude_if=lambda kl: kl is None)
    """Mean of the sampler's minus the teacher's logprob per token, nats: an estimate of the reverse KL to the
    teacher."""
    divergence: float | None = Field(None, exclude_if=lambda divergence: divergence is None)
    """Mean of the divergence from the teacher per token, nats, of algorithm.divergence=forward_kl or jsd."""
    pair_accuracy: float | None = None
    """Share of the step's pairs in which the model, before the update, scored the preferred answer higher."""
    pair_margin: float | None = None
    """Mean difference between preferred and rejected answer: of implicit rewards (DPO) or scores (reward models)."""
    loss: float
    """NaN if no update of the step had a finite loss (all were skipped)."""
    grad_norm: float
    """L2 norm before clipping. NaN if all updates were skipped."""
    learning_rate: float
    completion_tokens: int = 0
    """Sampled tokens of this step, or trained tokens if the algorithm does not sample."""
    completion_length_mean: float | None = None
    """Tokens per completion."""
    prompts: int = 0
    completions: int = 0
    masked: int = 0
    """Completions whose grade failed. They are in neither the statistics nor the loss."""
    dropped: int = 0
    """Prompts that were dropped because they were too long (truncation = drop)."""
    skipped_updates: int = 0
    """Optimizer updates that were skipped because their gradient was not finite."""
    skipped_reasons: tuple[str, ...] = Field((), exclude_if=lambda reasons: not reasons)
    """Why each of them was skipped: the norm of its gradient, its batch, and the first row that is not finite."""

    def skipped_lines(self) -> list[str]:
        """The reasons of the step's skipped updates, each with the number of the step from 1."""
        return [f"step {self.step + 1}: {reason}" for reason in self.skipped_reasons]
    skipped: bool = False
    """Whether the step made no update because no completion got a grade."""
    entropy: float | None = None
    """Mean entropy of the distribution that a token was sampled from, nats: minus the mean logprob of the sampled
    tokens, whose expectation it is."""
    equal_groups: float | None = Field(None, exclude_if=lambda share: share is None)
    """Share of the groups with two rewards or more in which all rewards are equal. Compared with each other, their
    completions have no advantage."""
    truncated: float | None = Field(None, exclude_if=lambda share: share is None)
    """Share of the completions that ended at max_new_tokens, or of the episodes with such an answer."""
    turns_mean: float | None = Field(None, exclude_if=lambda turns: turns is None)
    """Answers per episode."""
    segments_mean: float | None = Field(None, exclude_if=lambda segments: segments is None)
    """Segments per episode of an agent: 1, and one more for each rewritten conversation and each branch."""
    failed_attempts_mean: float | None = Field(None, exclude_if=lambda attempts: attempts is None)
    """Failed attempts per episode of an agent."""
    clip_fraction: float | None = Field(None, exclude_if=lambda fraction: fraction is None)
    """Fraction of the tokens whose ratio was clipped, in the mean over the updates."""
    logprob_gap: float | None = None
    """Mean |sampler - trainer| log-probability per token, nats, over the completions that the trainer scored: all of
    them, or those with a gradient where the update's own forward pass gives the old log-probabilities. None if none
    was scored. A large gap means that their weights differ."""
    lag_mean: float | None = Field(None, exclude_if=lambda lag: lag is None)
    """Age in steps of the policy that sampled, as a mean over the sampled tokens. None without max_staleness."""
    lag_max: int | None = Field(None, exclude_if=lambda lag: lag is None)
    """Largest age in steps of a policy that sampled for this step. None without max_staleness."""
    masked_token_fraction: float | None = Field(None, exclude_if=lambda fraction: fraction is None)
    """Fraction of the tokens of the forward pass that importance_mask left out of the policy's loss."""
    effective_sample_size: float | None = Field(None, exclude_if=lambda size: size is None)
    """Effective sample size (Kish's) of the N tokens of the forward pass, as a fraction of N: (Σw)² / (N Σw²) with the
    importance weight w of each token, 0 for a masked one. 1 if all weights are equal. None if the loss has no such
    weights."""
    sampler_idle: float | None = Field(None, exclude_if=lambda share: share is None)
    """Share of the step's time in which no completion was sampled. None without max_staleness."""
    trainer_idle: float | None = Field(None, exclude_if=lambda share: share is None)
    """Share of the step's time in which no gradient step was taken. None without max_staleness."""
    lanes: dict[str, tuple[tuple[float, float], ...]] | None = Field(None, exclude_if=lambda lanes: lanes is None)
    """When each activity of `LANES` was under way: (begin, end) in seconds since the step before ended. None without
    max_staleness."""
    tokens_per_second: float = 0.0
    seconds: dict[str, float] = {}
    """Seconds per activity (`ACTIVITIES`); a missing activity took 0 s."""
    resumed: bool = False
    """True for the first step after a restart."""


class EvaluationSummary(Frozen):
    """An evaluation of one policy on a fixed set of prompts."""

    name: str
    mean: float
    low: float | None
    """Lower end of the 95 % confidence interval of the mean; None as in `statistics.Mean`."""
    high: float | None
    n: int
    """Number of prompts with a grade."""
    rewards: tuple[float | None, ...]
    """One reward per prompt in the order of the prompts; None if the grade failed."""


class SampleRollout(Frozen):
    """A prompt with a policy's answer."""

    prompt: str
    completion: str
    reward: float | None = None
    reference: str | None = None
    """The expected answer, if the dataset has one."""


def summarise_evaluation(name: str, rewards: Sequence[float | None]) -> EvaluationSummary:
    """Mean and 95 % interval of the grades that did not fail. Raises ValueError if all failed."""
    graded = [reward for reward in rewards if reward is not None]
    if not graded:
        raise ValueError(f"evaluation {name!r} has {len(rewards)} prompts and no grade; look at the grader's errors")
    # Each prompt counts once, so the interval is that of the mean over prompts.
    mean = mean_interval(graded)
    return EvaluationSummary(name=name, mean=mean.mean, low=mean.low, high=mean.high, n=mean.n, rewards=tuple(rewards))
