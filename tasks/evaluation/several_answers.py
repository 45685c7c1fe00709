"""Scores of a prompt that has several answers: pass@k and the majority vote, besides the mean reward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import comb
from statistics import fmean
from typing import NamedTuple

from storage.serialization import Frozen

PASS_AT = " pass@"
"""Between the grader's name and k in the name of a score."""


class GradedAnswer(NamedTuple):
    """An answer that has a grade."""

    reward: float
    extracted: str | None = None
    """The answer that the grader found in the text. None: it found none, or it does not extract answers."""
    text: str = ""


class AnswerScores(Frozen):
    """The scores of several answers that an evaluation computes. Each is a score of its own in tables."""

    pass_at: tuple[int, ...] = ()
    majority_vote: bool = False
    correct_from: float = 1.0

    def names(self, grader: str) -> list[str]:
        """The names of the scores of a grader, in place of the grader's own name in tables."""
        names = [f"{grader}{PASS_AT}{k}" for k in self.pass_at]
        return [*names, f"{grader} majority"] if self.majority_vote else names

    def values(self, answers: Sequence[GradedAnswer]) -> list[float | None]:
        """The scores of one prompt, in the order of `names`. None: the prompt has too few graded answers."""
        correct = sum(answer.reward >= self.correct_from for answer in answers)
        values = [pass_at_k(len(answers), correct, k) if k <= len(answers) else None for k in self.pass_at]
        if self.majority_vote:
            values.append(majority_reward(answers) if answers else None)
        return values


def pass_at_k(answers: int, correct: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k): the probability that at least one of k of the n answers is correct, if c are correct and
    the k are drawn without replacement. Unbiased for fresh answers (arXiv:2107.03374, equation 1).

    Raises ValueError for k > n, which has no such estimate.
    """
    if not 1 <= k <= answers or not 0 <= correct <= answers:
        raise ValueError(f"given n={answers}, c={correct}, k={k}; expected 1 <= k <= n and 0 <= c <= n")
    return 1 - comb(answers - correct, k) / comb(answers, k)


def majority_reward(answers: Sequence[GradedAnswer]) -> float:
    """The reward of the answer that most of the graded answers give (self-consistency, arXiv:2203.11171).

    The votes are the answers that the grader extracted; answers in which it found none do not vote. If it found none in
    any of them, the texts vote. Equal votes may have different rewards, for instance for their form: their mean counts.
    Among tied answers, the result is the expected reward of one that is drawn at random.
    """
    extracted = [answer for answer in answers if answer.extracted is not None]
    rewards_of: dict[str | None, list[float]] = defaultdict(list)
    for answer in extracted or answers:
        rewards_of[answer.extracted if extracted else answer.text].append(answer.reward)
    most_votes = max(map(len, rewards_of.values()))
    return fmean(fmean(rewards) for rewards in rewards_of.values() if len(rewards) == most_votes)
