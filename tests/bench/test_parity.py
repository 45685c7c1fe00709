"""Compares every loss that TRL has too with TRL's, over optimizer steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.parity.parity import TOLERANCE, cases, difference
from engine.backends.torch.tiny import build_tiny_model

pytestmark = pytest.mark.slow


def test_ten_optimizer_steps_have_the_losses_of_trl(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "tiny", seed=0)
    gaps = {}
    for name, run in cases(folder, tmp_path / "trl", steps=10, lr=1e-3).items():
        mine, theirs = run()
        assert len(mine) == len(theirs) == 10
        assert mine[0] != mine[-1]
        gaps[name] = difference(mine, theirs)
    assert len(gaps) >= 10
    assert {name: gap for name, gap in gaps.items() if gap > TOLERANCE} == {}
