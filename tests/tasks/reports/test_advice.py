"""Advice about measures that have left their range: when it is given, and that the docs explain each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.reports.advice import CHECKS, WINDOW, Advisor, advice
from tasks.reports.metrics import StepMetrics

HEALTHY: dict[str, Any] = {
    "reward_mean": 0.5, "completions": 16, "masked": 0, "equal_groups": 0.25, "truncated": 0.1, "clip_fraction": 0.05,
    "kl_mean": 0.1, "entropy": 1.0, "logprob_gap": 0.02, "effective_sample_size": 0.9,
}  # fmt: skip


def steps_with(count: int = WINDOW, *, first: int = 0, **changes: Any) -> list[StepMetrics]:
    fields = HEALTHY | changes
    return [StepMetrics(step=first + n, loss=0.1, grad_norm=1.0, learning_rate=1e-5, **fields) for n in range(count)]


def test_a_healthy_run_gets_no_advice() -> None:
    steps = steps_with(3 * WINDOW)
    assert advice(steps[0], steps) == [] and advice(None, []) == []


@pytest.mark.parametrize(
    ("topic", "changes", "words"),
    [
        ("equal rewards", {"equal_groups": 0.9}, "in 90% of the groups"),
        ("cut completions", {"truncated": 0.5}, "50% of the completions ended at max_new_tokens"),
        ("clipped tokens", {"clip_fraction": 0.4}, "40% of the tokens were clipped"),
        ("distance to the reference", {"kl_mean": 1.5}, "1.5 nats per token from the reference"),
        ("entropy", {"entropy": 0.01}, "the entropy fell from 1 to 0.01 nats"),
        ("missing grades", {"masked": 8}, "50% of the completions got no grade"),
        ("gap between sampler and trainer", {"logprob_gap": 0.1}, "differ by 0.1 nats per token, and by 0.02"),
        ("effective sample size", {"effective_sample_size": 0.2}, "the effective sample size is 20% of the tokens"),
    ],
)
def test_one_sentence_for_each_measure(topic: str, changes: dict[str, Any], words: str) -> None:
    (first,) = steps_with(1)
    (sentence,) = advice(first, steps_with(WINDOW, first=1, **changes))
    assert words in sentence
    # one step among healthy ones does not decide
    assert advice(first, [*steps_with(WINDOW), *steps_with(1, first=WINDOW, **changes)]) == []
    assert topic in CHECKS


def test_every_check_is_tried_above_and_explained_in_the_docs() -> None:
    (marks,) = (mark for mark in test_one_sentence_for_each_measure.pytestmark if mark.name == "parametrize")  # type: ignore[attr-defined]
    assert {case[0] for case in marks.args[1]} == set(CHECKS)
    page = (Path(__file__).parents[3] / "docs" / "troubleshooting.md").read_text()
    titles = {line.removeprefix("### ").lower() for line in page.splitlines() if line.startswith("### ")}
    assert set(CHECKS) <= titles


def test_a_measure_that_a_run_does_not_have_gets_no_advice() -> None:
    without = dict.fromkeys(("equal_groups", "truncated", "entropy", "logprob_gap", "reward_mean"))
    steps = steps_with(3 * WINDOW, **without)
    assert advice(steps[0], steps) == []


def test_steps_in_which_every_grade_failed() -> None:
    steps = steps_with(WINDOW, reward_mean=None, equal_groups=None, masked=16, skipped=True)
    (sentence,) = advice(steps[0], steps)
    assert sentence.startswith("100% of the completions got no grade")


def test_a_resumed_run_is_compared_with_its_first_step() -> None:
    (first,) = steps_with(1)
    resumed = steps_with(WINDOW, first=9, logprob_gap=0.1)
    told = Advisor(first)
    assert [len(told.step(step)) for step in resumed] == [0, 0, 0, 0, 1]
    alone = Advisor()  # takes the first step after the restart, which is as bad as the others
    assert [alone.step(step) for step in resumed] == [[]] * WINDOW


def test_the_terminal_is_told_once_and_again_after_a_recovery() -> None:
    advisor = Advisor()
    told = [advisor.step(step) for step in steps_with(WINDOW + 3, equal_groups=1.0)]
    assert [len(lines) for lines in told] == [0] * (WINDOW - 1) + [1, 0, 0, 0]
    for step in steps_with(WINDOW, equal_groups=0.0):
        assert advisor.step(step) == []
    assert sum(len(advisor.step(step)) for step in steps_with(WINDOW, equal_groups=1.0)) == 1
