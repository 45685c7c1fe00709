"""Tests of the ids of texts in parts: those of the whole text, divided where the parts meet, as the plain way does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from engine.backends.torch.tiny import byte_tokenizer
from engine.text.rendering import encode_parts, plain_encode_parts
from engine.text.tokenizers import Tokenizer
from tests.engine.text.test_rendering import merging_tokenizer

PIECES = ["<|im_start|>", "<|im_end|>", "\n", "\n\n", "a", "b", "ab", " ", "  ", "user", "日本", "🎉", "é", "e\u0301"]


def tokenizer_of(raw: PreTrainedTokenizerFast) -> Tokenizer:
    return Tokenizer(raw, name="the-model", eos_token_ids=[raw.eos_token_id])


def random_texts(count: int) -> list[list[str]]:
    """Texts of one to five parts; a part is empty or ends anywhere between two characters."""
    source = random.Random(7)
    return [
        ["".join(source.choices(PIECES, k=source.randrange(6))) for _ in range(source.randrange(1, 6))]
        for _ in range(count)
    ]


@pytest.fixture(params=[byte_tokenizer, merging_tokenizer], ids=["bytes", "merging"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    make: Callable[[], PreTrainedTokenizerFast] = request.param
    return tokenizer_of(make())


def test_both_ways_give_the_same_parts(tokenizer: Tokenizer) -> None:
    texts = random_texts(300)
    assert tokenizer.encode_all(["a"]) is not None
    assert encode_parts(tokenizer, texts) == [plain_encode_parts(tokenizer, parts) for parts in texts]


def test_the_ids_are_those_of_the_whole_text(tokenizer: Tokenizer) -> None:
    texts = random_texts(100)
    for parts, ids in zip(texts, encode_parts(tokenizer, texts), strict=True):
        assert [token for part in ids for token in part] == tokenizer.encode("".join(parts))
        assert len(ids) == len(parts)


def test_a_token_that_spans_two_parts_belongs_to_the_later_one() -> None:
    tokenizer = tokenizer_of(merging_tokenizer())
    (ab,) = tokenizer.encode("ab")
    (x,) = tokenizer.encode("x")
    assert encode_parts(tokenizer, [["xa", "b", "x"], ["a", "", "b"]]) == [[[x], [ab], [x]], [[], [], [ab]]]


def test_a_tokenizer_that_does_not_tell_its_characters_takes_the_plain_way() -> None:
    class Own(PreTrainedTokenizerFast):
        def _encode_plus(self, *args: Any, **kwargs: Any) -> Any:
            return super()._encode_plus(*args, **kwargs)

    raw = merging_tokenizer()
    own = tokenizer_of(Own(tokenizer_object=raw.backend_tokenizer, eos_token="<|im_end|>"))
    assert own.encode_all(["a"]) is None
    texts = random_texts(50)
    assert encode_parts(own, texts) == encode_parts(tokenizer_of(raw), texts)
