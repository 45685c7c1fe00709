"""Turns errors of pydantic into sentences for the person who wrote the value: fields by their names in the document,
without the names of classes, validators and branches of a union.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

MAX_CHARS = 2000

_MESSAGES = {
    "missing": "is required",
    "extra_forbidden": "is not a known field; leave it out",
    "model_type": "should be an object",
    "model_attributes_type": "should be an object",
    "dict_type": "should be an object",
    "union_tag_invalid": "{discriminator} is '{tag}'; expected one of {expected_tags}",
    "union_tag_not_found": "{discriminator} is required",
    "json_invalid": "is not JSON: {error}",
}
"""By type of error; every other type keeps pydantic's message."""


def describe(errors: Iterable[Mapping[str, Any]], document: Any = None) -> str:
    """One clause per field, such as "temperature=-1: should be greater than or equal to 0", joined by semicolons.

    `errors` are those of a ValidationError, `document` is what was validated: parts of a location that it lacks are
    names of a union's branches and are left out. Only numbers of the document are quoted.
    """
    messages: dict[str, list[str]] = defaultdict(list)
    for error in errors:
        place, message = place_of(error, document), message_of(error)
        if message not in messages[_with_number(place, error)]:
            messages[_with_number(place, error)].append(message)
    clauses = [f"{place}: {' or '.join(found)}" if place else " or ".join(found) for place, found in messages.items()]
    text = "; ".join(clauses)[:MAX_CHARS]
    return text.encode("utf-8", "backslashreplace").decode()  # JSON can hold half of a surrogate pair


def place_of(error: Mapping[str, Any], document: Any) -> str:
    """The field in the document, such as "messages.0.content"; empty for the whole document."""
    if document is None:
        return ".".join(map(str, error["loc"]))
    parts, value = [], document
    for part in error["loc"]:
        is_key = isinstance(value, Mapping) and part in value
        is_index = isinstance(value, list | tuple) and isinstance(part, int) and part < len(value)
        if is_key or is_index:
            value = value[part]
        elif error["type"] != "missing" or part != error["loc"][-1]:
            continue
        parts.append(str(part))
    return ".".join(parts)


def message_of(error: Mapping[str, Any]) -> str:
    """What is wrong with the value."""
    if error["type"] in _MESSAGES:
        return _MESSAGES[error["type"]].format_map(error.get("ctx", {}))
    message: str = error["msg"]
    return message.removeprefix("Value error, ").replace("Input should", "should", 1)


def _with_number(place: str, error: Mapping[str, Any]) -> str:
    value = error.get("input")
    is_short = isinstance(value, float) or (
        isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**20
    )
    return f"{place}={value}" if place and is_short else place
