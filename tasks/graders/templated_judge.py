"""A judge with a prompt and an answer of one's own: a Jinja template and a Pydantic model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import reduce
from importlib import import_module
from typing import Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BaseModel

from engine.text.threads import StringThread
from tasks.graders.base import Grade, GraderError, IgnoreGradeException, as_number
from tasks.graders.judge_models import JudgeModel
from tasks.graders.judges import JudgeGrader
from tasks.graders.running.workspace import Client


class ScoredAnswer(BaseModel):
    """What the judge answers unless another model is given."""

    reasoning: str = ""
    score: float | None
    """None: no opinion; the thread is left unscored."""


class TemplatedPromptJudgeGrader(JudgeGrader):
    """The judge's answer to a rendered template; the grade is its field `score_field` (a number, or true / false).

    The template sees `turns` (each with `role` and `content`), `prompt` (the text of the last user turn), `completion`
    (of the last turn), `metadata`, `schema` (the answer's JSON schema, as text) and `variables`' own names. A name that
    it uses and that is not there is an error.

    output_model: a Pydantic class, or "package.module:Class", by which a config can name it. A score of None: ignored.
    """

    def __init__(  # noqa: PLR0913  a constructor like a config
        self,
        grader_key: str,
        model: JudgeModel | str,
        template: str,
        output_model: type[BaseModel] | str = ScoredAnswer,
        *,
        score_field: str = "score",
        variables: Mapping[str, Any] | None = None,
        temperature: float = 0.0,
        max_judge_tokens: int = 1024,
        client: Client | None = None,
    ) -> None:
        super().__init__(
            grader_key, model, temperature=temperature, max_judge_tokens=max_judge_tokens, client=client
        )
        self.output_model = _imported(output_model) if isinstance(output_model, str) else output_model
        if score_field not in self.output_model.model_fields:
            known = ", ".join(self.output_model.model_fields)
            raise ValueError(f"given score_field={score_field!r}; expected a field of the answer: {known}")
        self.score_field, self.variables = score_field, dict(variables or {})
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
        try:
            self.template = environment.from_string(template)
        except TemplateError as error:
            raise ValueError(f"grader {grader_key!r}: the template is not Jinja: {error}") from error

    async def grade(self, thread: StringThread) -> Grade:
        answer = await self.ask(StringThread().user(self.prompt(thread)), self.output_model)
        fields = dict(answer)
        score = fields[self.score_field]
        if score is None:
            raise IgnoreGradeException(f"{self.grader_key}: the judge gave no score")
        value = as_number(score)
        if not math.isfinite(value):
            raise IgnoreGradeException(f"{self.grader_key}: the judge scored {value}")
        reasoning = fields.get("reasoning")
        return Grade(value=value, grader_key=self.grader_key, reasoning=str(reasoning) if reasoning else None)

    def prompt(self, thread: StringThread) -> str:
        """What the judge is asked. Raises GraderError when the template cannot be rendered for this thread."""
        questions = [turn.text for turn in thread.turns if turn.role == "user"]
        values = self.variables | {
            "turns": [{"role": turn.role, "content": turn.text} for turn in thread.turns],
            "prompt": questions[-1] if questions else "",
            "completion": thread.last_content(),
            "metadata": thread.metadata,
            "schema": json.dumps(self.output_model.model_json_schema()),
        }
        try:
            return self.template.render(values)
        except TemplateError as error:
            raise GraderError(f"the template of grader {self.grader_key!r} cannot be rendered: {error}") from error


def _imported(path: str) -> type[BaseModel]:
    module, _, name = path.partition(":")
    try:
        found = reduce(getattr, name.split("."), import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"given output_model={path!r}; expected package.module:Class ({error})") from error
    if not (isinstance(found, type) and issubclass(found, BaseModel)):
        raise ValueError(f"given output_model={path!r}, a {type(found).__name__}; expected a pydantic model")
    return found
