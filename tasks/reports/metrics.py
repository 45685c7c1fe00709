"""What one step, one evaluation and one sample say about a run: the records that progress lines and reports show."""

from collections.abc import Sequence

from pydantic import ConfigDict

from storage.serialization import Frozen
from tasks.evaluation.statistics import mean_interval

ACTIVITIES = ("rollout", "grade", "train", "sync", "storage", "orchestration")
"""Where a step's time goes: the keys of `StepMetrics.seconds`, in the order of the loop."""


class StepMetrics(Frozen):
    """One finished step. A field that the algorithm does not have (the reward of an SFT step) is None."""

    # a NaN as text: JSON has no number for it, and null would not be read back
    model_config = ConfigDict(ser_json_inf_nan="strings")

    step: int
    """0-based, as in the artifact keys; people are shown step + 1."""
    total_steps: int | None = None
    reward_mean: float | None = None
    """Mean over the completions that were graded; masked ones are left out."""
    reward_std: float | None = None
    by_source: dict[str, float] = {}
    """The mean reward of each `data_source` that the prompts' metadata names."""
    kl_mean: float | None = None
    """Mean per-token KL to the reference, nats."""
    pair_accuracy: float | None = None
    """Share of the step's pairs of which the model, before the step, held the preferred one to be the better."""
    pair_margin: float | None = None
    """By how much on average, in implicit rewards (DPO) or scores (reward models)."""
    loss: float
    """NaN where no update of the step had a finite one (all were left out)."""
    grad_norm: float
    """L2 norm before clipping. NaN as with the loss."""
    learning_rate: float
    completion_tokens: int = 0
    """Tokens sampled in this step, or trained tokens where nothing is sampled."""
    completion_length_mean: float | None = None
    """Tokens per completion."""
    prompts: int = 0
    completions: int = 0
    masked: int = 0
    """Completions whose grade failed: in neither the statistics nor the loss."""
    dropped: int = 0
    """Prompts left out because they were too long (truncation = drop)."""
    skipped_updates: int = 0
    """Optimizer updates left out because their gradient was not finite."""
    entropy: float | None = None
    """Mean per-token entropy of the policy, nats."""
    logprob_gap: float | None = None
    """Mean |sampler - trainer| log-probability per token, nats; large means sampler and trainer disagree."""
    tokens_per_second: float = 0.0
    seconds: dict[str, float] = {}
    """Seconds by activity; the keys are `ACTIVITIES`, an absent one is 0."""
    resumed: bool = False
    """True for the first step that ran after a restart."""


class EvaluationSummary(Frozen):
    """One evaluation of one policy on one fixed set of prompts."""

    name: str
    mean: float
    low: float | None
    """Lower end of the 95 % interval of the mean; None when n is 1."""
    high: float | None
    n: int
    """Prompts with a grade."""
    rewards: tuple[float | None, ...]
    """One per prompt, in the order of the prompts; None where the grade failed."""


class SampleRollout(Frozen):
    """One prompt and what a policy answered."""

    prompt: str
    completion: str
    reward: float | None = None
    reference: str | None = None
    """The expected answer, where the dataset has one."""


def summarise_evaluation(name: str, rewards: Sequence[float | None]) -> EvaluationSummary:
    """Mean and 95 % interval of the grades that there are. Raises ValueError when every grade failed."""
    graded = [reward for reward in rewards if reward is not None]
    if not graded:
        raise ValueError(f"evaluation {name!r} has {len(rewards)} prompts and no grade; look at the grader's errors")
    mean = mean_interval(graded)
    return EvaluationSummary(name=name, mean=mean.mean, low=mean.low, high=mean.high, n=mean.n, rewards=tuple(rewards))
