"""Fixtures of the tests of tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.datasets.spec import FileDataset
from tests.fixtures.runs.batch_workspace import BatchWorkspace
from tests.fixtures.runs.task_calls import TaskCalls
from tests.fixtures.toy import write_prompts


@pytest.fixture
async def calls(tmp_path: Path, tiny_folder: Path) -> TaskCalls:
    batches = await BatchWorkspace.create(tmp_path, tiny_folder, run="twice")
    return TaskCalls(batches, FileDataset(path=str(write_prompts(tmp_path / "prompts.jsonl"))))
