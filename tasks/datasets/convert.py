"""Converts one raw row (a dict of columns) to a thread. Every defect of a row is a BadRow that names the column.

Reading the rows from files is the job of `tasks.datasets.read`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.errors import TextError, ThreadError
from engine.text.fragments import ImageFragment, TextFragment, ToolCallFragment, ToolResponseFragment
from engine.text.images import embed_image
from engine.text.threads import StringThread
from storage.serialization import canonical_json
from tasks.batches.advantages import LARGEST_REWARD, REWARD_RANGE
from tasks.datasets.errors import BadRow
from tasks.datasets.layouts import (
    CONVERSATIONS,
    SHAREGPT_ROLES,
    RawTurn,
    rating_of_label,
    tools_of,
    turns_as_text,
    turns_with_calls,
    usual_message,
)

if TYPE_CHECKING:
    from tasks.datasets.load import DatasetUse
    from tasks.datasets.read import ColumnRole, RowsDataset

ROLES = ("system", "user", "assistant", "tool")
MAX_VALUE_LETTERS = 60
"""Length to which a value is cut in an error message."""


class RowLocation(NamedTuple):
    """The source of a row (a file, or the import path of a user's code) and the row's number, from 1."""

    source: str
    row: int

    def bad_row(self, column: str | None, *, given: str, expected: str, todo: str = "") -> BadRow:
        """The error for this row; `column` is None if the defect is in no single column."""
        return BadRow(self.source, self.row, column, given=given, expected=expected, todo=todo)


class Conversation(NamedTuple):
    """The checked content of a row whose thread is not built yet."""

    turns: list[RawTurn]
    metadata: dict[str, Any]
    first_trained_turn: int | None
    """Index of the first turn that can be trained. None for prompts, which have default weights."""
    tools: list[dict[str, Any]]
    """The tools that the assistant may call, in the format of OpenAI's API."""


def conversation_from_row(
    values: dict[str, Any], location: RowLocation, spec: RowsDataset, use: DatasetUse
) -> Conversation:
    """Read the turns and the metadata of a row. Raises BadRow.

    use prompt: the last turn must not be the assistant's. use completion: it must be, and the trained assistant turns
    have weight 1: those of the completion column or, in the messages layout, all assistant turns. use rating: as
    completion, and the metadata must have the number `res`.
    """
    has_answer = use in ("completion", "rating")
    metadata = metadata_of(values, location, spec)
    label = values.get(column_of("label", spec))
    if use == "rating" and label is not None:
        metadata.setdefault("res", rating_of_label(label))

    # Read the turns in the layout of the row, and note the first turn that can be trained.
    tools = row_tools(values, location, spec)
    if _layout(values, location, spec) == "messages":
        turns = turns_for(tools, _messages(values, messages_column(values, spec), location))
        first_trained_turn = 0
    else:
        prompt = prompt_turns(values, column_of("prompt", spec), location)
        turns = turns_for(tools, prompt)
        first_trained_turn = len(turns)
        if has_answer:
            answer = answer_turns(values, column_of("completion", spec), location)
            turns = turns_for(tools, prompt + answer)
    # Another turn at the beginning moves the first trained turn.
    if spec.system_prompt and turns[0][0] != "system":
        turns = [("system", _text(spec.system_prompt, "system_prompt", location)), *turns]
        first_trained_turn += 1
    _check_last_turn(turns, location, use)
    return Conversation(turns, metadata, first_trained_turn if has_answer else None, tools)


def thread_of(conversation: Conversation, location: RowLocation, use: DatasetUse) -> StringThread:
    """Build the thread of a conversation. Raises BadRow."""
    try:
        thread = StringThread(conversation.turns, conversation.metadata, tools=conversation.tools)
    except ThreadError as error:
        raise location.bad_row(
            None, given="values that make no thread", expected="a conversation", todo=str(error)
        ) from error
    if use == "rating":
        check_rating(thread.metadata, location)
    first_trained_turn = conversation.first_trained_turn
    return thread if first_trained_turn is None else thread.with_weight_assistant_turns_from_index(first_trained_turn)


def check_rating(metadata: Mapping[str, Any], location: RowLocation) -> None:
    """Raise BadRow if the metadata of a thread has no number `res`, the target of a reward model."""
    # In Python a bool is an int, but it is no rating.
    rating = metadata.get("res")
    if isinstance(rating, bool) or not isinstance(rating, int | float) or abs(rating) > LARGEST_REWARD:
        raise location.bad_row(
            "metadata.res",
            given=_shown(rating),
            expected=f"a rating of the answer, {REWARD_RANGE}",
            todo="Put it into metadata, or name its column: metadata_columns=[res].",
        )


def column_of(role: ColumnRole, spec: RowsDataset) -> str:
    """The name of the column with this role. A role that `spec.columns` does not map is its own column name."""
    return spec.columns.get(role, role)


def messages_column(values: dict[str, Any], spec: RowsDataset) -> str:
    """The name of the column with a whole conversation: the mapped one, `messages` or ShareGPT's `conversations`."""
    column = column_of("messages", spec)
    is_sharegpt = "messages" not in spec.columns and values.get(column) is None
    return CONVERSATIONS if is_sharegpt and values.get(CONVERSATIONS) is not None else column


def turns_for(tools: list[dict[str, Any]], turns: list[RawTurn]) -> list[RawTurn]:
    """The turns with their tool calls: as the model's chat template writes them if the row has tools, else as text."""
    return turns_with_calls(turns) if tools else turns_as_text(turns)


def row_tools(values: dict[str, Any], location: RowLocation, spec: RowsDataset) -> list[dict[str, Any]]:
    """The descriptions of the tools of a row. Raises BadRow."""
    column = column_of("tools", spec)
    try:
        return tools_of(values.get(column))
    except (ValueError, RecursionError) as error:
        raise location.bad_row(
            column, given=f"{_shown(values[column])} ({error})", expected="a list of descriptions of tools, or its JSON"
        ) from error


def _layout(values: dict[str, Any], location: RowLocation, spec: RowsDataset) -> ColumnRole:
    """The role that holds the conversation, "messages" or "prompt": the one mapped in `spec.columns`, or else the only
    one that the row has."""
    # The spec decides, if it maps one of them. A mapped completion implies a prompt.
    mapped = [role for role in ("messages", "prompt") if role in spec.columns]
    if mapped:
        return mapped[0]  # type: ignore[return-value]
    if "completion" in spec.columns:
        return "prompt"

    # Else the columns of the row decide. Parquet gives absent columns of a row the value null.
    present = [role for role in ("messages", "prompt") if values.get(role) is not None]
    if not present and values.get(CONVERSATIONS) is not None:
        return "messages"
    if len(present) == 1:
        return present[0]  # type: ignore[return-value]
    if present:
        raise location.bad_row(
            None,
            given="both 'messages' and 'prompt'",
            expected="one of them",
            todo="Choose with columns={messages: messages} or columns={prompt: prompt}.",
        )
    raise location.bad_row(
        None,
        given=f"the columns {', '.join(values) or '(none)'}",
        expected="'messages', 'conversations' or 'prompt', and not null",
        todo="Map the names with columns, for instance columns={prompt: question}.",
    )


def _value(values: dict[str, Any], column: str, location: RowLocation) -> Any:
    if column in values:
        return values[column]
    # a dotted name is a field within the objects of a column
    value: Any = values
    for name in column.split("."):
        if not isinstance(value, dict) or name not in value:
            break
        value = value[name]
    else:
        return value
    raise location.bad_row(
        column,
        given=f"a row with {', '.join(values) or 'no columns'}",
        expected=f"the column {column!r}",
        todo="Map the names with columns, for instance columns={prompt: question}.",
    )


def prompt_turns(values: dict[str, Any], column: str, location: RowLocation) -> list[RawTurn]:
    """The turns of a prompt column. A text is one user turn; a list is a list of messages."""
    value = _value(values, column, location)
    if isinstance(value, list):
        return _messages(values, column, location)
    if not isinstance(value, str) or not value.strip():
        raise location.bad_row(column, given=_shown(value), expected="a text that is not empty, or a list of messages")
    return [("user", _text(value, column, location))]


def answer_turns(values: dict[str, Any], column: str, location: RowLocation) -> list[RawTurn]:
    """The turns of a completion, chosen or rejected column. A text is one assistant turn; a list is a list of messages.

    An empty text is allowed: it trains the model to end its turn at once.
    """
    value = _value(values, column, location)
    if isinstance(value, dict):
        return [_message(value, column, location)]
    if isinstance(value, list):
        return _messages(values, column, location)
    if not isinstance(value, str):
        raise location.bad_row(column, given=_shown(value), expected="a text, or a list of messages")
    return [("assistant", _text(value, column, location))]


def _messages(values: dict[str, Any], column: str, location: RowLocation) -> list[RawTurn]:
    value = _value(values, column, location)
    if not isinstance(value, list) or not value:
        raise location.bad_row(column, given=_shown(value), expected="a list of at least one {'role', 'content'}")
    return [_message(message, f"{column}[{index}]", location) for index, message in enumerate(value)]


def _message(message: Any, column: str, location: RowLocation) -> RawTurn:
    if not isinstance(message, dict):
        raise location.bad_row(column, given=_shown(message), expected="an object with 'role' and 'content'")
    is_sharegpt = message.get("from") is not None and message.get("role") is None
    message = usual_message(message)
    role, content = message.get("role"), message.get("content")
    # Calls that are malformed are no fragments yet.
    calls = message.get("tool_calls") if role == "assistant" else None
    has_calls = isinstance(calls, list) and all(isinstance(call, ToolCallFragment) for call in calls)
    known = {"role", "content"} | ({"tool_calls"} if has_calls else set())
    known |= {"tool_call_id", "name"} if role == "tool" else set()
    # Parquet gives every row the union of the fields, null where absent: only a field with a value is lost data.
    extra = sorted(key for key, value in message.items() if key not in known and value is not None)
    if extra:
        raise location.bad_row(
            column,
            given=f"the fields {', '.join(extra)} in addition to 'role' and 'content'",
            expected="'role' and 'content' only",
            todo="These fields would be lost. Remove them, or write them into the content.",
        )
    if role not in ROLES:
        name, roles = ("from", SHAREGPT_ROLES) if is_sharegpt else ("role", ROLES)
        raise location.bad_row(f"{column}.{name}", given=_shown(role), expected=f"one of {', '.join(roles)}")
    if has_calls and calls and isinstance(content, str | None):
        before = [TextFragment(text=_text(content, f"{column}.content", location))] if content else []
        return role, (*before, *calls)
    # The content is a text, or a list of parts such as texts and images.
    if isinstance(content, list) and content:
        parts = [_part(part, f"{column}.content[{index}]", location) for index, part in enumerate(content)]
        return role, (*parts, *(calls or ()))
    if not isinstance(content, str):
        raise location.bad_row(f"{column}.content", given=_shown(content), expected="a text, or a list of parts")
    text = _text(content, f"{column}.content", location)
    call_id, tool_name = message.get("tool_call_id"), message.get("name")
    if isinstance(call_id, str) or isinstance(tool_name, str):
        call_id, tool_name = (value if isinstance(value, str) else None for value in (call_id, tool_name))
        return role, (ToolResponseFragment(id=call_id or "", text=text, name=tool_name),)
    return role, text


def _part(part: Any, column: str, location: RowLocation) -> TextFragment | ImageFragment:
    """Convert {'type': 'text', 'text': …} or {'type': 'image', 'url': …} to a fragment.

    The url is a data: URL or the path of a file, relative to the folder of the dataset's file.
    """
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return TextFragment(text=_text(part["text"], column, location))
    if kind != "image" or not isinstance(part.get("url"), str):
        raise location.bad_row(
            column, given=_shown(part), expected="{'type': 'text', 'text': …} or {'type': 'image', 'url': …}"
        )
    # The beginning is enough to recognise a URL; a data: URL may have millions of characters.
    url = part["url"]
    is_path = "://" not in url[:20] and not url.startswith("data:")
    if is_path:
        url = str(Path(location.source).parent / Path(url).expanduser())
    try:
        return embed_image(ImageFragment(url=url))
    except TextError as error:
        raise location.bad_row(
            f"{column}.url", given=_shown(part["url"]), expected="a data: URL or a file", todo=str(error)
        ) from error


def _text(value: str, column: str, location: RowLocation) -> str:
    """Return `value` after a check that it is valid Unicode. JSON can spell half a surrogate pair, which no UTF-8 file
    and no tokenizer can hold."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise location.bad_row(
            column, given=f"half a surrogate pair at character {error.start}", expected="whole Unicode characters"
        ) from error
    return value


def metadata_of(values: dict[str, Any], location: RowLocation, spec: RowsDataset) -> dict[str, Any]:
    """The metadata column of a row (an object, or its JSON text) and the columns in `spec.metadata_columns`."""
    # Read the metadata column. It is required only if `spec.columns` maps it.
    column = column_of("metadata", spec)
    value = _value(values, column, location) if "metadata" in spec.columns else values.get(column)
    if isinstance(value, str):
        value = _json_object(value, column, location)
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise location.bad_row(column, given=_shown(value), expected="an object, or a text that holds a JSON object")
    metadata = dict(value)
    if metadata:
        _check_json(metadata, column, location)

    # Add the further columns.
    for name in spec.metadata_columns:
        if name in metadata:
            raise location.bad_row(
                name,
                given=f"{name!r} both as a column and inside {column!r}",
                expected="one of them",
                todo="Leave it out of metadata_columns.",
            )
        metadata[name] = _value(values, name, location)
        _check_json(metadata[name], name, location)
    return metadata


def _json_object(text: str, column: str, location: RowLocation) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise location.bad_row(
            column, given=_shown(text), expected="an object, or a text that holds a JSON object"
        ) from error


def _check_json(value: Any, column: str, location: RowLocation) -> None:
    try:
        canonical_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise location.bad_row(
            column, given=f"{_shown(value)} ({error})", expected="values that JSON can hold", todo="Cast the column."
        ) from error


def _check_last_turn(turns: list[RawTurn], location: RowLocation, use: DatasetUse) -> None:
    last_role = turns[-1][0]
    if use == "prompt" and last_role in ("assistant", "system"):
        raise location.bad_row(
            None,
            given=f"a thread that ends with the {last_role} turn",
            expected="prompts, which end with a user or tool turn",
            todo="Load it as completions, or leave that turn out.",
        )
    if use in ("completion", "rating") and last_role != "assistant":
        raise location.bad_row(
            None,
            given=f"a thread that ends with the {last_role} turn",
            expected="completions, which end with an assistant turn",
            todo="Give 'completion', or messages whose last role is assistant.",
        )


def _shown(value: Any) -> str:
    """The value and its type, cut for an error message."""
    if value is None:
        return "null"
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply to be shown"
    if len(text) > MAX_VALUE_LETTERS:
        text = text[: MAX_VALUE_LETTERS - 3] + "…"
    return f"{text} ({type(value).__name__})"
