"""Decides whether a challenger may replace the champion: better on the target, and not worse anywhere else.

Both rules look at the lower end of the 95 % confidence interval of the paired difference (challenger - baseline), so
that a difference that may be due to chance does not pass: a challenger that is not better is promoted with probability
0.025 at most. Each cell (dataset/grader) of the suite has its own interval. The intervals are not widened for the
number of cells: a challenger must pass on all of them, so a further cell makes a wrong promotion rarer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from storage.serialization import Frozen
from tasks.evaluation.model_comparison import Difference


class GateConfig(Frozen):
    """When a challenger is promoted. Thresholds are in units of the rewards."""

    target: str = ""
    """The `dataset/grader` on which the challenger must be better. Empty: the first dataset and grader."""
    better_by: float = Field(0.0, ge=0)
    """Smallest improvement on the target: the lower end of the confidence interval must be above this value."""
    not_worse_by: float = Field(0.05, ge=0)
    """Largest decline on any dataset and grader: the lower end of the confidence interval must be at least minus this
    value. Few prompts cannot show that: for scores between 0 and 1, equal answers to at least 72 prompts are needed for
    0.05, and to 183 for 0.02."""
    first_champion: Literal["gate", "approval"] = "gate"
    """Who decides on a challenger while the name has no champion. It is compared with the newest published version of
    the name that the flow `recurring` did not train; without such a version, with the model it was trained from.
    gate: it is promoted if it passes. approval: a person is asked, whether it passes or not."""


class GateCheck(Frozen):
    """The result of one rule on one cell."""

    cell: str
    rule: str
    difference: float | None
    low: float | None
    """Lower end of the confidence interval. None if there is no interval."""
    high: float | None
    """Upper end of the confidence interval. None if there is no interval."""
    prompts: int
    passed: bool

    @property
    def sentence(self) -> str:
        """The check as a sentence."""
        if self.difference is None:
            figures = "no prompt has a grade of both models"
        elif self.low is None or self.high is None:
            figures = f"{self.difference:+.3f}, n={self.prompts}, without an interval"
        else:
            figures = f"{self.difference:+.3f} (95 % CI {self.low:+.3f} to {self.high:+.3f}, n={self.prompts})"
        return f"{self.cell} must {self.rule}: {figures}, {'passed' if self.passed else 'failed'}"


class GateVerdict(Frozen):
    """The result of the gate."""

    passed: bool
    checks: tuple[GateCheck, ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        """The sentences of all checks, the failed ones first."""
        return tuple(check.sentence for check in sorted(self.checks, key=lambda check: check.passed))


def judge(gate: GateConfig, differences: Sequence[Difference], cells: Sequence[str]) -> GateVerdict:
    """Judges a challenger, which is the `second` model of each difference, on every cell of the suite.

    A cell without a difference fails. Raises ValueError if the target is not one of the cells.
    """
    target = checked_target(gate, cells)
    by_cell = {difference.cell: difference for difference in differences}
    # not worse on any cell, and better on the target
    checks = [_check_not_worse(cell, by_cell.get(cell), gate.not_worse_by) for cell in cells]
    checks.append(_check_better(target, by_cell.get(target), gate.better_by))
    return GateVerdict(passed=all(check.passed for check in checks), checks=tuple(checks))


def checked_target(gate: GateConfig, cells: Sequence[str]) -> str:
    """Returns the target cell. Raises ValueError if the suite has no such cell."""
    target = gate.target or cells[0]
    if target not in cells:
        raise ValueError(f"gate.target={target!r} is not a dataset/grader of the suite, which has {', '.join(cells)}")
    return target


def _check_not_worse(cell: str, difference: Difference | None, margin: float) -> GateCheck:
    low = _lower_end(difference)
    passed = low is not None and low >= -margin
    return _check(cell, difference, rule=f"not be worse by more than {margin:g}", passed=passed)


def _check_better(cell: str, difference: Difference | None, margin: float) -> GateCheck:
    low = _lower_end(difference)
    passed = low is not None and low > margin
    rule = f"be better by more than {margin:g}" if margin else "be better"
    return _check(cell, difference, rule=rule, passed=passed)


def _lower_end(difference: Difference | None) -> float | None:
    """The lower end of the confidence interval, or None if it is not known."""
    if difference is None or difference.paired is None:
        return None
    return difference.paired.low


def _check(cell: str, difference: Difference | None, *, rule: str, passed: bool) -> GateCheck:
    # without a difference there are no figures, and the check has failed
    if difference is None or difference.paired is None:
        return GateCheck(cell=cell, rule=rule, difference=None, low=None, high=None, prompts=0, passed=passed)
    paired = difference.paired
    return GateCheck(
        cell=cell,
        rule=rule,
        difference=paired.difference,
        low=paired.low,
        high=paired.high,
        prompts=paired.n,
        passed=passed,
    )
