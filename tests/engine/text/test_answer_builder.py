"""Tokens to text, one at a time: whole characters, stop strings across token borders, equal to decoding at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.answer_builder import BROKEN, AnswerBuilder
from engine.text.rendering import Renderer
from engine.text.tokenizers import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Tokenizer:
    """One token per byte: the hardest case for characters and for stop strings."""
    return load_tokenizer(tiny_folder)


def fed(answer: AnswerBuilder, tokens: list[int], *, reason: str = "length") -> list[str]:
    """What each token released, and then the end."""
    return [*(answer.feed(token, -1.0) for token in tokens), answer.close(reason)]  # type: ignore[arg-type]


def test_a_character_is_released_when_its_last_byte_is_there(tokenizer: Tokenizer) -> None:
    released = fed(AnswerBuilder(tokenizer), tokenizer.encode("aé日🎉b"))
    assert released == ["a", "", "é", "", "", "日", "", "", "", "🎉", "b", ""]


def test_what_never_becomes_a_character_comes_with_the_end(tokenizer: Tokenizer) -> None:
    answer = AnswerBuilder(tokenizer)
    assert fed(answer, tokenizer.encode("a日")[:-1]) == ["a", "", "", BROKEN]
    assert answer.text == f"a{BROKEN}"


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_pieces_are_the_text_decoded_at_once(tokenizer: Tokenizer, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    answer = AnswerBuilder(tokenizer)
    assert "".join(fed(answer, tokens, reason="length")) == answer.text
    assert answer.text == Renderer(tokenizer).decode_completion(tokens)
    assert answer.tokens == tokens and answer.finish == "length"


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="abé", max_size=30), stop=st.lists(st.text("abé", min_size=1, max_size=4), max_size=3))
def test_the_text_ends_before_the_first_stop_string_to_be_complete(
    tokenizer: Tokenizer, text: str, stop: list[str]
) -> None:
    answer = AnswerBuilder(tokenizer, stop=stop)
    pieces = fed(answer, tokenizer.encode(text))
    complete = next((text[:end] for end in range(1, len(text) + 1) if text[:end].endswith(tuple(stop))), None)
    if complete is None:
        expected, finish = text, "length"
    else:
        longest = max(len(s) for s in stop if complete.endswith(s))
        expected, finish = complete[: len(complete) - longest], "stop"
    assert ("".join(pieces), answer.text, answer.finish) == (expected, expected, finish)
    taken = text if complete is None else complete
    assert len(answer.tokens) == len(tokenizer.encode(taken))  # up to the token that completed the stop string


def test_what_may_begin_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    released = fed(AnswerBuilder(tokenizer, stop=["STOP"]), tokenizer.encode("xSTOx"))
    assert released == ["x", "", "", "", "STOx", ""]
    assert fed(AnswerBuilder(tokenizer, stop=["STOP"]), tokenizer.encode("xSTO"))[-1] == "STO"


def test_no_stop_string_within_the_first_min_tokens(tokenizer: Tokenizer) -> None:
    answer = AnswerBuilder(tokenizer, stop=["a"], min_tokens=3)
    fed(answer, tokenizer.encode("aaabab"))
    assert (answer.text, len(answer.tokens)) == ("aaab", 5)


@pytest.mark.parametrize(("reason", "finish"), [("eos", "stop"), ("stop", "stop"), ("length", "length")])
def test_the_end_of_turn_is_counted_and_is_no_text(tokenizer: Tokenizer, reason: str, finish: str) -> None:
    answer = AnswerBuilder(tokenizer)
    end = tokenizer.eos_token_ids[0]
    fed(answer, [*tokenizer.encode("hi"), end], reason=reason)
    assert (answer.text, answer.finish, len(answer.tokens)) == ("hi", finish, 3)


def test_nothing_after_the_end_is_taken(tokenizer: Tokenizer) -> None:
    answer = AnswerBuilder(tokenizer, stop=["b"])
    fed(answer, tokenizer.encode("abcd"))
    assert answer.tokens == tokenizer.encode("ab")


def test_offsets_are_where_each_token_begins_in_the_text(tokenizer: Tokenizer) -> None:
    answer = AnswerBuilder(tokenizer, stop=["zz"])
    fed(answer, tokenizer.encode("azb"))
    assert answer.offsets == [0, 1, 2]
