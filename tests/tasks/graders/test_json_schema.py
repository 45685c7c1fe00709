"""Tests of the grader of JSON against a schema."""

from typing import Any

import pytest

from engine.text.threads import StringThread
from tasks.graders.base import GraderError
from tasks.graders.json_schema import JsonSchemaMatch

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


def completed(text: str, **metadata: Any) -> StringThread:
    return StringThread(turns=[("user", "q"), ("assistant", text)], metadata=metadata)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"name": "Ada", "age": 36}', 1.0),
        ('\n```json\n{"name": "Ada"}\n```\n', 1.0),
        ('```\n{"name": "Ada"}\n```', 1.0),
        ('{"age": 36}', 0.25),
        ('{"name": "Ada", "age": -1}', 0.25),
        ('{"name": "Ada", "born": 1815}', 0.25),
        ("[]", 0.25),
        ('Here: {"name": "Ada"}', 0.0),
        ('{"name": "Ada"} {"name": "Bo"}', 0.0),
        ('{"name": "Ada", "name": "Bo"}', 0.0),
        ('{"name": "Ada", "age": NaN}', 0.0),
        ("{'name': 'Ada'}", 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
    ],
)
async def test_values(text: str, value: float) -> None:
    grade = await JsonSchemaMatch(schema=PERSON, partial=0.25).grade(completed(text))
    assert grade.value == value and (grade.reasoning is None) == (value == 1.0)


async def test_the_row_brings_its_schema() -> None:
    for schema in ({"type": "integer"}, '{"type": "integer"}'):
        assert (await JsonSchemaMatch().grade(completed("4", schema=schema))).value == 1.0
        assert (await JsonSchemaMatch().grade(completed('"4"', schema=schema))).value == 0.0
    for schema in (None, "not JSON", {"type": "whole"}, 5000 * "[", 5000 * "7"):
        with pytest.raises(GraderError):
            await JsonSchemaMatch().grade(completed("4", schema=schema))


async def test_nothing_is_fetched_for_a_schema() -> None:
    schema = {"$ref": "http://127.0.0.1:9/schema.json"}
    with pytest.raises(GraderError, match="refers to another document"):
        await JsonSchemaMatch(schema=schema).grade(completed("4"))
    inside = {"$defs": {"whole": {"type": "integer"}}, "$ref": "#/$defs/whole"}
    assert (await JsonSchemaMatch(schema=inside).grade(completed("4"))).value == 1.0


def test_a_schema_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="a schema that is not a JSON schema"):
        JsonSchemaMatch(schema={"type": "whole"})
