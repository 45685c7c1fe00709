"""Whether a challenger may take the champion's place: not worse anywhere, better on the target, beyond chance.

Both rules look at the lower end of the 95 % interval of the paired difference (challenger - champion), never at the
difference alone: what a lucky draw could have made does not pass. Intervals are per cell of the suite and not widened
for their number.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from storage.serialization import Frozen
from tasks.evaluation.model_comparison import Difference


class GateConfig(Frozen):
    """When a challenger is promoted. Figures are in units of the rewards."""

    target: str = ""
    """The `dataset/grader` that it must be better on. Empty: the suite's first dataset and first grader."""
    better_by: float = Field(0.0, ge=0)
    """On the target: the lower end of the interval of the difference lies above this."""
    not_worse_by: float = Field(0.05, ge=0)
    """On everything of the suite: the lower end of the interval of the difference is at least minus this."""
    first_must_pass: bool = False
    """Whether the first model of a name must pass too, against the model it was trained from. False: it is promoted,
    since there is nobody to be better than."""


class Check(Frozen):
    """One rule on one cell."""

    cell: str
    rule: str
    difference: float | None
    low: float | None
    """Lower end of the interval; None: nothing is known with confidence."""
    high: float | None
    prompts: int
    passed: bool

    @property
    def said(self) -> str:
        """The check as a sentence."""
        if self.difference is None:
            figures = "no prompt has a grade of both models"
        elif self.low is None or self.high is None:
            figures = f"{self.difference:+.3f} on {self.prompts} prompt, which has no interval"
        else:
            figures = f"{self.difference:+.3f} (95 % CI {self.low:+.3f} to {self.high:+.3f}, n={self.prompts})"
        return f"{self.cell} must {self.rule}: {figures}, {'passed' if self.passed else 'failed'}"


class Verdict(Frozen):
    """What the gate says."""

    passed: bool
    checks: tuple[Check, ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Every check when it passed, those that failed when not."""
        return tuple(check.said for check in self.checks if self.passed or not check.passed)


def judge(gate: GateConfig, differences: Sequence[Difference], cells: Sequence[str]) -> Verdict:
    """The verdict on a challenger, `second` of each difference, over every cell of the suite.

    A cell without a difference fails. Raises ValueError when the target is none of the cells.
    """
    target = checked_target(gate, cells)
    found = {difference.cell: difference for difference in differences}
    checks = [_check(cell, found.get(cell), floor=-gate.not_worse_by, strict=False) for cell in cells]
    checks.append(_check(target, found.get(target), floor=gate.better_by, strict=True))
    return Verdict(passed=all(check.passed for check in checks), checks=tuple(checks))


def checked_target(gate: GateConfig, cells: Sequence[str]) -> str:
    """The target. Raises ValueError when the suite has no such cell."""
    target = gate.target or cells[0]
    if target not in cells:
        raise ValueError(f"gate.target={target!r} is nothing that the suite grades; it has {', '.join(cells)}")
    return target


def _check(cell: str, difference: Difference | None, *, floor: float, strict: bool) -> Check:
    paired = difference.paired if difference else None
    low = paired.low if paired else None
    passed = low is not None and (low > floor if strict else low >= floor)
    better = f"be better by more than {floor:g}" if floor else "be better"
    return Check(
        cell=cell,
        rule=better if strict else f"not be worse by more than {-floor:g}",
        difference=paired.difference if paired else None,
        low=low,
        high=paired.high if paired else None,
        prompts=paired.n if paired else 0,
        passed=passed,
    )
