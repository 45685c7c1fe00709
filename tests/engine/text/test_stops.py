"""Where a completion ends at a stop string: at the least number of tokens whose decoded text contains it."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from engine.protocol import SamplingParams
from engine.text.stops import CompletionEnd, stop_strings
from engine.text.tokenizers import BROKEN, Tokenizer

CORPUS = ["<answer>42</answer> The answer é is … 漢字 🙂 answer answers <|end|> ans wer"] * 8
SPECIAL = "<|end|>"


def byte_level() -> Tokenizer:
    """As GPT-2's: tokens are merged bytes, and a character may be split over tokens."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    fast.train_from_iterator(CORPUS, trainer)
    return wrapped(fast)


def sentence_piece() -> Tokenizer:
    """As Llama 2's: "▁" is a space, unknown characters are bytes such as <0xE2>, and a text loses its first space."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*"▁answer</>42", "an", "ans", "▁a", "▁an", "er", "wer", "</", "r>", ">▁", "▁▁"]
    merges = [("a", "n"), ("an", "s"), ("▁", "a"), ("▁a", "n"), ("e", "r"), ("w", "er"), ("<", "/"), ("r", ">")]
    merges += [(">", "▁"), ("▁", "▁")]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    fast = FastTokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", left=1, right=0)]
    fast.decoder = decoders.Sequence(steps)
    return wrapped(fast)


def wrapped(fast: FastTokenizer) -> Tokenizer:
    fast.add_special_tokens([AddedToken(SPECIAL, special=True, normalized=False)])
    raw = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=SPECIAL, clean_up_tokenization_spaces=False)
    return Tokenizer(raw, name="the-model", eos_token_ids=())


@pytest.fixture(scope="module", params=[byte_level, sentence_piece], ids=["byte-level", "sentence-piece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.param()  # type: ignore[no-any-return]


def cut(tokenizer: Tokenizer, ids: list[int], **params: object) -> tuple[int, str | None]:
    """(number of tokens of the completion, stop reason) when these tokens are sampled."""
    sampling = SamplingParams.model_validate({"max_new_tokens": 10_000, **params})
    end = CompletionEnd(sampling, tokenizer.eos_token_ids, stop_strings(tokenizer, sampling))
    for length, token in enumerate(ids, start=1):
        reason = end.after(token)
        if reason is not None:
            return length, reason
    return len(ids), None


def text_after(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text that these tokens add to a text: the first token of a whole text may lose its space."""
    first = tokenizer.encode("a")
    before = tokenizer.decode(first, skip_special=False)
    return tokenizer.decode([*first, *ids], skip_special=False).removeprefix(before)


# -- tokens as bytes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["</answer> 42", "é…漢字🙂", " the  answer", f"a{SPECIAL}b", "\x00\n\t"])
def test_the_bytes_of_a_texts_tokens_are_the_texts(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    joined = b"".join(tokenizer.token_bytes[token] for token in ids)
    assert joined == text_after(tokenizer, ids).encode()
    assert joined.replace(b" ", b"") == text.encode().replace(b" ", b"")  # Llama 2's adds a space before a word


def test_every_byte_has_a_token(tokenizer: Tokenizer) -> None:
    assert {bytes([byte]) for byte in range(256)} <= set(tokenizer.token_bytes)


# -- the cut -------------------------------------------------------------------------------------------------------


def test_random_tokens_are_cut_where_their_decoded_text_first_has_a_string(tokenizer: Tokenizer) -> None:
    """Against the definition, for 3,000 random completions of tokens that often make up the strings."""
    draw = random.Random(0)
    strings = ["</answer>", "answer", "é", "漢字", "🙂", " 42", SPECIAL, "\n\n", "r>"]
    likely = sorted({token for string in strings for token in tokenizer.encode(string)} | set(range(1, 12)))
    cuts = 0
    for _ in range(3000):
        chosen = draw.sample(strings, draw.randrange(1, 4))
        at_least = draw.choice([0, 0, 1, 3])
        ids = [token for _ in range(6) for token in draw.choice([[draw.choice(likely)], tokenizer.encode(chosen[0])])]
        expected = len(ids)
        for length in range(at_least + 1, len(ids) + 1):
            text = text_after(tokenizer, ids[at_least:length])
            if any(string in text for string in chosen):
                expected = length
                break
        length, reason = cut(tokenizer, ids, stop=chosen, min_new_tokens=at_least)
        assert length == expected, (tokenizer.decode(ids, skip_special=False), chosen)
        cuts += reason == "stop"
    assert 1000 < cuts < 3000


def test_a_character_that_is_split_over_tokens_is_complete_with_its_last_byte() -> None:
    tokenizer = byte_level()
    by_bytes = {piece: token for token, piece in enumerate(tokenizer.token_bytes)}
    ids = [by_bytes[bytes([byte])] for byte in "x🙂y".encode()]
    assert cut(tokenizer, ids, stop=["🙂"]) == (5, "stop")
    assert tokenizer.decode(ids[:4]) == f"x{BROKEN}"


def test_the_token_that_completes_a_string_may_have_more_text() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("an answer")
    assert [tokenizer.decode([token]) for token in ids] == ["an", " answer"]
    assert cut(tokenizer, ids, stop=["n a"]) == (2, "stop")
    assert cut(tokenizer, ids, stop=["swe"]) == (2, "stop")


def test_lengths_and_ends_of_turn(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("</answer>")
    assert cut(tokenizer, ids, stop=["</answer>"], max_new_tokens=len(ids)) == (len(ids), "stop")
    assert cut(tokenizer, ids, stop=["</answer>"], max_new_tokens=len(ids) - 1) == (len(ids) - 1, "length")
    assert cut(tokenizer, ids, stop=["</answer>"], min_new_tokens=len(ids) - 1) == (len(ids), None)
    assert cut(tokenizer, ids, stop_token_ids=[ids[-1]], stop=["never"]) == (len(ids), "stop")
    (end,) = tokenizer.encode(SPECIAL)[-1:]
    assert cut(tokenizer, [*ids, end, *ids], stop=[SPECIAL]) == (len(ids) + 1, "stop")


def test_a_string_is_not_found_across_an_id_of_other_text(tokenizer: Tokenizer) -> None:
    (end,) = tokenizer.encode(SPECIAL)[-1:]
    ids = tokenizer.encode("</answer>")
    assert cut(tokenizer, [*ids[:-1], end, ids[-1]], stop=["</answer>"]) == (len(ids) + 1, None)
