"""Tests of the faithfulness and relevancy judges: the parts that are judged, and the share that passes."""

import json
from collections.abc import Callable

import pytest

from engine.text.threads import StringThread
from tasks.graders.base import GraderError, IgnoreGradeException
from tasks.graders.judge_models import UnusableAnswer
from tasks.graders.retrieval_judges import (
    AnswerRelevancyGrader,
    ContextRelevancyGrader,
    FaithfulnessGrader,
    sentences,
)
from tests.fixtures.judges import ScriptedJudge

DOCUMENTS = ["The tower is 330 m high. It is in Paris.", "Lyon has {rivers}."]
REPLY = "The tower is 330 m high. It is in Paris. It was built in 1789."
THREAD = StringThread(
    turns=[("user", "Hello"), ("assistant", "Hi"), ("user", "How high is the tower?"), ("assistant", REPLY)],
    metadata={"documents": DOCUMENTS},
)


def verdicts(rule: Callable[[str], str | None]) -> ScriptedJudge:
    """Says what `rule` says of the part that stands between the last tags; None is no usable answer."""

    def answer(text: str) -> str:
        if "That answer cannot be used" in text:
            return "?"
        verdict = rule(text.rsplit("\n", 2)[-2])
        return "?" if verdict is None else json.dumps({"reasoning": "since", "verdict": verdict})

    return ScriptedJudge(answer)


async def test_faithfulness_is_the_share_of_supported_sentences() -> None:
    judge = verdicts(lambda part: "No" if "1789" in part else "Yes")
    grade = await FaithfulnessGrader("f", judge).grade(THREAD)
    assert grade.value == pytest.approx(2 / 3)
    assert grade.reasoning == "no to 'It was built in 1789.': since"
    assert len(judge.asked) == 3 and all(document in judge.asked[0].text for document in DOCUMENTS)


async def test_the_share_is_over_the_parts_that_were_judged() -> None:
    judge = verdicts(lambda part: "yes" if "330" in part else None if "Paris" in part else "no")
    assert (await FaithfulnessGrader("f", judge).grade(THREAD)).value == 0.5


async def test_no_usable_verdict_at_all_is_ignored() -> None:
    with pytest.raises(UnusableAnswer, match="any of 3 parts"):
        await FaithfulnessGrader("f", verdicts(lambda part: None)).grade(THREAD)


async def test_answer_relevancy_is_the_share_of_statements() -> None:
    def answer(text: str) -> str:
        if text.startswith("List the statements"):
            assert "How high is the tower?" in text and REPLY in text and "Hello" not in text
            return json.dumps({"statements": ["It is 330 m high.", "It is in Paris.", " ", "It is old.", "Old it is."]})
        return json.dumps({"verdict": "330" in text})

    judge = ScriptedJudge(answer)
    assert (await AnswerRelevancyGrader("a", judge).grade(THREAD)).value == 0.25
    assert len(judge.asked) == 1 + 4


async def test_context_relevancy_is_the_share_of_documents() -> None:
    judge = verdicts(lambda part: "yes" if "tower" in part else "no")
    assert (await ContextRelevancyGrader("c", judge).grade(THREAD)).value == 0.5
    assert all(REPLY not in asked.text for asked in judge.asked)


async def test_one_text_is_one_document_under_any_key() -> None:
    judge = verdicts(lambda part: "yes")
    thread = THREAD.with_metadata({"source": "The tower."})
    assert (await ContextRelevancyGrader("c", judge, documents_key="source").grade(thread)).value == 1.0
    assert len(judge.asked) == 1


async def test_nothing_to_judge_is_ignored_and_no_documents_is_an_error() -> None:
    judge = verdicts(lambda part: "yes")
    empty = StringThread(turns=[("user", "q"), ("assistant", " … ")], metadata={"documents": []})
    for grader in (FaithfulnessGrader("f", judge), ContextRelevancyGrader("c", judge)):
        with pytest.raises(IgnoreGradeException, match="nothing to judge"):
            await grader.grade(empty)
        with pytest.raises(GraderError, match="'documents'"):
            await grader.grade(empty.with_metadata({}))
        with pytest.raises(GraderError, match="a list of texts"):
            await grader.grade(empty.with_metadata({"documents": [1]}))
    with pytest.raises(GraderError, match="a user turn"):
        await AnswerRelevancyGrader("a", judge).grade(StringThread(turns=[("assistant", "x")]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("Pi is 3.14. See example.com for v1.2.3.", ["Pi is 3.14.", "See example.com for v1.2.3."]),
        ("- one\n- two\n\n---\n", ["- one", "- two"]),
        ('He said "No." Then he left.', ['He said "No."', "Then he left."]),
        ("Wait... what?", ["Wait...", "what?"]),
        ("", []),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    assert sentences(text) == expected
