"""Gate decisions on figures written by hand."""

from __future__ import annotations

import pytest

from flows.promotion.gate import GateConfig, judge
from tasks.evaluation.model_comparison import Difference
from tasks.evaluation.statistics import PairedDifference

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
    assert len(verdict.reasons) == 1 and verdict.reasons[0].startswith("words/exact must not be worse")


def test_a_reason_has_the_figures_and_the_rule() -> None:
    verdict = judge(GateConfig(), [cell("sums/exact", -0.2, 0.1), cell("words/exact", 0.0, 0.1)], CELLS)
    assert verdict.reasons == (
        "sums/exact must not be worse by more than 0.05: -0.050 (95 % CI -0.200 to +0.100, n=20), failed",
        "sums/exact must be better: -0.050 (95 % CI -0.200 to +0.100, n=20), failed",
    )
