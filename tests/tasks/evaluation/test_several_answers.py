"""Tests of pass@k and the majority vote, from hand computation."""

from __future__ import annotations

from itertools import combinations

import pytest

from tasks.evaluation.several_answers import AnswerScores, GradedAnswer, majority_reward, pass_at_k


@pytest.mark.parametrize(
    ("answers", "correct", "k", "expected"),
    [
        (4, 2, 1, 0.5),  # c / n
        (4, 2, 2, 5 / 6),  # of 6 pairs, one has no correct answer
        (4, 2, 3, 1.0),  # three of four hold one of the two correct ones
        (5, 0, 3, 0.0),
        (5, 5, 1, 1.0),
        (5, 1, 5, 1.0),
        (2000, 1, 1000, 0.5),  # binomials beyond the range of floats
    ],
)
def test_pass_at_k_is_the_estimator_of_chen_et_al(answers: int, correct: int, k: int, expected: float) -> None:
    assert pass_at_k(answers, correct, k) == pytest.approx(expected)


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_answer() -> None:
    rewards = [1, 0, 0, 1, 0, 0, 0]
    for k in range(1, 8):
        subsets = list(combinations(rewards, k))
        assert pass_at_k(7, 2, k) == pytest.approx(sum(any(subset) for subset in subsets) / len(subsets))


@pytest.mark.parametrize(("answers", "correct", "k"), [(2, 1, 3), (2, 3, 1), (2, 1, 0)])
def test_pass_at_k_of_too_few_answers_is_refused(answers: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match="expected 1 <= k <= n"):
        pass_at_k(answers, correct, k)


def answer(extracted: str | None, reward: float, text: str = "") -> GradedAnswer:
    return GradedAnswer(reward, extracted, text)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([answer("4", 1.0), answer("4", 1.0), answer("5", 0.0)], 1.0),
        ([answer("4", 1.0), answer("5", 0.0), answer("5", 0.0)], 0.0),
        # two answers have two votes each, one of them is right
        ([answer("4", 1.0), answer("5", 0.0), answer("4", 1.0), answer("5", 0.0), answer("6", 0.0)], 0.5),
        # equal answers with different rewards count with their mean
        ([answer("4", 1.0), answer("4", 0.5), answer("5", 0.0)], 0.75),
        # an answer in which nothing was found does not vote, although there are more of them
        ([answer(None, 0.0, "?"), answer(None, 0.0, "?"), answer("4", 1.0)], 1.0),
        # nothing was found in any: the texts vote, and "a " is not "a"
        ([answer(None, 0.2, "a"), answer(None, 0.6, "b"), answer(None, 0.6, "b"), answer(None, 0.0, "a ")], 0.6),
        ([answer("7", 0.3)], 0.3),
    ],
)
def test_the_majority_has_the_reward_of_the_most_frequent_answer(
    answers: list[GradedAnswer], expected: float
) -> None:
    assert majority_reward(answers) == pytest.approx(expected)


def test_scores_have_a_value_per_name_and_none_where_answers_are_too_few() -> None:
    scores = AnswerScores(pass_at=(1, 3), majority_vote=True, correct_from=0.5)
    assert scores.names("reward") == ["reward pass@1", "reward pass@3", "reward majority"]
    assert scores.values([answer("4", 0.5), answer("5", 0.4)]) == [0.5, None, pytest.approx(0.45)]
    assert scores.values([]) == [None, None, None]
    assert AnswerScores().names("reward") == AnswerScores().values([answer("4", 1.0)]) == []
