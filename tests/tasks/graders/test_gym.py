"""Tests of the grader of reasoning-gym answers."""

from decimal import Decimal
from typing import Any

import pytest

from engine.text.threads import StringThread
from tasks.datasets import gym
from tasks.datasets.spec import ReasoningGymDataset
from tasks.graders.gym import ReasoningGymGrader
from tasks.graders.running.grade_threads import grade_threads
from tasks.graders.spec import build, grader_spec


def prompts(name: str, size: int = 1, **config: Any) -> list[StringThread]:
    stored = [
        thread.to_json() for thread in gym.generate_threads(ReasoningGymDataset(name=name, size=size, config=config))
    ]
    return [StringThread.from_json(text) for text in stored]  # what a grader sees has been through the store


def answered(thread: StringThread, text: str) -> StringThread:
    return thread.assistant(text)


@pytest.mark.parametrize("name", ["chain_sum", "gcd", "products", "count_bits", "basic_arithmetic"])
@pytest.mark.parametrize(
    ("answer_from", "wrapping"),
    [("last_number", "Let me see: 17 and then {}."), ("whole", " {}\n"), ("answer_tag", "7 <answer>{}</answer> 8")],
)
async def test_every_stored_answer_scores_one(name: str, answer_from: str, wrapping: str) -> None:
    threads = [answered(thread, wrapping.format(thread.metadata["answer"])) for thread in prompts(name, 40)]
    grader = build(grader_spec("tasks.graders.gym:ReasoningGymGrader", {"answer_from": answer_from}))
    outcomes = await grade_threads(grader, threads)
    assert [outcome.reward for outcome in outcomes] == [1.0] * 40


@pytest.mark.parametrize("name", ["chain_sum", "gcd", "products", "count_bits", "basic_arithmetic"])
async def test_a_wrong_answer_scores_zero_when_exact(name: str) -> None:
    threads = [answered(t, str(int(t.metadata["answer"]) + 1)) for t in prompts(name, 10)]
    outcomes = await grade_threads(ReasoningGymGrader(exact=True), threads)
    assert [outcome.reward for outcome in outcomes] == [0.0] * 10


async def test_partial_credit_is_the_verifiers_unless_exact() -> None:
    (thread,) = prompts("count_bits", min_n=4, max_n=5)
    text = f"3{thread.metadata['answer']}"  # the verifier gives the share of its characters that are the answer's
    assert (await ReasoningGymGrader().grade(answered(thread, text))).value == 0.5
    assert (await ReasoningGymGrader(exact=True).grade(answered(thread, text))).value == 0.0


async def test_no_answer_is_zero_and_says_so() -> None:
    (thread,) = prompts("gcd")
    grade = await ReasoningGymGrader().grade(answered(thread, "I do not know."))
    assert grade.value == 0.0 and grade.reasoning == "no answer in the completion"


async def test_the_one_verifier_that_raises_on_garbage_means_no_valid_answer() -> None:
    (thread,) = prompts("prime_factorization")
    garbage, right = answered(thread, "seven"), answered(thread, thread.metadata["answer"])
    outcomes = await grade_threads(ReasoningGymGrader(answer_from="whole"), [garbage, right])
    assert [outcome.reward for outcome in outcomes] == [0.0, 1.0]


async def test_any_other_exception_of_a_verifier_is_masked() -> None:
    (thread,) = prompts("gcd")
    source = dict(thread.metadata["reasoning_gym"])
    broken = StringThread(
        turns=[("user", "q"), ("assistant", "5")],
        metadata={"reasoning_gym": source | {"entry": {"question": "q"}}},
    )
    no_source = StringThread(turns=[("user", "q"), ("assistant", "5")], metadata={})
    outcomes = await grade_threads(ReasoningGymGrader(), [broken, no_source], retries=0)
    assert [outcome.status for outcome in outcomes] == ["masked", "masked"]
    assert "KeyError" in outcomes[0].reason and "expected rows of a ReasoningGymDataset" in outcomes[1].reason


async def test_the_verifier_sees_the_rows_config() -> None:
    """decimal_arithmetic allows one unit in the last place that its config says: the 2nd here, the 6th by default."""
    (thread,) = prompts("decimal_arithmetic", min_num_decimal_places=2, max_num_decimal_places=2)
    nearly = answered(thread, str(Decimal(thread.metadata["answer"]) + Decimal("0.01")))
    assert (await ReasoningGymGrader().grade(nearly)).value == 1.0
    far = answered(thread, str(Decimal(thread.metadata["answer"]) + Decimal("0.02")))
    assert (await ReasoningGymGrader().grade(far)).value == 0.0
