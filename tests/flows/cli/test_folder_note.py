"""Tests of the note before a command in a folder below the one that has the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.cli.main import note_of_folder


def test_a_command_below_the_folder_of_a_store_says_so(tmp_path: Path) -> None:
    below = tmp_path / "notes" / "today"
    below.mkdir(parents=True)
    (tmp_path / "ostinato-data").mkdir()
    note = note_of_folder(below, ["runs", "ls"])
    assert note is not None and note.startswith(f"{below} has none of .ostinato, ostinato-data, ostinato-logs")
    assert note.endswith(f"{tmp_path} has ostinato-data: to use these, cd {tmp_path}")
    assert note_of_folder(tmp_path, ["runs", "ls"]) is None
    # the nearest one
    (tmp_path / "notes" / ".ostinato").mkdir()
    assert str(note_of_folder(below, ["demo"])).endswith(f"cd {tmp_path / 'notes'}")
    (below / ".ostinato").mkdir()
    assert note_of_folder(below, ["demo"]) is None


@pytest.mark.parametrize(
    "words",
    [[], ["config", "grpo"], ["runs", "--help"], ["runs", "ls", "--storage", "x"], ["runs", "ls", "--storage=x"]],
)
def test_a_command_that_uses_no_such_folder_says_nothing(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "ostinato-data").mkdir()
    (tmp_path / "below").mkdir()
    assert note_of_folder(tmp_path / "below", words) is None
