"""Tests of order='pools': shares, the queues of the pools, retirement, and equal draws in every process."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from storage.store.artifacts import Provenance
from storage.store.objects import open_store
from tasks.datasets.errors import DatasetError
from tasks.datasets.load import load_dataset
from tasks.datasets.load_order import load_order
from tasks.datasets.order import DataCursor, same_in_each_epoch, shuffled
from tasks.datasets.pools import MeasuredPrompts, PoolOrder, PromptPools
from tasks.datasets.spec import FileDataset, HeldoutSource, MixturePart

PROVENANCE = Provenance(code_version="test", config_digest="0" * 64, seed=0)
Rate = Callable[[int, int], float | None]
"""(step, row) -> the pass rate."""


def draw(order: PoolOrder, rate: Rate, *, steps: int, size: int, staleness: int = 0, restart: int | None = None
         ) -> tuple[list[list[int]], DataCursor]:  # fmt: skip
    """The rows of each step. `restart`: the step before which another process goes on, with a new order."""
    drawn: list[list[int]] = []
    cursor = DataCursor()

    def read(step: int) -> MeasuredPrompts:
        return MeasuredPrompts(drawn[step], [rate(step, row) for row in drawn[step]])

    for step in range(steps):
        if step == restart:
            order = PoolOrder(order._order, order.settings)
        order.catch_up(step, staleness, read)
        rows, cursor = order.take(cursor, size)
        drawn.append(rows)
    return drawn, cursor


def in_file_order(rows: int, **settings: float | None) -> PoolOrder:
    return PoolOrder(same_in_each_epoch(range(rows)), PromptPools.model_validate(settings))


def test_shares_of_the_pools_by_hand() -> None:
    """Of 4 rows a step, 1 of each pool and 1 new. Row r has the rate 0, 0.25 or 0.75 for r % 3 = 0, 1, 2."""
    order = in_file_order(100, easy=0.25, hard=0.25, unsolved=0.25)
    drawn, cursor = draw(order, lambda step, row: (0.0, 0.25, 0.75)[row % 3], steps=4, size=4)
    # nothing is measured at first. Then the parts take turns: hard, unsolved, easy, new
    assert drawn == [[0, 1, 2, 3], [1, 0, 2, 4], [1, 3, 2, 5], [4, 0, 2, 6]]
    assert (cursor.epoch, cursor.index) == (0, 16)
    assert cursor.model_extra == {
        "weights": 4, "owed_hard": 0, "owed_unsolved": 0, "owed_easy": 0, "owed_new": 0
    }  # fmt: skip


def test_a_pool_without_a_share_is_drawn_only_when_nothing_else_is_left() -> None:
    """All prompts are unsolved, which have no share: each is drawn once before one is drawn again, in turn."""
    order = in_file_order(6, easy=0.5, hard=0.5, unsolved=0.0)
    drawn, _ = draw(order, lambda step, row: 0.0, steps=6, size=2)
    assert drawn == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3], [4, 5]]


def test_a_solved_prompt_is_retired_and_returns_and_is_retired_again_unless_it_fails() -> None:
    """Row 0 is solved but in step 9; the others never are. After steps 0 and 1 it is retired for three steps, after
    step 5 again. In step 9 it fails, so that it takes two solved steps, 11 and 12, to be retired."""
    order = in_file_order(3, easy=0.5, hard=0, unsolved=0.5, retire_after=2, return_after=3)
    drawn, _ = draw(order, lambda step, row: float(row == 0 and step != 9), steps=16, size=2)
    assert [step for step, rows in enumerate(drawn) if 0 in rows] == [0, 1, 5, 9, 11, 12]


def test_rows_of_a_shared_step_that_the_order_leaves_out_are_passed_over() -> None:
    """Row 2 is left out, and row 50 is not in the table; row 1 was unsolved and is drawn again before new rows."""
    order = in_file_order(6, easy=0.0, hard=0.0, unsolved=1.0).only([0, 1, 3, 4, 5])
    order.catch_up(1, 0, lambda step: MeasuredPrompts([2, 50, 1], [0.0, 0.0, 0.0]))
    assert order.take(DataCursor(), 3)[0] == [1, 0, 3]


def test_a_prompt_without_a_grade_stays_in_its_pool() -> None:
    """Only row 0 gets a grade, and only once: it stays hard. The others are new again, after those that never were."""
    order = in_file_order(4, easy=0, hard=0.5, unsolved=0.5)
    drawn, _ = draw(order, lambda step, row: 0.25 if step == 0 else None, steps=8, size=1)
    assert drawn == [[0], [1], [0], [2], [0], [3], [0], [1]]


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("restart", [1, 4, 9])
def test_another_process_draws_the_same_rows(staleness: int, restart: int) -> None:
    def rate(step: int, row: int) -> float | None:
        return random.Random(f"{step} {row}").choice([None, 0.0, 0.25, 0.5, 1.0, 1.0])

    settings = PromptPools(easy=0.2, hard=0.3, unsolved=0.2, retire_after=1, return_after=2)
    whole, cursor = draw(PoolOrder(shuffled(64, seed=1), settings), rate, steps=20, size=6, staleness=staleness)
    again = draw(
        PoolOrder(shuffled(64, seed=1), settings), rate, steps=20, size=6, staleness=staleness, restart=restart
    )
    assert again == (whole, cursor)
    # no row is drawn again before it is measured
    for step, rows in enumerate(whole):
        window = [row for drawn in whole[max(0, step - staleness) : step + 1] for row in drawn]
        assert len(set(window)) == len(window) and len(rows) == 6


def test_too_few_prompts_and_rows_that_are_left_out() -> None:
    with pytest.raises(DatasetError, match="all 3 prompts are being sampled, .* give more prompts, or lower samples_p"):
        draw(in_file_order(3), lambda step, row: 0.0, steps=1, size=4)
    order = in_file_order(10).only([7, 2, 5])
    rows, cursor = order.take(DataCursor(), 3)
    assert rows == [2, 5, 7] and cursor.model_extra is not None and cursor.model_extra["rows"] == 3
    assert (cursor.epoch, cursor.index) == (1, 0)


def test_a_million_prompts_take_no_longer_a_draw() -> None:
    order = PoolOrder(shuffled(1_000_000, seed=0), PromptPools())
    started = time.process_time()
    draw(order, lambda step, row: float(row % 4) / 4, steps=200, size=64)
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"order": "pools", "pools": {"easy": 0.6, "hard": 0.6}}, "give shares of at most 1, of which new prompts get"),
        ({"pools": {"easy": 0.6, "hard": 0.1}}, "pools act only with order='pools', and that is 'shuffled'; set it"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        FileDataset.model_validate({"path": "a.jsonl"} | settings)


def test_pools_are_for_prompts_of_one_dataset_to_train_on(tmp_path: Path) -> None:
    source = {"kind": "file", "path": str(tmp_path / "a.jsonl"), "order": "pools"}
    with pytest.raises(ValidationError, match="order='pools' in a mixture; a mixture has fixed shares"):
        MixturePart.model_validate({"dataset": source})
    heldout: TypeAdapter[object] = TypeAdapter(HeldoutSource)
    with pytest.raises(ValidationError, match="given order='pools' for a dataset to evaluate on"):
        heldout.validate_python(source)
    keep = {"column": "level", "max": 1.0}
    with pytest.raises(ValidationError, match="given keep for a dataset to evaluate on"):
        heldout.validate_python(source | {"order": "shuffled", "keep": keep})
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    store = open_store(f"file://{tmp_path}/store")
    with pytest.raises(DatasetError, match="order='pools' goes by the grades of completions"):
        load_dataset(store, FileDataset.model_validate(source), use="completion", provenance=PROVENANCE)


def test_keep_leaves_out_rows_by_a_number(tmp_path: Path) -> None:
    """Rows 0 to 9 have the level 0.0 to 0.9."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"prompt": "p{row}", "level": {row / 10}}}\n' for row in range(10)))
    store = open_store(f"file://{tmp_path}/store")

    def rows_of(**settings: object) -> list[int]:
        body = {"path": str(path), "metadata_columns": ["level"], "order": "file", **settings}
        data = load_dataset(store, FileDataset.model_validate(body), provenance=PROVENANCE)
        order = load_order(store, data, seed=0)
        rows, cursor = order.take(DataCursor(), order.rows)
        assert (cursor.model_extra or {}).get("rows", 10) == order.rows
        return rows

    assert rows_of(keep={"column": "level", "min": 0.2, "max": 0.5}) == [2, 3, 4, 5]
    assert rows_of(keep={"column": "level", "max": 0.15}) == [0, 1]
    assert rows_of(order="pools", keep={"column": "level", "min": 0.75}) != []
    assert sorted(rows_of(order="shuffled", keep={"column": "level", "min": 0.75})) == [8, 9]
    with pytest.raises(DatasetError, match="keep leaves out all 10 rows: the values of 'level' are from 0 to 0.9"):
        rows_of(keep={"column": "level", "min": 3})
    with pytest.raises(DatasetError, match=r"row 1 of .*a.jsonl: given metadata without 'other'; .* which keep filt"):
        rows_of(keep={"column": "other", "min": 3})
