"""Constrains the tokens of a completion to a JSON schema, by the grammars of llguidance.

The torch sampler asks a `JsonMatcher` for the tokens that may follow. vLLM compiles the same schema with the same
library in its own process.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Self

import numpy as np

from engine.errors import UnsupportedSchema
from engine.protocol import SamplingParams
from engine.text.tokenizers import Tokenizer

LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as Python writes it. With free white space, a weak model may write spaces without an end."""


@lru_cache(maxsize=8)
def guidance_schema(tokenizer: Tokenizer | None, schema: str) -> str:
    """Returns the JSON schema with the layout of its JSON, in the form that llguidance reads.

    Raises UnsupportedSchema for a schema that llguidance cannot compile, and without a fast tokenizer."""
    from llguidance import LLMatcher

    described = _with_layout(tokenizer, schema)
    error = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(described))
    if error:
        raise _unsupported(error)
    return described


def _with_layout(tokenizer: Tokenizer | None, schema: str) -> str:
    if tokenizer is None or tokenizer.to_json() is None:
        raise UnsupportedSchema(
            "json_schema was given, and this sampler has no tokenizer of the tokenizers library (tokenizer.json), to "
            "know the text of each token; save the model with a fast one, or leave json_schema out"
        )
    return json.dumps({**json.loads(schema), "x-guidance": LAYOUT})


def _unsupported(error: str) -> UnsupportedSchema:
    return UnsupportedSchema(f"json_schema cannot constrain tokens: {error}; simplify it, or leave json_schema out")


class JsonMatcher:
    """Tells after each token of one completion which tokens may follow."""

    def __init__(self, matcher: Any, vocab_size: int, schema: str) -> None:
        self._matcher, self._vocab_size, self._schema = matcher, vocab_size, schema

    @classmethod
    def of(
        cls, tokenizer: Tokenizer | None, params: SamplingParams, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> Self | None:
        """The matcher at the beginning of a completion; None without a schema. Raises UnsupportedSchema."""
        if params.json_schema is None:
            return None
        schema = params.json_schema
        matcher, matched_tokens = _initial_matcher(tokenizer, schema, vocab_size, tuple(eos_token_ids))
        return cls(matcher.deep_copy(), matched_tokens, schema)

    def copy(self) -> JsonMatcher:
        """A matcher in the same state for another completion. It costs microseconds."""
        return JsonMatcher(self._matcher.deep_copy(), self._vocab_size, self._schema)

    def advance(self, token: int) -> None:
        """Adds the next token. Raises UnsupportedSchema if the matcher cannot follow it."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        """llguidance raises nothing: at a limit of its resources, a matcher has an error for good and allows only the
        end of the completion."""
        if self._matcher.is_error():
            error = self._matcher.get_error().partition("\n")[0]
            raise UnsupportedSchema(
                f"the grammar of json_schema failed within a completion: {error}. Simplify the schema, or leave "
                f"json_schema out. The schema: {self._schema}"
            )

    @staticmethod
    def allowed(matchers: Sequence[JsonMatcher], vocab_size: int) -> np.ndarray:
        """(number of matchers, vocab_size) bool: the tokens that may follow in each completion.

        Raises UnsupportedSchema if a matcher cannot compute them."""
        words = -(-matchers[0]._vocab_size // 32)
        masks = np.zeros((len(matchers), words), np.int32)
        for mask, matcher in zip(masks, matchers, strict=True):
            matcher._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            matcher._check()
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
        return bits[:, :vocab_size].astype(bool)


@lru_cache(maxsize=8)
def _initial_matcher(
    tokenizer: Tokenizer | None, schema: str, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> tuple[Any, int]:
    """llguidance's matcher at the beginning of a completion, which must only be copied, and its number of tokens.

    A schema takes up to seconds to compile, and a policy is sampled with the same one again and again."""
    from llguidance import LLMatcher

    described = _with_layout(tokenizer, schema)
    assert tokenizer is not None  # checked with the schema
    library_tokenizer = _library_tokenizer(tokenizer, vocab_size, eos_token_ids)
    matcher = LLMatcher(library_tokenizer, LLMatcher.grammar_from_json_schema(described), log_level=0)
    if matcher.is_error():
        raise _unsupported(matcher.get_error())
    return matcher, library_tokenizer.vocab_size


@lru_cache(maxsize=8)
def _library_tokenizer(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Any:
    """llguidance's form of a tokenizer. It takes half a second for 50,000 tokens."""
    from llguidance import LLTokenizer

    known = [token for token in eos_token_ids if token < vocab_size]
    text = tokenizer.to_json()
    assert text is not None  # guidance_schema refuses such a tokenizer
    return LLTokenizer(text, n_vocab=max(vocab_size, tokenizer.vocab_size), eos_token=known)
