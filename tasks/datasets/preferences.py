"""Preferences: two conversations that begin alike and go on differently, one of them preferred."""

from __future__ import annotations

from typing import Any, NamedTuple

from engine.text.errors import ThreadError
from engine.text.threads import StringThread
from tasks.datasets.convert import RowLocation, Turn, answer_turns, column_of, metadata_of, prompt_turns
from tasks.datasets.spec import RowsDataset


class Pair(NamedTuple):
    """Each ends with an assistant turn; what they begin with alike is no part of the comparison, and not trained."""

    chosen: StringThread
    rejected: StringThread


def pair_from_row(values: dict[str, Any], location: RowLocation, spec: RowsDataset) -> Pair:
    """The pair of one row. Raises BadRow.

    With a prompt, `chosen` and `rejected` are what follows it: a text is one assistant turn, a list messages. Without
    one they are whole conversations. A list that begins with the prompt already is taken as the whole.
    """
    metadata = metadata_of(values, location, spec)
    column = column_of("prompt", spec)
    prompt = (
        prompt_turns(values, column, location) if "prompt" in spec.columns or values.get(column) is not None else []
    )
    threads = []
    for role in ("chosen", "rejected"):
        turns = _conversation(values, column_of(role, spec), prompt, location)
        if spec.system_prompt and turns[0][0] != "system":
            turns = [("system", spec.system_prompt), *turns]
        try:
            threads.append(StringThread(turns=turns, metadata=metadata))
        except ThreadError as error:
            raise location.bad_row(
                column_of(role, spec), given="values that make no thread", expected="a conversation", todo=str(error)
            ) from error
    chosen, rejected = threads
    return checked_pair(chosen, rejected, location)


def checked_pair(chosen: StringThread, rejected: StringThread, location: RowLocation) -> Pair:
    """The pair, whose assistant turns after those that both have are trained, unless the threads say which. Raises
    BadRow."""
    shared = _turns_alike(chosen, rejected)
    if shared == len(chosen.turns) == len(rejected.turns):
        raise location.bad_row(None, given="two equal conversations", expected="a preferred one and another")
    for name, thread in (("chosen", chosen), ("rejected", rejected)):
        roles = [turn.role for turn in thread.turns]
        if not roles or roles[-1] != "assistant":
            raise location.bad_row(
                name,
                given=f"a thread that ends with the {roles[-1]} turn" if roles else "an empty thread",
                expected="one that ends with an assistant turn",
            )
        if shared == len(roles):
            raise location.bad_row(
                name, given="the beginning of the other conversation", expected="an answer of its own"
            )
        if shared == 0 or roles[shared] != "assistant":
            raise location.bad_row(
                name,
                given=f"a thread whose {roles[shared]} turn {shared} is not the other's",
                expected="the same prompt in both, and then the assistant's own turn",
            )
        if not any(weight > 0 for weight in thread.get_turn_weights()[shared:]):
            raise location.bad_row(name, given="an answer of weight 0", expected="an assistant turn to learn from")
    return Pair(*(_weighted(thread, shared) for thread in (chosen, rejected)))


def _turns_alike(one: StringThread, other: StringThread) -> int:
    """Turns that both begin with."""
    count = 0
    for mine, theirs in zip(one.turns, other.turns, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def _weighted(thread: StringThread, shared: int) -> StringThread:
    return thread if thread.weights is not None else thread.with_weight_assistant_turns_from_index(shared)


def _conversation(values: dict[str, Any], column: str, prompt: list[Turn], location: RowLocation) -> list[Turn]:
    turns = answer_turns(values, column, location)
    is_text = isinstance(values[column], str)
    if prompt and (is_text or turns[0][0] == "assistant"):
        return [*prompt, *turns]
    if is_text:
        raise location.bad_row(
            column,
            given="a text, and no prompt",
            expected="a prompt, or a list of messages",
            todo="Name the prompt's column, for instance columns={'prompt': 'question'}.",
        )
    if turns[: len(prompt)] != prompt:
        raise location.bad_row(
            column,
            given=f"messages that begin with a {turns[0][0]} turn other than the prompt",
            expected="the assistant's answer to the prompt, or the whole conversation",
            todo="Leave the prompt's column out where chosen and rejected are whole conversations.",
        )
    return turns
