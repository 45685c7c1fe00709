"""A judge with a custom prompt, a Jinja template, and a custom answer, a pydantic model."""

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
from tasks.graders.setting import Client

# The name, docstring and fields of the answer class are part of the JSON schema that judges are shown.


class ScoredAnswer(BaseModel):
    """What the judge answers unless another model is given."""

    reasoning: str = ""
    score: float | None
    """None: no opinion; the thread is left unscored."""


class TemplatedPromptJudgeGrader(JudgeGrader):
    """Asks a judge with a rendered template. The grade is the field `score_field` of the answer: a number or a boolean.

    The template may use `turns` (each with `role` and `content`), `prompt` (the text of the last user turn),
    `completion` (the text of the last turn), `metadata`, `schema` (the JSON schema of the answer, as text) and the
    names in `variables`. Any other name is an error.

    output_model: a pydantic class or, in a config, its import path, package.module:Class. A score of None leaves the
        thread unscored.
    """

    def __init__(  # noqa: PLR0913  one keyword per setting
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
        lenient: bool = False,
        client: Client | None = None,
    ) -> None:
        super().__init__(
            grader_key, model, temperature=temperature, max_judge_tokens=max_judge_tokens, lenient=lenient,
            client=client,
        )  # fmt: skip
        # The form of the answer.
        self.output_model = _imported(output_model) if isinstance(output_model, str) else output_model
        if score_field not in self.output_model.model_fields:
            known = ", ".join(self.output_model.model_fields)
            raise ValueError(f"given score_field={score_field!r}; expected a field of the answer: {known}")
        self.score_field, self.variables = score_field, dict(variables or {})

        # The prompt. A sandbox runs the template, which may come from a shared config.
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
        try:
            self.template = environment.from_string(template)
        except TemplateError as error:
            raise ValueError(f"grader {grader_key!r}: the template is not valid Jinja: {error}") from error

    async def grade(self, thread: StringThread) -> Grade:
        answer = await self.ask(StringThread().user(self.prompt(thread)), self.output_model)
        fields = dict(answer)
        score = fields[self.score_field]
        # Without a finite score there is no grade: a default could be a wrong reward.
        if score is None:
            raise IgnoreGradeException(f"{self.grader_key}: the judge gave no score")
        value = as_number(score)
        if not math.isfinite(value):
            raise IgnoreGradeException(f"{self.grader_key}: the judge scored {value}")
        reasoning = fields.get("reasoning")
        return Grade(value=value, grader_key=self.grader_key, reasoning=str(reasoning) if reasoning else None)

    def prompt(self, thread: StringThread) -> str:
        """The rendered template. Raises GraderError if it cannot be rendered for this thread."""
        questions = [turn.text for turn in thread.turns if turn.role == "user"]
        values = self.variables | {
            "turns": [{"role": turn.role, "content": turn.text_with_calls} for turn in thread.turns],
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
        output_model = reduce(getattr, name.split("."), import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"given output_model={path!r}; expected package.module:Class ({error})") from error
    if not (isinstance(output_model, type) and issubclass(output_model, BaseModel)):
        raise ValueError(f"given output_model={path!r}, a {type(output_model).__name__}; expected a pydantic model")
    return output_model
