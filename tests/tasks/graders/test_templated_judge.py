"""Tests of a judge with a custom template and a custom answer class."""

from typing import Any

import pytest
from pydantic import BaseModel

from engine.text.threads import StringThread
from tasks.graders.base import GraderError, IgnoreGradeException
from tasks.graders.spec import GraderSpecError, build, grader_spec
from tasks.graders.templated_judge import TemplatedPromptJudgeGrader
from tests.fixtures.judges import ScriptedJudge, in_order

THREAD = StringThread(
    turns=[("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")], metadata={"gold": "4"}
)


class Tone(BaseModel):
    polite: bool
    reasoning: str | None = None


async def test_the_template_sees_the_thread() -> None:
    template = (
        "{% for turn in turns %}{{ turn.role }}={{ turn.content }};{% endfor %}"
        "{{ prompt }}|{{ completion }}|{{ metadata.gold }}|{{ house }}|{{ schema }}"
    )
    judge = ScriptedJudge(in_order('{"score": 0.25, "reasoning": "meh"}'))
    grade = await TemplatedPromptJudgeGrader("t", judge, template, variables={"house": "ours"}).grade(THREAD)
    assert (grade.value, grade.reasoning) == (0.25, "meh")
    (prompt,) = judge.asked
    assert prompt.text.startswith("user=one;assistant=two;user=three;assistant=four;three|four|4|ours|{")
    assert '"score"' in prompt.text


@pytest.mark.parametrize(("answer", "value"), [('{"polite": true}', 1.0), ('{"polite": false}', 0.0)])
async def test_an_answer_of_ones_own(answer: str, value: float) -> None:
    judge = ScriptedJudge(in_order(answer))
    grader = TemplatedPromptJudgeGrader("t", judge, "{{ completion }}", Tone, score_field="polite")
    assert (await grader.grade(THREAD)).value == value


@pytest.mark.parametrize("answer", ['{"score": null}', '{"score": NaN}', '{"score": "high"}'])
async def test_no_score_is_ignored(answer: str) -> None:
    judge = ScriptedJudge(lambda _text: answer)
    with pytest.raises(IgnoreGradeException):
        await TemplatedPromptJudgeGrader("t", judge, "{{ completion }}").grade(THREAD)


@pytest.mark.parametrize("template", ["{{ metadata.nothing }}", "{{ unknown }}", "{{ ''.__class__.__mro__ }}"])
async def test_what_a_template_may_not_do(template: str) -> None:
    """A name that is not there would be an empty question; attributes of Python are out of reach."""
    with pytest.raises(GraderError, match="cannot be rendered"):
        await TemplatedPromptJudgeGrader("t", ScriptedJudge(in_order()), template).grade(THREAD)


def test_a_config_names_the_answer_by_path() -> None:
    arguments: dict[str, Any] = {
        "grader_key": "t", "model": "judge@1", "template": "{{ completion }}",
        "output_model": f"{__name__}:Tone", "score_field": "polite",
    }  # fmt: skip
    grader = build(grader_spec("tasks.graders.templated_judge:TemplatedPromptJudgeGrader", arguments))
    assert isinstance(grader, TemplatedPromptJudgeGrader) and grader.output_model is Tone
    for wrong in ({"output_model": "nowhere:Tone"}, {"score_field": "rude"}, {"template": "{% if %}"}):
        with pytest.raises(GraderSpecError):
            grader_spec("tasks.graders.templated_judge:TemplatedPromptJudgeGrader", arguments | wrong)
