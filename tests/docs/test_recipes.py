"""The recipes in examples/ that need more than the demo: each runs as it stands, with the tiny model."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT

RECIPES = {"lora_two_ranks.py": "sums-lora@000004-"}
"""Files in examples/, and the beginning of what they print."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs(
    name: str, open_page: Callable[[str], Path], prefect_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    open_page("README.md")
    text = (ROOT / "examples" / name).read_text()
    assert len(text.splitlines()) < 60
    runpy.run_path(f"examples/{name}", run_name="__main__")
    assert re.search(f"^{RECIPES[name]}", capsys.readouterr().out, flags=re.M)
