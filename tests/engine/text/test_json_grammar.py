"""Tests of the matcher of JSON schemas: errors of llguidance within a completion, and the cache of compiled schemas."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest

from engine.errors import UnsupportedSchema
from engine.protocol import SamplingParams
from engine.text.json_grammar import JsonMatcher
from engine.text.tokenizers import Tokenizer, load_tokenizer


def word_schema(*words: str) -> str:
    return json.dumps({"enum": words})


@pytest.fixture
def tokenizer(tiny_folder: Path) -> Tokenizer:
    """One token per byte. A new object, for which nothing is compiled yet."""
    return load_tokenizer(tiny_folder)


def new_matcher(tokenizer: Tokenizer, schema: str) -> JsonMatcher:
    params = SamplingParams(json_schema=schema)
    eos = tokenizer.eos_token_ids
    matcher = JsonMatcher.of(tokenizer, params, vocab_size=tokenizer.vocab_size, eos_token_ids=eos)
    assert matcher is not None
    return matcher


def allowed(tokenizer: Tokenizer, matcher: JsonMatcher) -> list[int]:
    return np.flatnonzero(JsonMatcher.allowed([matcher], tokenizer.vocab_size)[0]).tolist()


def test_a_token_that_the_grammar_rejects_raises_with_the_schema(tokenizer: Tokenizer) -> None:
    matcher = new_matcher(tokenizer, word_schema("PASS"))
    with pytest.raises(UnsupportedSchema, match=r'within a completion: .*grammar.*The schema: {"enum": \["PASS"\]}'):
        matcher.advance(tokenizer.encode("x")[0])


def test_a_matcher_that_reaches_a_limit_raises_instead_of_ending_the_completion(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = llguidance.LLParserLimits(step_lexer_fuel=1)
    monkeypatch.setattr(llguidance, "LLMatcher", LimitedMatcher)
    monkeypatch.setattr(LimitedMatcher, "limits", limits)
    matcher = new_matcher(tokenizer, '{"type": "string"}')
    with pytest.raises(UnsupportedSchema, match='The schema: {"type": "string"}'):
        for token in tokenizer.encode('"abc'):
            allowed(tokenizer, matcher)
            matcher.advance(token)


class LimitedMatcher:
    """llguidance's matcher with limits."""

    limits: Any = None
    grammar_from_json_schema = staticmethod(llguidance.LLMatcher.grammar_from_json_schema)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return llguidance._lib.LLMatcher(*args, **kwargs, limits=cls.limits)


def test_a_schema_is_compiled_once_and_each_completion_begins_at_its_beginning(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    grammar = llguidance.LLMatcher.grammar_from_json_schema

    class CountedMatcher(LimitedMatcher):
        @staticmethod
        def grammar_from_json_schema(schema: str) -> str:
            compiled.append(schema)
            return grammar(schema)

    monkeypatch.setattr(llguidance, "LLMatcher", CountedMatcher)
    quote, first, second = tokenizer.encode('"PF')
    start = partial(new_matcher, tokenizer, word_schema("PASS", "FAIL"))
    for _ in range(3):
        matcher = start()
        assert allowed(tokenizer, matcher) == [quote]
        matcher.advance(quote)
        assert set(allowed(tokenizer, matcher)) == {first, second}
    assert len(compiled) == 1
    new_matcher(tokenizer, word_schema("PASS"))
    assert len(compiled) == 2
