"""Whether a completion is the JSON that was asked for."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from referencing import Registry
from referencing.exceptions import Unresolvable

from engine.text.threads import StringThread
from tasks.graders.base import BaseGrader, Grade, GraderError
from tasks.graders.rules import from_metadata

_FENCED = re.compile(r"\A\s*```(?:json)?\s*\n(.*?)\n?```\s*\Z", re.DOTALL | re.IGNORECASE)


class JsonSchemaMatch(BaseGrader):
    """1.0 if the completion is JSON (alone, or in one fenced block) that satisfies `schema`; `partial` if it is JSON
    that does not; else 0.0. Without `schema`, metadata[schema_key] holds it (an object, or its text).

    Schemas are of draft 2020-12, checked without the network: a `$ref` elsewhere is an error. NaN is not JSON, a key
    that stands twice neither.
    """

    def __init__(
        self,
        grader_key: str = "json_schema",
        *,
        schema: dict[str, Any] | None = None,
        schema_key: str = "schema",
        partial: float = 0.0,
    ) -> None:
        super().__init__(grader_key)
        if not math.isfinite(partial):
            raise ValueError(f"given partial={partial}; expected a finite number")
        self.schema_key, self.partial = schema_key, partial
        try:
            self._validator = _validator(schema) if schema is not None else None
        except SchemaError as error:
            raise ValueError(f"given a schema that is none: {error.message}") from error

    async def grade(self, thread: StringThread) -> Grade:
        validator = self._validator or self._of_row(thread)
        value, problem = self._judge(thread.last_content(), validator)
        return Grade(value=value, grader_key=self.grader_key, reasoning=problem)

    def _judge(self, text: str, validator: Draft202012Validator) -> tuple[float, str | None]:
        fenced = _FENCED.match(text)
        try:
            given = json.loads(fenced[1] if fenced else text, parse_constant=_refuse, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            return 0.0, f"not JSON: {error}"
        try:
            problem = next(iter(validator.iter_errors(given)), None)
        except Unresolvable as error:
            raise GraderError(f"{self.grader_key!r}: the schema refers to what it does not hold: {error}") from error
        if problem is None:
            return 1.0, None
        return self.partial, f"{problem.json_path}: {problem.message}"[:300]

    def _of_row(self, thread: StringThread) -> Draft202012Validator:
        stored = from_metadata(thread, self.schema_key)
        try:
            schema = json.loads(stored) if isinstance(stored, str) else stored
            return _validator(schema)
        except (ValueError, RecursionError, SchemaError) as error:
            raise GraderError(f"metadata[{self.schema_key!r}] is not a JSON schema: {error}"[:300]) from error


def _validator(schema: Any) -> Draft202012Validator:
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema, registry=Registry())  # type: ignore[call-arg]  # an empty one fetches nothing


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError(f"a key stands twice among {[key for key, _ in pairs]}")
    return dict(pairs)
