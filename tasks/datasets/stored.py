"""The form in which a dataset's table stores an item: canonical JSON of its conversations and of its metadata.

Most rows hold only plain text. Their JSON is written directly, without a StringThread, whose validation takes most of
the time of a load. Both ways give the same bytes.
"""

from __future__ import annotations

import json
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.text.images import embed_images
from engine.text.threads import StringThread
from storage.serialization import canonical_text
from tasks.datasets.convert import Conversation, RawTurn, RowLocation, check_rating, conversation_from_row, thread_of
from tasks.datasets.preferences import Pair, pair_from_row

if TYPE_CHECKING:
    from tasks.datasets.load import DatasetUse
    from tasks.datasets.read import RowsDataset

_PLAIN_VALUES = (str, int, float, bool, type(None))
"""Types of metadata values that need no further validation."""


class StoredItem(NamedTuple):
    """An item of a dataset, as its row in the table."""

    conversations: tuple[str, ...]
    """Canonical JSON of the thread or, for a pair, of the chosen and of the rejected thread."""
    metadata: str
    """Canonical JSON."""


def stored_item(item: StringThread | Pair) -> StoredItem:
    """Return the stored form of a thread or a pair, with its images embedded.

    Raises UnsupportedFragment for an image that would have to be downloaded, ThreadError for one that cannot be read.
    """
    threads = (item,) if isinstance(item, StringThread) else (item.chosen, item.rejected)
    conversations = tuple(embed_images(thread).to_json() for thread in threads)
    return StoredItem(conversations, canonical_text(dict(threads[0].metadata)))


def stored_row(values: dict[str, Any], location: RowLocation, spec: RowsDataset, use: DatasetUse) -> StoredItem:
    """Convert a row of a source to its stored form. Raises BadRow, and as `stored_item`."""
    if use == "preference":
        return stored_item(pair_from_row(values, location, spec))
    conversation = conversation_from_row(values, location, spec, use)
    if not _is_plain(conversation):
        return stored_item(thread_of(conversation, location, use))
    if use == "rating":
        check_rating(conversation.metadata, location)
    metadata = canonical_text(conversation.metadata) if conversation.metadata else "{}"
    return StoredItem((_plain_thread(conversation, metadata),), metadata)


def prompt_turns_of(conversations: tuple[str, ...]) -> list[dict[str, Any]]:
    """The turns of the prompt of a stored row. The prompt of a pair are the turns that both conversations begin with;
    that of another row are the turns before the last one, if the assistant has the last turn."""
    threads = [json.loads(conversation)["turns"] for conversation in conversations]
    turns = threads[0]
    if len(threads) == 2:
        turns = [first for first, _ in takewhile(lambda pair: pair[0] == pair[1], zip(*threads, strict=False))]
    elif turns[-1]["role"] == "assistant":
        turns = turns[:-1]
    return turns


def prompt_item(conversations: tuple[str, ...], metadata: str) -> StoredItem:
    """The prompt of a stored completion or pair, with the text of its last, or of its preferred, answer as `answer` in
    the metadata, unless they have one. Raises ValueError for a conversation without a prompt."""
    turns = prompt_turns_of(conversations)
    if not turns or turns[-1]["role"] in ("assistant", "system"):
        last = f"a thread whose turns before the answer end with the {turns[-1]['role']} turn" if turns else "an answer"
        raise ValueError(f"given {last}; expected a user or tool turn before the answer")
    values = json.loads(metadata)
    values.setdefault("answer", StringThread.from_json(conversations[0]).last_content())
    fields = {"metadata": values, "turns": turns, "weights": None}
    tools = json.loads(conversations[0]).get("tools")
    thread = canonical_text(fields | {"tools": tools} if tools else fields)
    return StoredItem((thread,), canonical_text(values))


def _is_plain(conversation: Conversation) -> bool:
    """Whether every content is a text, every value of the metadata is a plain one, and there are no tools. `convert`
    has checked these."""
    if conversation.tools:
        return False
    for _, content in conversation.turns:
        if type(content) is not str:
            return False
    for name, value in conversation.metadata.items():
        if type(name) is not str or type(value) not in _PLAIN_VALUES:
            return False
    return True


def _plain_thread(conversation: Conversation, metadata: str) -> str:
    """The canonical JSON of the thread of a plain conversation, as `StringThread.to_json` writes it."""
    turns = []
    for role, content in conversation.turns:
        turns.append(f'{{"content":{canonical_text(content)},"role":"{role}"}}')
    weights = _weights(conversation.turns, conversation.first_trained_turn)
    return f'{{"metadata":{metadata},"turns":[{",".join(turns)}],"weights":{weights}}}'


def _weights(turns: list[RawTurn], first_trained_turn: int | None) -> str:
    """The weights of the turns in JSON: null if they are the default ones, which is 1 for every assistant turn."""
    untrained = turns[: first_trained_turn or 0]
    if all(role != "assistant" for role, _ in untrained):
        return "null"
    weights = ["0.0"] * len(untrained)
    for role, _ in turns[len(untrained) :]:
        weights.append("1.0" if role == "assistant" else "0.0")
    return f"[{','.join(weights)}]"
