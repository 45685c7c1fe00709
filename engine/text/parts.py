"""Token ids of texts that consist of parts, such as the turns of a conversation.

The ids are those of the whole text. A token that spans two parts belongs to the later one, so that no content that is
trained is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from engine.text.tokenizers import EncodedText, Tokenizer


def encode_parts(tokenizer: Tokenizer, texts: Sequence[Sequence[str]]) -> list[list[list[int]]]:
    """Returns the ids of each part of each text. The ids of all parts of a text, joined, are those of the whole text.

    All texts are encoded in one call, once each; the tokenizer tells which character each token begins with.
    """
    encoded = tokenizer.encode_all(["".join(parts) for parts in texts])
    if encoded is None:
        return [plain_encode_parts(tokenizer, parts) for parts in texts]
    parts_ids = []
    for parts, whole in zip(texts, encoded, strict=True):
        ids = _divide(whole, parts)
        parts_ids.append(plain_encode_parts(tokenizer, parts) if ids is None else ids)
    return parts_ids


def _divide(whole: EncodedText, parts: Sequence[str]) -> list[list[int]] | None:
    """Divides the ids of a text among its parts. None if the first character of a part is in no token, or in one that
    begins in the part before: whether that token takes in the space after it, or joins two texts, is not known."""
    ids = whole.ids
    characters = len("".join(parts))
    cuts = [0]
    for border in accumulate(map(len, parts[:-1])):
        if border in (0, characters):
            cuts.append(len(ids) if border else 0)
            continue
        token = whole.char_to_token(border)
        if token is None or token == whole.char_to_token(border - 1):
            return None
        cuts.append(token)
    return [ids[start:end] for start, end in pairwise([*cuts, len(ids)])]


def plain_encode_parts(tokenizer: Tokenizer, parts: Sequence[str]) -> list[list[int]]:
    """The ids of each part of one text, by `Tokenizer.encode` alone: for a tokenizer that does not tell the characters
    of its tokens."""
    # Usually the parts, encoded alone, join to the ids of the whole text.
    whole = tokenizer.encode("".join(parts))
    ids = [tokenizer.encode(part) for part in parts]
    joined: list[int] = []
    for part_ids in ids:
        joined.extend(part_ids)
    if joined == whole:
        return ids

    # Some token spans two parts: cut the whole text's ids where they begin to differ from those of each prefix.
    prefixes = accumulate(parts[:-1])
    ends = [_common_length(tokenizer.encode(prefix), whole) for prefix in prefixes]
    cuts = [0, *accumulate(ends, max), len(whole)]
    return [whole[start:end] for start, end in pairwise(cuts)]


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Returns the length of the longest common prefix."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
