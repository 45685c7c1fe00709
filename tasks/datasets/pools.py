"""Prompts by difficulty: an order that draws shares of easy, hard and unsolved prompts, by pass rates in the run.

A prompt is new until a step has measured its pass rate, the share of its completions whose reward is at least
`correct_from`. Then it is in one of three pools, in the order in which it was measured, and is drawn from there again
when its turn comes. A prompt that was solved `retire_after` times in a row is retired, and is new again `return_after`
steps later.

Nothing but the committed grades decides the pools: step k draws by the grades of the steps before k - max_staleness,
which every process of the run, and a fork, reads from the chain. A process that resumes reads the grades of each
earlier step once. In memory are 9 bytes per prompt, and about 150 bytes per prompt that was measured; a draw takes the
same time however many there are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import compress
from typing import NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from storage.serialization import Frozen
from tasks.datasets.errors import DatasetError
from tasks.datasets.order import DataCursor, DataOrder, owed_of, take_turns, whole_weights

EASY_FROM = 0.5
"""Pass rate from which a prompt is easy."""
POOLS = ("hard", "unsolved", "easy")
"""The pools of measured prompts, in the order in which they replace one that is empty."""


class PromptPools(Frozen):
    """The shares of a step's prompts by their latest pass rate in the run. New prompts have the rest."""

    easy: float = Field(0.1, ge=0, le=1)
    """Share of prompts with a pass rate of at least one half."""
    hard: float = Field(0.4, ge=0, le=1)
    """Share of prompts with a pass rate above 0 and below one half."""
    unsolved: float = Field(0.1, ge=0, le=1)
    """Share of prompts of which no completion passed."""
    correct_from: float = 1.0
    """A completion passes if its reward is at least this."""
    retire_after: int | None = Field(3, ge=1)
    """Number of steps in a row in which all completions of a prompt pass, after which it is not drawn any more. None:
    prompts are not retired."""
    return_after: int = Field(100, ge=1)
    """Number of steps after which a retired prompt is new again. It is retired again if it is solved once more."""

    @model_validator(mode="after")
    def _shares_of_one(self) -> Self:
        total = self.easy + self.hard + self.unsolved
        if total > 1 + 1e-9:
            raise ValueError(
                f"easy={self.easy}, hard={self.hard} and unsolved={self.unsolved} are {total:g} together; give shares "
                "of at most 1, of which new prompts get the rest"
            )
        return self

    @property
    def shares(self) -> dict[str, float]:
        return {
            "hard": self.hard, "unsolved": self.unsolved, "easy": self.easy,
            "new": max(0.0, 1 - self.easy - self.hard - self.unsolved),
        }  # fmt: skip


class MeasuredPrompts(NamedTuple):
    """The prompts of a committed step."""

    rows: list[int]
    """Their rows in the dataset, in the order in which they were drawn."""
    pass_rates: list[float | None]
    """None: no completion of the prompt got a grade."""


ReadStep = Callable[[int], MeasuredPrompts]
"""Returns the prompts of the committed 0-based step."""


READ_AHEAD = 16
"""Steps whose grades are read at a time when a run resumes: each takes several requests to the store."""


def _read_ahead(read: ReadStep, steps: range) -> dict[int, MeasuredPrompts]:
    """The prompts of these steps. Several are read at a time."""
    if len(steps) == 1:
        return {steps[0]: read(steps[0])}
    with ThreadPoolExecutor(READ_AHEAD) as pool:
        return dict(zip(steps, pool.map(read, steps), strict=True))


