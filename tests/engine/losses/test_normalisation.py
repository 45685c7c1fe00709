"""Token weights: values by hand, and independence of the split into micro-batches."""

from __future__ import annotations

import pytest
import torch

from engine.backends.torch.updates import token_weights
from engine.losses.base import LossNorm

NORMS: tuple[str, ...] = LossNorm.__args__
WHOLE = {"total_tokens": 6, "total_sequences": 2, "constant": 8.0}


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        ("token_mean", [1 / 6] * 6),
        ("sequence_mean", [1 / 4] * 2 + [1 / 8] * 4),
        ("token_sum", [1.0] * 6),
        ("constant", [1 / 16] * 6),
    ],
)
def test_two_sequences_of_two_and_four_tokens(norm: LossNorm, expected: list[float]) -> None:
    assert token_weights([2, 4], norm=norm, **WHOLE).tolist() == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("norm", NORMS)
def test_every_split_gives_the_weights_of_the_whole(norm: LossNorm) -> None:
    whole = {"total_tokens": 10, "total_sequences": 4, "constant": 5.0}
    together = token_weights([1, 2, 3, 4], norm=norm, **whole)
    for cut in range(5):
        parts = [token_weights(lengths, norm=norm, **whole) for lengths in ([1, 2, 3, 4][:cut], [1, 2, 3, 4][cut:])]
        assert torch.equal(torch.cat(parts), together)


@pytest.mark.parametrize("norm", NORMS)
def test_a_sequence_without_trained_tokens_has_no_weights_but_counts_as_a_sequence(norm: LossNorm) -> None:
    weights = token_weights([0, 2], norm=norm, total_tokens=2, total_sequences=2, constant=4.0)
    by_hand = {"token_mean": 1 / 2, "sequence_mean": 1 / 4, "token_sum": 1.0, "constant": 1 / 8}
    assert weights.tolist() == [by_hand[norm]] * 2


@pytest.mark.parametrize(("tokens", "sequences"), [(5, 2), (6, 1), (0, 0)])
def test_totals_of_less_than_the_micro_batch_are_refused(tokens: int, sequences: int) -> None:
    with pytest.raises(ValueError, match="whole minibatch"):
        token_weights([2, 4], norm="token_mean", total_tokens=tokens, total_sequences=sequences)


def test_constant_without_its_constant_is_refused() -> None:
    with pytest.raises(ValueError, match="constant"):
        token_weights([2], norm="constant", total_tokens=2, total_sequences=1)
