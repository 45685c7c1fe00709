"""Says in one sentence what to do when a measure of the training has left its range.

docs/troubleshooting.md has a section for each of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

from tasks.reports.metrics import StepMetrics

WINDOW = 5
"""Number of steps over which a measure is averaged."""


class Advisor:
    """Follows the steps of a run, and advises once when a measure leaves its range."""

    def __init__(self, first: StepMetrics | None = None) -> None:
        """`first`: the first step of the run, if it was made before."""
        self._first = first
        self._last: deque[StepMetrics] = deque(maxlen=WINDOW)
        self._advised: set[str] = set()

    def step(self, metrics: StepMetrics) -> list[str]:
        """Adds a step. Returns the advice about measures that are out of their range now, and were not before it."""
        self._first = self._first or metrics
        self._last.append(metrics)
        current = _advice(self._first, self._last)
        new = [sentence for topic, sentence in current.items() if topic not in self._advised]
        self._advised = set(current)
        return new


def advice(first: StepMetrics | None, last: Sequence[StepMetrics]) -> list[str]:
    """The advice about the last steps of a run, of which WINDOW count. `first`: the first step of the run."""
    return list(_advice(first, last[-WINDOW:]).values())


def _advice(first: StepMetrics | None, last: Sequence[StepMetrics]) -> dict[str, str]:
    """Topic -> sentence."""
    if len(last) < WINDOW:
        return {}
    sentences = {}
    for topic, check in CHECKS.items():
        now = _mean(check.measure, last)
        before = None if first is None else check.measure(first)
        if now is not None and check.is_out_of_range(now, before):
            before_text = "" if before is None else f"{before:.3g}"
            sentences[topic] = check.sentence.format(share=f"{now:.0%}", value=f"{now:.3g}", before=before_text)
    return sentences


def _mean(measure: Callable[[StepMetrics], float | None], steps: Sequence[StepMetrics]) -> float | None:
    """The mean over the steps that have the measure; None if half of them or more do not."""
    values = [value for value in map(measure, steps) if value is not None]
    return fmean(values) if 2 * len(values) > len(steps) else None


class Check(NamedTuple):
    """One measure, its range and the advice."""

    measure: Callable[[StepMetrics], float | None]
    is_out_of_range: Callable[[float, float | None], bool]
    """Of (the mean over the last steps, the value of the first step)."""
    sentence: str
    """With {share} or {value} of the last steps, and {before} of the first."""


def _ungraded(step: StepMetrics) -> float | None:
    return step.masked / step.completions if step.completions else None


CHECKS: dict[str, Check] = {
    "equal rewards": Check(
        lambda step: step.equal_groups,
        lambda now, before: now >= 0.8,
        "in {share} of the groups, all completions had the same reward, so that none is better than the others: take "
        "prompts that the model solves sometimes, sample more completions of each, or set rules.dynamic_sampling",
    ),
    "cut completions": Check(
        lambda step: step.truncated,
        lambda now, before: now >= 0.3,
        "{share} of the completions ended at max_new_tokens: raise sampling.max_new_tokens, or leave them out of the "
        "loss by rules.mask_truncated, unless the model should learn to be shorter",
    ),
    "clipped tokens": Check(
        lambda step: step.clip_fraction,
        lambda now, before: now >= 0.3,
        "{share} of the tokens were clipped: lower optimizer.lr, or take fewer updates per batch",
    ),
    "distance to the reference": Check(
        lambda step: step.kl_mean,
        lambda now, before: now >= 1.0,
        "the policy is {value} nats per token from the reference: lower optimizer.lr, raise kl_beta, or stop earlier",
    ),
    "entropy": Check(
        lambda step: step.entropy,
        lambda now, before: before is not None and now < 0.02 and now < 0.2 * before,
        "the entropy fell from {before} to {value} nats per token, so that the completions of a prompt are almost the "
        "same: lower optimizer.lr, set an entropy_coef, or stop earlier",
    ),
    "missing grades": Check(
        _ungraded,
        lambda now, before: now >= 0.2,
        "{share} of the completions got no grade: 'ostinato runs samples RUN' shows the reasons",
    ),
    "gap between sampler and trainer": Check(
        lambda step: step.logprob_gap,
        lambda now, before: before is not None and now > 0.01 and now > 3 * before,
        "the logprobs of sampler and trainer differ by {value} nats per token, and by {before} at the first step: "
        "'ostinato verify RUN' compares the samples with the policies that they name",
    ),
    "effective sample size": Check(
        lambda step: step.effective_sample_size,
        lambda now, before: now < 0.3,
        "the effective sample size is {share} of the tokens: lower rules.max_staleness or optimizer.lr",
    ),
}
"""By topic, which is the title of its section in docs/troubleshooting.md."""
