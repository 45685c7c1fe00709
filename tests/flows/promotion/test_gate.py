"""Gate decisions on figures written by hand, and the error rates of the gate on models of known quality."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flows.promotion.gate import GateConfig, GateVerdict, judge
from tasks.evaluation.model_comparison import Difference
from tasks.evaluation.statistics import PairedDifference, paired_difference

CELLS = ["sums/exact", "words/exact"]


def cell(name: str, low: float | None, high: float | None, n: int = 20) -> Difference:
    """A difference whose interval is given; its middle is the mean."""
    dataset, grader = name.split("/")
    middle = 0.5 if low is None or high is None else (low + high) / 2
    paired = PairedDifference(before_mean=0.0, after_mean=middle, difference=middle, low=low, high=high, n=n)
    return Difference(dataset=dataset, grader=grader, first="a", second="b", paired=paired)


@pytest.mark.parametrize(
    ("sums", "words", "passed"),
    [
        ((0.01, 0.2), (-0.05, 0.1), True),  # better on the target, and not worse than allowed elsewhere
        ((0.01, 0.2), (-0.051, 0.1), False),  # elsewhere it may be worse by more than 0.05
        ((0.0, 0.2), (0.0, 0.1), False),  # as good as is not better
        ((-0.01, 0.5), (0.0, 0.1), False),  # a large mean within chance is not better
        ((0.01, 0.2), (-0.5, -0.3), False),  # clearly worse elsewhere
    ],
)
def test_the_lower_ends_decide(sums: tuple[float, float], words: tuple[float, float], passed: bool) -> None:
    verdict = judge(GateConfig(), [cell("sums/exact", *sums), cell("words/exact", *words)], CELLS)
    assert verdict.passed is passed
    assert verdict.reasons


def test_better_by_is_a_threshold_of_the_lower_end() -> None:
    cells = [cell("sums/exact", 0.1, 0.3), cell("words/exact", 0.0, 0.0)]
    assert judge(GateConfig(better_by=0.09), cells, CELLS).passed
    assert not judge(GateConfig(better_by=0.1), cells, CELLS).passed


def test_another_target() -> None:
    cells = [cell("sums/exact", 0.0, 0.3), cell("words/exact", 0.1, 0.2)]
    assert judge(GateConfig(target="words/exact"), cells, CELLS).passed
    assert not judge(GateConfig(target="sums/exact"), cells, CELLS).passed
    with pytest.raises(ValueError, match="not a dataset/grader of the suite, which has sums/exact, words/exact"):
        judge(GateConfig(target="exact"), cells, CELLS)


@pytest.mark.parametrize("missing", [None, "one prompt", "no grade in common"])
def test_what_is_not_known_fails(missing: str | None) -> None:
    cells = [cell("sums/exact", 0.1, 0.3)]
    if missing == "one prompt":
        cells.append(cell("words/exact", None, None, n=1))
    elif missing:
        cells.append(cell("words/exact", 0.0, 0.0).model_copy(update={"paired": None}))
    verdict = judge(GateConfig(), cells, CELLS)
    assert not verdict.passed
    failed = [reason for reason in verdict.reasons if reason.endswith(", failed")]
    assert failed == [verdict.reasons[0]] and failed[0].startswith("words/exact must not be worse")


def test_a_reason_has_the_figures_and_the_rule() -> None:
    verdict = judge(GateConfig(), [cell("sums/exact", -0.2, 0.1), cell("words/exact", 0.0, 0.1)], CELLS)
    assert verdict.reasons == (
        "sums/exact must not be worse by more than 0.05: -0.050 (95 % CI -0.200 to +0.100, n=20), failed",
        "sums/exact must be better: -0.050 (95 % CI -0.200 to +0.100, n=20), failed",
        "words/exact must not be worse by more than 0.05: +0.050 (95 % CI +0.000 to +0.100, n=20), passed",
    )


# -- error rates -------------------------------------------------------------------------------------------------


def judged(champion: list[float], challenger: list[float], gate: GateConfig) -> GateVerdict:
    """The verdict of the gate on two models, given their rewards for the same prompts."""
    paired = paired_difference(champion, challenger)
    difference = Difference(dataset="sums", grader="exact", first="champion", second="challenger", paired=paired)
    return judge(gate, [difference], ["sums/exact"])


def passed_by_counts(n: int, gate: GateConfig, rule: str) -> dict[tuple[int, int], bool]:
    """Whether a rule passes on n prompts graded 0 or 1, by the numbers of prompts that became better and worse."""
    passed = {}
    for better in range(n + 1):
        for worse in range(n + 1 - better):
            same = n - better - worse
            before = [0.0] * better + [1.0] * worse + [1.0, 0.0] * (same // 2) + [1.0] * (same % 2)
            after = [1.0] * better + [0.0] * worse + [1.0, 0.0] * (same // 2) + [1.0] * (same % 2)
            checks = judged(before, after, gate).checks
            passed[better, worse] = all(check.passed for check in checks if rule in check.rule)
    return passed


def pass_rate(passed: dict[tuple[int, int], bool], n: int, better: float, worse: float) -> float:
    """The probability that the rule passes if each prompt becomes better or worse with these probabilities."""
    rate = 0.0
    for (ups, downs), rule_passed in passed.items():
        if rule_passed:
            ways = math.comb(n, ups) * math.comb(n - ups, downs)
            rate += ways * better**ups * worse**downs * (1 - better - worse) ** (n - ups - downs)
    return rate


def test_a_challenger_that_is_not_better_is_promoted_at_most_once_in_40() -> None:
    passed = passed_by_counts(24, GateConfig(), "be better")
    for share in (0.01, 0.05, 0.1, 0.25, 0.5):
        assert pass_rate(passed, 24, better=share, worse=share) <= 0.025
    assert pass_rate(passed, 24, better=0.1, worse=0.2) < 0.002
    # real differences: 0.35 and 0.5
    assert pass_rate(passed, 24, better=0.4, worse=0.05) > 0.69
    assert pass_rate(passed, 24, better=0.5, worse=0.0) > 0.99


def test_a_decline_of_more_than_is_allowed_passes_at_most_once_in_40() -> None:
    gate = GateConfig(not_worse_by=0.05)
    passed = passed_by_counts(24, gate, "not be worse")
    for better, worse in ((0.0, 0.05), (0.0, 0.1), (0.05, 0.1), (0.2, 0.25)):
        assert pass_rate(passed, 24, better, worse) <= 0.025
    # equal answers to 72 prompts are the least that shows a decline of at most 0.05: 1 - 0.025^(1/72) = 0.0499
    for n, shown in ((71, False), (72, True)):
        (check, *_) = judged([1.0] * n, [1.0] * n, gate).checks
        assert check.passed is shown


@pytest.mark.slow
def test_error_rates_with_fractional_rewards_by_simulation() -> None:
    # Four answers to each of 24 prompts of different difficulty. Every tenth prompt is a catastrophe for the worse one.
    generator = np.random.default_rng(2)
    promoted = {"equal": 0, "skewed": 0, "better": 0}
    for _ in range(300):
        difficulty = generator.beta(1, 1, 24)
        before = generator.binomial(4, difficulty) / 4
        after = generator.binomial(4, difficulty) / 4
        better = generator.binomial(4, np.minimum(difficulty + 0.3, 1)) / 4
        # +0.1 with probability 0.9, -0.9 with probability 0.1: the mean of the change is 0
        skewed = 0.9 + np.where(generator.random(24) < 0.9, 0.1, -0.9)
        promoted["equal"] += judged(list(before), list(after), GateConfig()).passed
        promoted["skewed"] += judged([0.9] * 24, list(skewed), GateConfig()).passed
        promoted["better"] += judged(list(before), list(better), GateConfig()).passed
    # at a rate of 0.025, more than 16 of 300 have probability 0.002
    assert promoted["equal"] <= 16 and promoted["skewed"] <= 16
    assert promoted["better"] >= 240
