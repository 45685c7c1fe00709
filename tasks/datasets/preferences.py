"""Preference pairs: two conversations with a common beginning and different answers, of which one is preferred."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from engine.errors import ThreadError
from engine.text.threads import StringThread
from tasks.datasets.convert import (
    RawTurn,
    RowLocation,
    answer_turns,
    column_of,
    metadata_of,
    prompt_turns,
    row_tools,
    turns_for,
)
from tasks.datasets.layouts import CONVERSATIONS

if TYPE_CHECKING:
    from tasks.datasets.read import RowsDataset


class Pair(NamedTuple):
    """The preferred and the dispreferred conversation. Both end with an assistant turn. Their common beginning is not
    trained."""

    chosen: StringThread
    rejected: StringThread


def pair_from_row(values: dict[str, Any], location: RowLocation, spec: RowsDataset) -> Pair:
    """Convert a row to a pair. Raises BadRow.

    With a prompt, `chosen` and `rejected` hold the answers: a text is one assistant turn, a list is a list of messages.
    Without a prompt they hold whole conversations. A list that already begins with the prompt is a whole conversation,
    too.
    """
    # Read what both conversations share.
    metadata = metadata_of(values, location, spec)
    column = column_of("prompt", spec)
    prompt: list[RawTurn] = []
    if "prompt" in spec.columns or values.get(column) is not None:
        prompt = prompt_turns(values, column, location)
    elif values.get(CONVERSATIONS) is not None:
        prompt = prompt_turns(values, CONVERSATIONS, location)

    # Build the two threads.
    tools = row_tools(values, location, spec)
    threads = []
    for role in ("chosen", "rejected"):
        turns = _conversation(values, column_of(role, spec), prompt, location)
        if spec.system_prompt and turns[0][0] != "system":
            turns = [("system", spec.system_prompt), *turns]
        try:
            threads.append(StringThread(turns_for(tools, turns), metadata, tools=tools))
        except ThreadError as error:
            raise location.bad_row(
                column_of(role, spec), given="values that make no thread", expected="a conversation", todo=str(error)
            ) from error
    chosen, rejected = threads
    return checked_pair(chosen, rejected, location)


def checked_pair(chosen: StringThread, rejected: StringThread, location: RowLocation) -> Pair:
    """Check a pair and set its weights. Raises BadRow.

    The assistant turns after the common beginning get weight 1, unless the threads have weights already.
    """
    shared = _common_turns(chosen, rejected)
    if shared == len(chosen.turns) == len(rejected.turns):
        raise location.bad_row(None, given="two equal conversations", expected="a preferred one and another")
    # Each must have the same prompt, and then its own answer of the assistant with a turn to train.
    for name, thread in (("chosen", chosen), ("rejected", rejected)):
        roles = [turn.role for turn in thread.turns]
        if not roles or roles[-1] != "assistant":
            raise location.bad_row(
                name,
                given=f"a thread that ends with the {roles[-1]} turn" if roles else "an empty thread",
                expected="one that ends with an assistant turn",
            )
        if shared == len(roles):
            raise location.bad_row(name, given="the beginning of the other conversation", expected="a different answer")
        if shared == 0 or roles[shared] != "assistant":
            raise location.bad_row(
                name,
                given=f"a thread whose {roles[shared]} turn {shared} differs from that of the other thread",
                expected="the same prompt in both, and then a turn of the assistant",
            )
        if not any(weight > 0 for weight in thread.get_turn_weights()[shared:]):
            raise location.bad_row(name, given="an answer of weight 0", expected="an assistant turn to learn from")
    return Pair(chosen=_weighted(chosen, shared), rejected=_weighted(rejected, shared))


def _common_turns(chosen: StringThread, rejected: StringThread) -> int:
    """The number of turns at the beginning that are equal in both threads."""
    count = 0
    for chosen_turn, rejected_turn in zip(chosen.turns, rejected.turns, strict=False):
        if chosen_turn != rejected_turn:
            break
        count += 1
    return count


def _weighted(thread: StringThread, shared: int) -> StringThread:
    return thread if thread.weights is not None else thread.with_weight_assistant_turns_from_index(shared)


def _conversation(values: dict[str, Any], column: str, prompt: list[RawTurn], location: RowLocation) -> list[RawTurn]:
    """The whole conversation of a chosen or rejected column: the prompt and the answer."""
    # An answer alone follows the prompt.
    turns = answer_turns(values, column, location)
    is_text = isinstance(values[column], str)
    if prompt and (is_text or turns[0][0] == "assistant"):
        return [*prompt, *turns]
    if is_text:
        raise location.bad_row(
            column,
            given="a text without a prompt",
            expected="a prompt, or a list of messages",
            todo="Name the prompt's column, for instance columns={prompt: question}.",
        )
    # Other messages are the whole conversation, which must begin with the prompt.
    if turns[: len(prompt)] != prompt:
        raise location.bad_row(
            column,
            given=f"messages that begin with a {turns[0][0]} turn other than the prompt",
            expected="the assistant's answer to the prompt, or the whole conversation",
            todo="Leave the prompt's column out where chosen and rejected are whole conversations.",
        )
    return turns
