"""Fuzz tests of what hubs, files, configs and judges give: a small share of the campaign of tests.fuzz.bodies."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from tests.fuzz.bodies import NO_CASE_YET, decode_cases, problems
from tests.fuzz.body_decoder import WriteGuard, use_case, use_cases
from tests.fuzz.inputs import HOSTILE, Input
from tests.fuzz.mutations import KINDS

CASES = 40


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOSTILE)
def test_each_case_is_used_or_refused_within_its_folder(kind: str) -> None:
    outcome = decode_cases(kind, 100, 0, CASES)
    assert problems(kind, outcome) == []
    assert outcome.decoded + outcome.refused == CASES


def test_the_harness_sees_what_is_written_outside_and_untyped_errors(tmp_path: Path) -> None:
    guard = WriteGuard(tmp_path / "inside")

    def use(data: bytes, folder: Path) -> None:
        (tmp_path / "inside").mkdir()
        (tmp_path / "inside" / "x").write_bytes(data)
        assert not guard.outside
        os.mkdir(tmp_path / "outside")
        raise KeyError("y")

    source = Input(lambda seed, number: b"", use, (ValueError,))
    assert use_case(source, b"x", tmp_path).startswith("KeyError at test_hostile_inputs.py")
    assert guard.outside == str((tmp_path / "outside").resolve())
    guard.folder = "/"  # an audit hook cannot be removed


def test_the_number_of_a_case_is_noted_before_the_case_is_made(tmp_path: Path) -> None:
    progress = tmp_path / "progress"
    progress.write_bytes(NO_CASE_YET)

    def make() -> bytes:
        raise MemoryError

    with pytest.raises(MemoryError):
        use_cases(iter([(7, next(iter(KINDS)), make)]), str(progress), tmp_path)
    assert struct.unpack("<qq", progress.read_bytes()) == (7, 0)
