"""Conversations that are longer than a run trains on."""

from __future__ import annotations

import pytest

from engine.errors import SampleTooLong
from engine.models.images import PlacedImage
from engine.protocol import TokenSequence
from tasks.batches.truncation import LengthPlan, cut

TEN = TokenSequence(list(range(10)), [0.0] * 4 + [1.0] * 6, group="g")
LEFT, RIGHT = LengthPlan(truncation="left"), LengthPlan(truncation="right")


def row_3() -> str:
    return "row 3"


@pytest.mark.parametrize("plan", [LengthPlan(), LEFT, RIGHT])
@pytest.mark.parametrize("limit", [None, 10, 11])
def test_what_fits_stays_as_it_is(plan: LengthPlan, limit: int | None) -> None:
    assert cut(TEN, plan, limit, name=row_3) is TEN


def test_the_last_tokens_or_the_first_are_kept() -> None:
    assert cut(TEN, RIGHT, 6, name=row_3) == TokenSequence([0, 1, 2, 3, 4, 5], [0.0] * 4 + [1.0] * 2, group="g")
    assert cut(TEN, LEFT, 8, name=row_3) == TokenSequence([2, 3, 4, 5, 6, 7, 8, 9], [0.0] * 2 + [1.0] * 6, group="g")


def test_the_first_token_that_is_kept_is_not_trained() -> None:
    # nothing before it predicts token 7
    assert cut(TEN, LEFT, 3, name=row_3) == TokenSequence([7, 8, 9], [0.0, 1.0, 1.0], group="g")
    assert cut(TEN, LEFT, 1, name=row_3) == TokenSequence([9], [0.0], group="g")


def test_a_longer_one_is_left_out_where_that_is_asked() -> None:
    assert cut(TEN, LengthPlan(truncation="drop"), 9, name=row_3) is None


def test_a_longer_one_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(SampleTooLong, match=r"row 3 has 10 tokens, and at most 9 fit .*to left, right or drop"):
        cut(TEN, LengthPlan(max_tokens=9), 9, name=row_3)
    image = PlacedImage(start=1, tokens=2, data=b"a file")
    seen = TokenSequence(TEN.token_ids, TEN.loss_mask, images=(image,))
    with pytest.raises(SampleTooLong, match="row 3 .*images, which cannot be truncated"):
        cut(seen, RIGHT, 9, name=row_3)
