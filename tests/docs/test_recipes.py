"""The recipes in examples/ that need more than the demo, or less: each runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT

RECIPES = {"lora_two_ranks.py": "{'model': 'sums-lora@000004-", "qlora.py": "sums-qlora@000004-"}
"""Files in examples/, and the beginning of what they print."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs(name: str, open_page: Callable[[str], Path], prefect_server: str) -> None:
    if name == "qlora.py":
        pytest.importorskip("bitsandbytes", reason="needs the package bitsandbytes, which the extra qlora has")
    folder = open_page("README.md")
    text = (ROOT / "examples" / name).read_text()
    assert len(text.splitlines()) < 60
    # In a process of its own: Ray stays up as long as the process, and its folder is deleted after this test.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PREFECT_API_URL": prefect_server}
    command = [sys.executable, f"examples/{name}"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(f"^{re.escape(RECIPES[name])}", done.stdout, flags=re.M)


# by hand: of the answers of `old` to the three prompts, 2, 1 and 2 of 3 are right, and of `new`, 3, 2 and 2
STORED_ANSWERS = [
    "old  last-word  0.556", "new  last-word  0.778",
    "old  last-word pass@1  0.556", "new  last-word pass@1  0.778",
    "old  last-word pass@3  1.000", "new  last-word pass@3  1.000",
    "old  last-word majority  0.667", "new  last-word majority  1.000",
]  # fmt: skip


@pytest.mark.slow
def test_the_recipe_of_stored_answers_prints_their_scores(tmp_path: Path, prefect_server: str) -> None:
    program = ROOT / "examples" / "grade_answers.py"
    assert len(program.read_text().splitlines()) < 60
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PREFECT_API_URL": prefect_server}
    # in a process of its own, whose import path begins with the folder of the program, as a user's does
    command = [sys.executable, str(program)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-len(STORED_ANSWERS) :] == STORED_ANSWERS
