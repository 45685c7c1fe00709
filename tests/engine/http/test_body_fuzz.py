"""Fuzz tests of the body decoder in a child process: each damaged body ends in BadSpec or in lists, and none ends the
process.

The mutations are in tests/fuzz/mutations.py; `python -m tests.fuzz.bodies --minutes 60` runs more of them. The corpus
holds bodies that ended the process with a segmentation fault or an abort before engine.http.arrow_stream checked them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.bodies import decode_cases, decode_in_child, problems
from tests.fuzz.mutations import KINDS

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.arrow"))
CASES = 500 * len(KINDS)
SLOW_CASES = 20_000


def test_bodies_that_once_ended_the_process_are_refused() -> None:
    outcome = decode_in_child(["--files", *map(str, CORPUS)])
    assert problems("all", outcome) == []
    assert outcome.refused == len(CORPUS) * len(KINDS) > 0


def test_damaged_bodies_of_every_kind_are_refused_or_decoded() -> None:
    outcome = decode_cases("all", 0, 0, CASES)
    assert problems("all", outcome) == []
    assert outcome.refused + outcome.decoded == CASES
    assert outcome.decoded > CASES // 50  # some damage leaves a valid body: the mutations reach the decoder


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_thousand_damaged_bodies_of_a_kind_are_refused_or_decoded(kind: str) -> None:
    outcome = decode_cases(kind, 1, 0, SLOW_CASES)
    assert problems("all", outcome) == []
    assert outcome.refused + outcome.decoded == SLOW_CASES
