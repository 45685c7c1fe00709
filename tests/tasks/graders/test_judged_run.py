"""Tests of a whole run with a judge: a repetition of the run gives the same grades and the same chain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.configs.common import GRPOConfig
from flows.grpo import grpo
from storage.chain.listing import list_runs
from storage.chain.records import Chain
from storage.store.objects import open_store
from tests.fixtures.toy import toy_config


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
async def test_a_run_graded_by_a_judge_is_made_again_to_the_byte(tmp_path: Path, tiny_folder: Path) -> None:
    judge: dict[str, Any] = {
        "path": "tasks.graders.range_judge:RangeJudgeGrader",
        "arguments": {
            "grader_key": "judge", "model": str(tiny_folder), "criteria": "Is it a digit?", "score_range": [1, 3],
            "evaluation_steps": ["Look."],
        },
    }  # fmt: skip

    async def digests(run: str) -> list[str | None]:
        config = toy_config(tmp_path / run, tiny_folder, run=run, grader=judge, algorithm__steps=2)
        await grpo(GRPOConfig.model_validate(config))
        store = open_store(tmp_path / run / "data")
        assert sorted(name for name in list_runs(store) if not name.startswith("served/")) == [run]
        records = list(Chain(store, run, "0-grpo", "policy").records(0, 2))
        assert len(records) == 2 and all(record.updates == 1 for record in records)
        return [record.weights_digest for record in records]

    for run in ("one", "two"):
        (tmp_path / run).mkdir()
    first = await digests("one")
    assert None not in first and first[0] != first[1]  # the judge's grades differ, so the weights moved
    assert await digests("two") == first
