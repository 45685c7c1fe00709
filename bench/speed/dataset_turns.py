"""The loop of the workload "dataset", which is the same for both sides. It imports no library of either side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench.dataset_loading import write_rows
from bench.speed.turns import Setting, Turns

Load = Callable[[Path, Path, int], tuple[int, int]]
"""Loads a file into a folder that is new, and takes some rows of a shuffled order: (file, folder, rows to take) ->
(rows of the file, rows taken)."""


def load_in_turns(setting: Setting, turns: Turns, load: Load) -> None:
    """Loads the same JSON lines file once per turn. Tokens are rows."""
    size = setting.rows[0]
    path = Path(setting.folder, "rows.jsonl")
    write_rows(path, size["rows"])
    step = 0
    while turns.begin():
        rows, taken = load(path, Path(setting.folder, f"loaded-{step}"), size["chosen"])
        assert taken == size["chosen"]
        turns.end(rows)
        step += 1
