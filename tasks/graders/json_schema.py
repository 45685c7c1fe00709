"""A grader that checks a completion against a JSON schema."""

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
    """1.0 for JSON (alone, or in one fenced block) that satisfies `schema`, `partial` for other JSON, else 0.0.

    Without `schema`, each row brings its own in metadata[schema_key], as an object or as text. Schemas are of draft
    2020-12 and are checked without the network: a `$ref` to another document is an error. NaN and an object with a
    repeated key are not JSON.
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
            raise ValueError(f"given a schema that is not a JSON schema: {error.message}") from error

    async def grade(self, thread: StringThread) -> Grade:
        validator = self._validator or self._validator_of_row(thread)
        value, problem = self._check(thread.last_content(), validator)
        return Grade(value=value, grader_key=self.grader_key, reasoning=problem)

    def _check(self, text: str, validator: Draft202012Validator) -> tuple[float, str | None]:
        """Return the grade of a text, and its first problem if it has one."""
        fenced = _FENCED.match(text)
        json_text = fenced[1] if fenced else text
        # Python's parser accepts NaN and repeated keys, which are not valid JSON.
        try:
            value = json.loads(json_text, parse_constant=_refuse_constant, object_pairs_hook=_object_of_unique_keys)
        except (ValueError, RecursionError) as error:
            return 0.0, f"not JSON: {error}"
        # The first problem is enough for the reasoning. Only a `$ref` that cannot be resolved is the schema's fault.
        try:
            problem = next(iter(validator.iter_errors(value)), None)
        except Unresolvable as error:
            raise GraderError(
                f"{self.grader_key!r}: the schema refers to another document, which is not loaded: {error}"
            ) from error
        if problem is None:
            return 1.0, None
        return self.partial, f"{problem.json_path}: {problem.message}"[:300]

    def _validator_of_row(self, thread: StringThread) -> Draft202012Validator:
        stored = from_metadata(thread, self.schema_key)
        try:
            schema = json.loads(stored) if isinstance(stored, str) else stored
            return _validator(schema)
        except (ValueError, RecursionError, SchemaError) as error:
            raise GraderError(f"metadata[{self.schema_key!r}] is not a JSON schema: {error}"[:300]) from error


def _validator(schema: Any) -> Draft202012Validator:
    Draft202012Validator.check_schema(schema)
    # An empty registry loads no other documents. The default one would fetch them from the network.
    return Draft202012Validator(schema, registry=Registry())  # type: ignore[call-arg]


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _object_of_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise ValueError(f"a key stands twice among {[key for key, _ in pairs]}")
    return unique
