"""Tests of reasoning-gym as an environment, with one answer or with several."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.text.threads import StringThread
from tasks.datasets.gym import generate_threads
from tasks.datasets.spec import ReasoningGymDataset
from tasks.environments.gym import ReasoningGymFactory
from tasks.environments.spec import EnvironmentSpecError, environment_spec

pytest.importorskip("reasoning_gym")


@pytest.fixture(scope="module")
def question() -> StringThread:
    """A sum, with its answer in the metadata."""
    (thread,) = generate_threads(ReasoningGymDataset(name="chain_sum", size=1, seed=3))
    return thread


def play(question: StringThread, answers: list[str], **arguments: Any) -> tuple[list[Any], StringThread]:
    environment = ReasoningGymFactory(**arguments).create_environment(question.metadata)
    reactions, thread = [], question
    for answer in answers:
        thread = thread.assistant(answer)
        reactions.append(asyncio.run(environment.react_to(thread)))
        thread = reactions[-1][0] or thread
    return reactions, thread


def test_a_single_answer_is_graded_and_ends_it(question: StringThread) -> None:
    right = str(question.metadata["answer"])
    assert play(question, [f"It is {right}."])[0] == [(None, 1.0)]
    (ending, grade), = play(question, ["It is -99999."], exact=True)[0]
    assert (ending, grade) == (None, 0.0)


def test_a_wrong_answer_may_be_guessed_again_and_only_the_last_is_graded(question: StringThread) -> None:
    right = str(question.metadata["answer"])
    reactions, _ = play(question, ["-99999", right], attempts=3, discount=0.5, exact=True)
    (following, first), (ending, second) = reactions
    assert first is None and following.last_content() == "That is not right. Try again."
    assert ending is None and second == 0.5
    reactions, _ = play(question, ["-9"] * 3, attempts=3, exact=True)
    assert [grade for _, grade in reactions] == [None, None, 0.0]


def test_an_episode_that_a_limit_ends_has_a_grade_too(question: StringThread) -> None:
    environment = ReasoningGymFactory(attempts=3, exact=True).create_environment(question.metadata)
    thread = question.assistant("-99999")
    assert asyncio.run(environment.react_to(thread))[1] is None
    assert asyncio.run(environment.on_limit(thread, "turns")) == 0.0


def test_it_is_an_environment_by_path() -> None:
    environment_spec("tasks.environments.gym:ReasoningGymFactory", {"attempts": 2})
    with pytest.raises(EnvironmentSpecError, match="attempts=0"):
        environment_spec("tasks.environments.gym:ReasoningGymFactory", {"attempts": 0})
