"""Tests of the comparison of models, from rewards written by hand."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tasks.evaluation.model_comparison import (
    Comparison,
    compare,
    comparison_markdown,
    comparison_sentences,
    score_table,
)
from tasks.evaluation.statistics import mean_interval, paired_difference


def rows(model: str, rewards: dict[str, float | None], dataset: str = "sums") -> list[dict[str, Any]]:
    return [
        {
            "model": model, "dataset": dataset, "grader": "exact", "prompt_index": n, "prompt_id": prompt,
            "reward": reward, "graded": 0 if reward is None else 2, "completions": 2,
        }
        for n, (prompt, reward) in enumerate(rewards.items())
    ]  # fmt: skip


FIRST: dict[str, float | None] = {"a": 0.0, "b": 0.5, "c": 1.0, "d": None, "e": 0.5}
SECOND: dict[str, float | None] = {"b": 1.0, "a": 0.5, "c": 1.0, "d": 1.0, "e": None}


def test_a_difference_is_of_the_prompts_that_both_have_a_grade_for_in_pairs() -> None:
    (difference,) = compare(rows("m1", FIRST) + rows("m2", SECOND)).differences
    # a: +0.5, b: +0.5, c: 0; d and e have one grade only
    assert difference.paired == paired_difference([0.0, 0.5, 1.0], [0.5, 1.0, 1.0])
    assert (difference.first, difference.second, difference.cell) == ("m1", "m2", "sums/exact")
    assert difference.paired is not None
    assert difference.paired.difference == pytest.approx(1 / 3)
    # With a weight for -1 more, P(mean < c) = (c + 1)³ / (1.5 · 1.5 · 1) = 0.025 for c < 0.
    assert difference.paired.low == pytest.approx((0.025 * 2.25) ** (1 / 3) - 1, abs=1e-6)
    assert difference.verdict == "within chance"


def test_a_score_is_a_mean_over_prompts_and_counts_what_is_masked() -> None:
    score = compare(rows("m1", FIRST)).scores[0]
    expected = mean_interval([0.0, 0.5, 1.0, 0.5])
    assert (score.mean, score.low, score.high) == (expected.mean, expected.low, expected.high)
    assert (score.prompts, score.completions, score.masked) == (4, 10, 2)


@pytest.mark.parametrize("grader", ["exact", "exact pass@4"])
def test_the_interval_of_scores_between_0_and_1_stays_within_them(grader: str) -> None:
    values = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.5}
    (score,) = compare([row | {"grader": grader} for row in rows("m1", values)]).scores
    # With a weight for 1 more, P(mean < c) = P(weight of 0.5 > 2 (1 - c)) = (1 - 2 (1 - c))⁴ = 0.975.
    assert (score.mean, score.high) == (0.875, pytest.approx((1 + 0.975**0.25) / 2, abs=1e-6))
    none = compare([row | {"grader": grader} for row in rows("m1", dict.fromkeys("abcdefghijklmnopqrstuvwx", 0.0))])
    assert score_table(none)[0]["95 % interval"] == "0.000 to 0.142"  # 0 of 24: 1 - 0.025^(1/24)


def test_pass_at_k_of_too_few_answers_says_why_it_has_no_mean() -> None:
    comparison = compare([row | {"grader": "exact pass@16"} for row in rows("m1", {"a": None, "b": None})])
    assert score_table(comparison)[0]["95 % interval"] == "no prompt has 16 graded answers"
    assert compare(rows("m1", {"a": None})).scores[0].why_no_mean == "no grade"


def test_every_two_models_are_compared_in_their_order_in_every_cell() -> None:
    table = []
    for dataset, model in product(("sums", "words"), ("m2", "m1", "m3")):
        table += rows(model, {"a": 1.0, "b": 0.0}, dataset)
    comparison = compare(table)
    assert [(d.dataset, d.first, d.second) for d in comparison.differences] == [
        ("sums", "m2", "m1"), ("sums", "m2", "m3"), ("sums", "m1", "m3"),
        ("words", "m2", "m1"), ("words", "m2", "m3"), ("words", "m1", "m3"),
    ]  # fmt: skip
    assert len(comparison.scores) == 6
    assert [d.dataset for d in comparison.between("m2", "m3")] == ["sums", "words"]


def test_models_without_a_grade_in_common_are_not_compared() -> None:
    comparison = compare(rows("m1", {"a": 1.0, "b": None}) + rows("m2", {"a": None, "b": 1.0}))
    assert comparison.differences[0].paired is None and comparison.differences[0].verdict == "no prompt in common"
    assert "no prompt in common" in comparison_markdown(comparison)


def test_a_model_without_a_grade_has_no_mean() -> None:
    comparison = compare(rows("m1", {"a": None}))
    assert (comparison.scores[0].mean, comparison.scores[0].masked) == (None, 2)
    assert "| – | no grade | 0 |" in comparison_markdown(comparison)


def test_one_prompt_is_no_evidence() -> None:
    (difference,) = compare(rows("m1", {"a": 0.0}) + rows("m2", {"a": 1.0})).differences
    # (c + 1) / 2 = 0.025 at the lower end
    assert difference.paired is not None and difference.paired.low == pytest.approx(-0.95)
    assert difference.verdict == "within chance"


def test_a_clear_difference_says_its_direction() -> None:
    up = {"a": 1.0, "b": 1.0, "c": 0.9, "d": 1.0, "e": 1.0, "f": 1.0}
    down = {"a": 0.0, "b": 0.1, "c": 0.0, "d": 0.0, "e": 0.0, "f": 0.0}
    comparison = compare(rows("m1", up) + rows("m2", down))
    assert comparison.differences[0].verdict == "lower, beyond chance"
    assert "lower, beyond chance" in comparison_markdown(comparison)
    assert score_table(comparison)[0]["mean"] == pytest.approx(0.9833)


def test_a_sentence_has_both_means_and_the_certainty_of_their_difference() -> None:
    # on a, b and c: (0 + 0.5 + 1) / 3, (0.5 + 1 + 1) / 3; the lower end as above, the upper one 1 - (0.025 / 4)^(1/3)
    assert comparison_sentences(compare(rows("m1", FIRST) + rows("m2", SECOND))) == (
        "- **sums**, graded by **exact**: `m1` 0.500, `m2` 0.833, change +0.333 (95 % interval -0.617 to +0.816) "
        "on 3 prompts: within chance.\n"
    )
    nothing = compare(rows("m1", {"a": 1.0, "b": None}) + rows("m2", {"a": None, "b": 1.0}))
    assert comparison_sentences(nothing) == (
        "- **sums**, graded by **exact**: `m1` and `m2` have no prompt in common.\n"
    )


def test_a_comparison_survives_json() -> None:
    comparison = compare(rows("m1", FIRST) + rows("m2", SECOND))
    assert Comparison.model_validate_json(comparison.model_dump_json()) == comparison


def test_a_bar_in_a_name_does_not_break_the_table() -> None:
    assert "a\\|b" in comparison_markdown(compare(rows("a|b", {"x": 1.0})))