class PoolOrder:
    """Draws prompts from pools. The rows of `order` are new in its first epoch's order.

    It has a state, which `catch_up` brings to a step. Call it before the draws of each step, in the order of the steps.
    """

    def __init__(self, order: DataOrder, pools: PromptPools) -> None:
        self.rows, self.settings = order.rows, pools
        self._order = order
        shares = pools.shares
        self._names = tuple(shares)
        self._weights = whole_weights(list(shares.values()))
        # rows that were never drawn: the part of this order from `_next_new` on that is not in `_is_drawn`
        self._new_rows = np.asarray(order.epoch_order(0))
        self._next_new = 0
        self._is_drawn = np.zeros(order.table_rows or order.rows, dtype=bool)
        self._is_in_order = np.zeros(len(self._is_drawn), dtype=bool)
        self._is_in_order[self._new_rows] = True
        # ordered dictionaries as queues from which a row can be removed; the rows that are being sampled are in none
        self._queues: dict[str, OrderedDict[int, None]] = {name: OrderedDict() for name in (*POOLS, "again")}
        self._retired: OrderedDict[int, int] = OrderedDict()
        """Retired rows, with the step in which each returns. Those that return first come first."""
        self._pool_of: dict[int, str] = {}
        """The pool of the last measurement of a row."""
        self._solved: dict[int, int] = {}
        """How often in a row it was solved, if it was solved last."""
        self._drawn_steps = self._measured_steps = 0

    def only(self, rows: Sequence[int] | np.ndarray) -> PoolOrder:
        """Return this order without the row indices that are not in `rows`. Not to be called after a draw."""
        return PoolOrder(self._order.only(rows), self.settings)

    def catch_up(self, step: int, staleness: int, read: ReadStep) -> None:
        """Prepare the draws of the 0-based `step`: apply the draws of the steps before, and the grades of those whose
        policies are at least `staleness` steps older."""
        prompts: dict[int, MeasuredPrompts] = {}
        # a process that resumes has all earlier steps on the chain; later, only those that it samples from
        committed = step if self._drawn_steps < step else step - staleness

        def prompts_of(number: int) -> MeasuredPrompts:
            if number not in prompts:
                measured = _read_ahead(read, range(number, min(committed, number + READ_AHEAD)))
                prompts.update((step, self._in_order(of_step)) for step, of_step in measured.items())
            return prompts[number]

        # the steps that an earlier process drew, in its order: the grades that it knew, and then its draw
        while self._drawn_steps < step:
            self._measure(self._drawn_steps - staleness, prompts_of)
            for row in prompts_of(self._drawn_steps).rows:
                self._remove(row)
            self._drawn_steps += 1
            prompts.pop(self._measured_steps - 1, None)
        self._measure(step - staleness, prompts_of)
        self._drawn_steps = step + 1

    def _in_order(self, measured: MeasuredPrompts) -> MeasuredPrompts:
        """The prompts without rows that this order leaves out, which the run that a fork was made from may have."""
        known = [row < len(self._is_in_order) and bool(self._is_in_order[row]) for row in measured.rows]
        return MeasuredPrompts(list(compress(measured.rows, known)), list(compress(measured.pass_rates, known)))

    def take(self, cursor: DataCursor, n: int) -> tuple[list[int], DataCursor]:
        """Return the next `n` row indices and the cursor after them. A row is not drawn again until it is measured.

        Raises DatasetError if fewer rows are left than `n`."""
        numbers = cursor.model_extra or {}
        owed = owed_of(numbers, self._names, self._weights)
        chosen, owed = take_turns(owed, self._weights, n)
        taken = [self._draw(self._names[number]) for number in chosen]
        epoch, index = divmod(cursor.epoch * self.rows + cursor.index + n, self.rows)
        further = {f"owed_{name}": behind for name, behind in zip(self._names, owed, strict=True)}
        if self._order.leaves_out_rows:
            further["rows"] = self.rows
        return taken, DataCursor(epoch=epoch, index=index, weights=sum(self._weights), **further)

    def _draw(self, name: str) -> int:
        """The next row of this pool. An empty pool is replaced by new rows, then by the pools that have a share, and
        only then by the others and by retired rows."""
        shares = self.settings.shares
        others = sorted(POOLS, key=lambda pool: shares[pool] == 0)
        for pool in dict.fromkeys((name, "new", *others)):
            row = self._next_of(pool)
            if row is not None:
                break
        else:
            if not self._retired:
                raise DatasetError(
                    f"all {self.rows} prompts are being sampled, and order='pools' draws a prompt again only when its "
                    "completions are graded; give more prompts, or lower samples_per_batch (divided by "
                    "completions_per_sample), max_staleness or max_refill_rounds"
                )
            row, _ = self._retired.popitem(last=False)
        self._is_drawn[row] = True
        return row

    def _next_of(self, pool: str) -> int | None:
        """Takes the next row out of the pool. None: it is empty."""
        queue = self._queues["again" if pool == "new" else pool]
        if pool == "new":
            while self._next_new < len(self._new_rows):
                row = int(self._new_rows[self._next_new])
                self._next_new += 1
                if not self._is_drawn[row]:
                    return row
        return queue.popitem(last=False)[0] if queue else None

    def _remove(self, row: int) -> None:
        """Takes a row that was drawn out of wherever it is."""
        self._is_drawn[row] = True
        for queue in (*self._queues.values(), self._retired):
            queue.pop(row, None)  # type: ignore[attr-defined]

    def _measure(self, steps: int, prompts_of: ReadStep) -> None:
        """Puts the prompts of the steps before `steps` into their pools, and returns retired prompts."""
        while self._measured_steps < steps:
            step = self._measured_steps
            measured = prompts_of(step)
            for row, rate in zip(measured.rows, measured.pass_rates, strict=True):
                self._remove(row)
                self._put(row, rate, step)
            self._measured_steps += 1
            # the retired rows are in the order in which they return
            while self._retired and next(iter(self._retired.values())) <= self._measured_steps:
                self._queues["again"][self._retired.popitem(last=False)[0]] = None

    def _put(self, row: int, rate: float | None, step: int) -> None:
        if rate is None:
            # without a grade, the prompt stays where it was
            self._queues[self._pool_of.get(row, "again")][row] = None
            return
        solved = self._solved[row] = self._solved.get(row, 0) + 1 if rate == 1 else 0
        if not solved:
            del self._solved[row]
        self._pool_of[row] = "unsolved" if rate == 0 else "easy" if rate >= EASY_FROM else "hard"
        if self.settings.retire_after is not None and solved >= self.settings.retire_after:
            self._retired[row] = step + 1 + self.settings.return_after
        else:
            self._queues[self._pool_of[row]][row] = None
