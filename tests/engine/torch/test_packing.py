"""Packing is exact: no sample attends to another, and a shared prompt changes the amount of computation only."""

from __future__ import annotations

import pytest
import torch

from engine.backends.torch.packing import PrefixGroup, micro_batches, pack, shared_prefix
from engine.errors import SampleTooLong
from engine.protocol import TokenSequence

CPU = torch.device("cpu")


def sequence(prompt: list[int], completion: list[int], group: str = "") -> TokenSequence:
    return TokenSequence(prompt + completion, [0.0] * len(prompt) + [1.0] * len(completion), group)


def test_a_group_shares_its_prompt() -> None:
    packed = pack([sequence([5, 6, 7], [8, 9], "g"), sequence([5, 6, 7], [1], "g")], device=CPU)
    assert packed.token_ids_T.tolist() == [5, 6, 7, 8, 9, 1]
    assert packed.positions_T.tolist() == [0, 1, 2, 3, 4, 3]
    assert packed.groups == (PrefixGroup(0, 3, ((3, 2), (5, 1))),)
    # the first token of each branch is predicted from the prompt's last, at row position 2
    assert packed.source_N.tolist() == [2, 3, 2]
    assert packed.target_N.tolist() == [8, 9, 1]
    assert packed.trained_S == (2, 1)


def test_samples_of_no_group_stand_alone() -> None:
    packed = pack([sequence([5, 6], [7]), sequence([5, 6], [8])], device=CPU)
    assert packed.token_ids_T.tolist() == [5, 6, 7, 5, 6, 8]
    assert packed.groups == (PrefixGroup(0, 3), PrefixGroup(3, 3))
    assert packed.source_N.tolist() == [1, 4]


def test_the_shared_prefix_ends_where_a_token_differs_or_is_trained() -> None:
    assert shared_prefix([sequence([1, 2, 3], [4]), sequence([1, 2, 9], [4])]) == 2
    assert shared_prefix([sequence([1, 2], [3, 4]), sequence([1, 2], [3, 5])]) == 2
    # equal prompts of different length: the shorter one keeps a token of its own
    assert shared_prefix([TokenSequence([1, 2], [0, 1]), TokenSequence([1, 2, 3], [0, 0, 1])]) == 1


def test_micro_batches_hold_every_sample_once_and_keep_groups_together() -> None:
    samples = [sequence([1] * 10, [2] * 5, group) for group in ("b", "a", "b", "a")]
    batches = micro_batches(samples, max_tokens=20)
    assert sorted(i for batch in batches for i in batch) == [0, 1, 2, 3]
    assert batches == [[1, 3], [0, 2]]  # 10 shared + 2 x 5 own tokens fill 20


def test_a_group_larger_than_a_forward_is_split() -> None:
    samples = [sequence([1] * 10, [2] * 5, "g") for _ in range(3)]
    assert micro_batches(samples, max_tokens=20) == [[0, 1], [2]]


def test_a_sample_longer_than_a_forward_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(SampleTooLong, match="15 tokens.*takes 14.*raise max_tokens_per_forward"):
        micro_batches([sequence([1] * 10, [2] * 5)], max_tokens=14)
