"""Tests of the advantages per turn, against values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tasks.batches.columns import NotOneGrade
from tests.fixtures.episode_grades import grades_of

Played = tuple[str, int, list[int], dict[int, float]]


def trajectory(number: int, turns: int, grades: dict[int, float], prompt: str = "p") -> Played:
    return prompt, number, [1] * turns, grades


def step_advantages(
    played: list[Played], estimator: str, *, per_trajectory: bool = False
) -> dict[tuple[str, int], list[float]]:
    """(prompt, number) -> the advantage of each turn."""
    advantages = grades_of(played).advantages(estimator, per_trajectory=per_trajectory).tolist()
    return {(prompt, number): [advantages.pop(0) for _ in turns] for prompt, number, turns, _ in played}


def turn_advantages(grades: list[dict[int, float]], turns: list[int], estimator: str) -> list[list[float]]:
    """The advantage of each turn of the trajectories of one prompt."""
    played = [trajectory(number, *one) for number, one in enumerate(zip(turns, grades, strict=True))]
    return list(step_advantages(played, estimator).values())


def test_all_turns_of_a_group_are_normalised_together_and_summed_from_the_end() -> None:
    # grades 1, 0, 0, 3: mean 1, population variance (0 + 1 + 1 + 4)/4 = 1.5
    unit = 1 / math.sqrt(1.5)
    first, second = turn_advantages([{0: 1.0, 2: 0.0}, {0: 0.0, 1: 3.0}], [3, 2], "group")
    # normalised: first 0 at turn 0 and -unit at turn 2; second -unit and 2 unit
    assert first == pytest.approx([-unit, -unit, -unit])
    assert second == pytest.approx([unit, 2 * unit])


def test_a_turn_after_the_last_grade_has_none_of_it() -> None:
    first, second = turn_advantages([{0: 1.0}, {1: 0.0}], [3, 2], "group")
    assert first == pytest.approx([1.0, 0.0, 0.0])
    assert second == pytest.approx([-1.0, -1.0])


def test_one_grade_at_the_end_of_each_is_what_grpo_does() -> None:
    grades = [{2: 1.0}, {0: 0.0}, {1: 0.0}, {0: 0.0}]
    all_advantages = turn_advantages(grades, [3, 1, 2, 1], "group")
    assert all_advantages[0] == pytest.approx([1.7320508] * 3)
    for turns, advantages in zip((1, 2, 1), all_advantages[1:], strict=True):
        assert advantages == pytest.approx([-0.5773503] * turns)


@pytest.mark.parametrize(
    ("estimator", "expected"), [("centred", [0.75, -0.25]), ("leave_one_out", [1.0, -1 / 3])]
)
def test_the_estimator_is_grpos(estimator: str, expected: list[float]) -> None:
    advantages = turn_advantages([{0: 1.0}, {0: 0.0}, {0: 0.0}, {0: 0.0}], [1] * 4, estimator)
    assert [advantages[0][0], advantages[1][0]] == pytest.approx(expected)


def test_equal_grades_teach_exactly_nothing() -> None:
    assert turn_advantages([{0: 0.3, 1: 0.3}, {0: 0.3}], [2, 1], "group") == [[0.0, 0.0], [0.0]]


def test_groups_are_prompts_and_ungraded_trajectories_are_left_out() -> None:
    played = [
        trajectory(0, 1, {0: 1.0}, "a"), trajectory(0, 1, {0: 5.0}, "b"), trajectory(1, 1, {0: 0.0}, "a"),
        trajectory(2, 2, {}, "a"), trajectory(1, 1, {0: 7.0}, "b"),
    ]  # fmt: skip
    advantages = step_advantages(played, "group")
    # the third trajectory of a has no grade, so it has no row in the batch, whatever its advantage
    assert np.flatnonzero(np.isnan(grades_of(played).rewards_K)).tolist() == [3]
    assert advantages["a", 0] == pytest.approx([1.0]) and advantages["b", 0] == pytest.approx([-1.0])


def test_a_trajectory_as_a_whole_has_the_advantage_of_its_grade_at_every_turn() -> None:
    played = [trajectory(0, 3, {1: 1.0}), trajectory(1, 2, {1: 0.0})]
    advantages = step_advantages(played, "group", per_trajectory=True)
    assert advantages["p", 0] == pytest.approx([1.0] * 3)
    assert advantages["p", 1] == pytest.approx([-1.0] * 2)


@pytest.mark.parametrize(
    ("grades", "message"),
    [({0: 1.0, 1: 0.0}, r"grades at the turns \[0, 1\]"), ({}, "no grade .its ending: environment")],
)
def test_a_loss_over_sequences_needs_exactly_one_grade(grades: dict[int, float], message: str) -> None:
    with pytest.raises(NotOneGrade, match=f"episode 1 of prompt 'p' has {message}.*expects exactly one grade"):
        step_advantages([trajectory(0, 2, {1: 1.0}), trajectory(1, 2, grades)], "group", per_trajectory=True)
