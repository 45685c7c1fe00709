"""Runs the recipe of a curriculum over a mixture as it stands, with the tiny model."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.chain.records import Chain
from storage.store.objects import open_store
from tests.docs.markdown import ROOT


@pytest.mark.slow
def test_the_recipe_of_a_curriculum_over_a_mixture(
    open_page: Callable[[str], Path], prefect_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = open_page("docs/data.md")
    name = "examples/curriculum_mixture.py"
    assert len((ROOT / name).read_text().splitlines()) < 60
    runpy.run_path(name, run_name="__main__")
    output = capsys.readouterr().out
    assert "sums-train: 636 prompts, weight 3, curriculum\nproducts-train: 81 prompts, weight 1, shuffled\n" in output
    assert output.splitlines()[-1].startswith("arithmetic@")
    # six sums and two products in each of the four steps
    head = Chain(open_store(str(folder / "ostinato-data")), "arithmetic-1", "0-grpo", "policy").record(4)
    assert head is not None and (head.request.cursor_out["drawn_0"], head.request.cursor_out["drawn_1"]) == (24, 8)
