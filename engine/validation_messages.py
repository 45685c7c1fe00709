"""Turns pydantic's validation errors into sentences for the person who wrote the value.

The sentences name fields as the document does, without the names of classes, validators and union branches.
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
"""Messages that replace pydantic's for some types of errors. The other types keep pydantic's message."""


def describe_errors(errors: Iterable[Mapping[str, Any]], document: Any = None) -> str:
    """One clause per field, such as "temperature=-1: should be greater than or equal to 0", joined by semicolons.

    `errors` are those of a ValidationError, `document` is what was validated. A clause shows the value of its field
    only if that is a number.
    """
    # Collect the distinct messages of each field: the branches of a union report one error each.
    messages: dict[str, list[str]] = defaultdict(list)
    for error in errors:
        field, message = _with_number(field_path(error, document), error), message_of(error)
        if message not in messages[field]:
            messages[field].append(message)

    # Write one clause per field.
    clauses = []
    for field, alternatives in messages.items():
        clause = " or ".join(alternatives)
        clauses.append(f"{field}: {clause}" if field else clause)
    text = "; ".join(clauses)[:MAX_CHARS]
    return text.encode("utf-8", "backslashreplace").decode()  # JSON can hold half of a surrogate pair


def field_path(error: Mapping[str, Any], document: Any) -> str:
    """The path of the field in the document, such as "messages.0.content"; empty for the whole document."""
    return ".".join(field_keys(error, document))


def field_keys(error: Mapping[str, Any], document: Any) -> list[str]:
    """The keys and indices that lead to the field in the document.

    Pydantic's location of an error also has names of classes, validators and branches of a union. Parts that the
    document does not have are left out, except a required field that is missing. Without a document, all parts stay."""
    if document is None:
        return [str(part) for part in error["loc"]]
    parts, value = [], document
    for part in error["loc"]:
        # A part that the document has is a key or an index. Any other part is a name of pydantic's.
        is_key = isinstance(value, Mapping) and part in value
        is_index = isinstance(value, list | tuple) and isinstance(part, int) and part < len(value)
        if is_key or is_index:
            value = value[part]
        elif error["type"] != "missing" or part != error["loc"][-1]:
            continue
        parts.append(str(part))
    return parts


def message_of(error: Mapping[str, Any]) -> str:
    """The message of the error, without the field's name."""
    if error["type"] in _MESSAGES:
        return _MESSAGES[error["type"]].format_map(error.get("ctx", {}))
    message: str = error["msg"]
    return message.removeprefix("Value error, ").replace("Input should", "should", 1)


def _with_number(path: str, error: Mapping[str, Any]) -> str:
    """The path and the value, such as "temperature=-1"; only the path if the value is not a short number."""
    # Other values could hold a token or a whole prompt, which must not appear in a message or a log.
    value = error.get("input")
    is_short = isinstance(value, float) or (
        isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**20
    )
    return f"{path}={value}" if path and is_short else path
