"""Tests of training on mixtures: shares, resume and fork in the same bytes, metrics, and the accounting of prompts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import flows.grpo
import flows.training.supervised_loop
from engine.workspace import connect
from flows.catalogue import DPOConfig
from flows.configs.common import SFTConfig
from flows.dpo import dpo
from flows.sft import sft
from storage.chain.fork import fork_run
from storage.inspect.accounting import check_accounting, step_inputs
from storage.store.tables import RowReader
from tests.fixtures.configs import with_changes
from tests.fixtures.preferences import preference_config
from tests.fixtures.runs.flow_runs import FlowRuns, grpo_runs
from tests.fixtures.runs.interruption import Interrupted, interrupt_at
from tests.fixtures.toy import write_prompts
from tests.flows.test_sft_flow import sft_config


def mixture(folder: Path, columns: dict[str, str]) -> dict[str, Any]:
    """Two parts with the shares 3 : 1: five rows as in the file, and three rows from the highest to the lowest."""
    parts = []
    for name, rows, weight in (("even", 5, 3), ("odd", 3, 1)):
        lines = []
        for number in range(rows):
            values = {column: text.format(n=number) for column, text in columns.items()}
            lines.append(json.dumps(values | {"prompt": f"{name} {number}", "level": -number}) + "\n")
        path = folder / f"{name}.jsonl"
        path.write_text("".join(lines))
        parts.append({"dataset": {"kind": "file", "path": str(path), "metadata_columns": ["level"]}, "weight": weight})
    parts[0]["dataset"]["order"] = "file"
    parts[1]["dataset"] |= {"order": "curriculum", "curriculum_column": "level"}
    return {"kind": "mixture", "parts": parts}


def mixed_sft(folder: Path, tiny_folder: Path, **changes: Any) -> dict[str, Any]:
    train = mixture(folder, {"completion": "yes {n}"})
    return sft_config(folder, tiny_folder, **({"data": {"train": train}, "algorithm__steps": 4} | changes))


def prompts_of(runs: FlowRuns, run: str, step: int) -> list[str]:
    """The prompts of a batch of SFT or DPO, in its order."""
    record = runs.records(run)[step]
    dataset = step_inputs(runs.store, record).datasets[0]
    rows = RowReader(runs.store, dataset)
    name_of = {row["id"]: json.loads(row["thread"])["turns"][0]["content"] for row in rows.rows(range(len(rows)))}
    return [name_of[row["group"]] for row in runs.rows(record.request.batch)]


@pytest.mark.slow
def test_sft_on_a_mixture_resumes_and_forks_in_the_same_bytes(
    prefect_server: str, tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = FlowRuns(tmp_path, tiny_folder, sft, SFTConfig, stage="0-sft", make_config=mixed_sft)
    with monkeypatch.context() as patch:
        interrupt_at(patch, flows.training.supervised_loop, "take_gradient_step", step=2)
        with pytest.raises(Interrupted):
            runs.run("interrupted")
    connect.cache_clear()  # after a crash nothing is in memory
    runs.run("interrupted")
    runs.run("whole")
    fork_run(runs.store, "whole", "forked", step=1, code_version="test")
    runs.run("forked")
    for run in ("interrupted", "forked"):
        assert runs.states(run) == runs.states("whole")
        assert runs.digests(run) == runs.digests("whole")

    # three rows of the first part and one of the second in each batch; the parts turn 0 0 1 0
    assert prompts_of(runs, "whole", 0) == ["even 0", "even 1", "odd 2", "even 2"]
    assert prompts_of(runs, "whole", 1) == ["even 3", "even 4", "odd 1", "even 0"]
    assert prompts_of(runs, "whole", 2) == ["even 1", "even 2", "odd 0", "even 3"]
    assert prompts_of(runs, "whole", 3) == ["even 4", "even 0", "odd 2", "even 1"]
    assert [line["by_part"]["even"] for line in runs.metrics("whole")] == [
        {"rows": 3, "epoch": drawn / 5} for drawn in (3, 6, 9, 12)
    ]
    assert runs.metrics("whole")[3]["by_part"]["odd"] == {"rows": 1, "epoch": 4 / 3}
    for record in runs.records("whole"):
        assert check_accounting(runs.store, record) == []


def test_an_epoch_of_a_mixture_has_the_rows_of_its_parts(
    prefect_server: str, tmp_path: Path, tiny_folder: Path
) -> None:
    """One epoch, the default of SFT, is 5 + 3 rows, in batches of 8 here: six of the first part, two of the second."""
    runs = FlowRuns(tmp_path, tiny_folder, sft, SFTConfig, stage="0-sft", make_config=mixed_sft)
    [record] = runs.train("r", algorithm={"samples_per_batch": 8})
    assert Counter(prompt.split()[0] for prompt in prompts_of(runs, "r", 0)) == {"even": 6, "odd": 2}
    assert record.request.cursor_out == {
        "epoch": 1, "index": 0, "drawn_0": 6, "drawn_1": 2, "owed_0": 0, "owed_1": 0, "weights": 4,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_grpo_on_a_mixture_resumes_in_the_same_bytes(
    prefect_server: str, tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    runs = grpo_runs(tmp_path, tiny_folder)
    changes = {"data": {"train": mixture(tmp_path, {})}, "rules": {"max_staleness": staleness}}
    changes["regularisation"] = {"importance_cap": 2.0}
    with monkeypatch.context() as patch:
        interrupt_at(patch, flows.grpo, "take_gradient_step", step=2)
        with pytest.raises(Interrupted):
            runs.run("interrupted", **changes)
    connect.cache_clear()
    runs.run("interrupted", **changes)
    runs.run("whole", **changes)
    assert runs.digests("interrupted") == runs.digests("whole")
    assert runs.states("interrupted") == runs.states("whole")
    assert [line["by_part"]["odd"]["rows"] for line in runs.metrics("whole")] == [1, 1, 1, 1]
    for record in runs.records("whole"):
        assert check_accounting(runs.store, record) == []


@pytest.mark.slow
def test_dpo_on_a_mixture(prefect_server: str, tmp_path: Path, tiny_folder: Path) -> None:
    def config(folder: Path, tiny_folder: Path, **changes: Any) -> dict[str, Any]:
        train = mixture(folder, {"chosen": "yes {n}", "rejected": "no {n}"})
        return with_changes(preference_config(folder, tiny_folder), {"data": {"train": train}} | changes)

    runs = FlowRuns(tmp_path, tiny_folder, dpo, DPOConfig, stage="0-dpo", make_config=config)
    records = runs.train("d", algorithm={"steps": 2, "samples_per_batch": 4})
    assert [record.request.cursor_out["drawn_1"] for record in records] == [1, 2]
    assert len(runs.rows(records[0].request.batch)) == 8  # two conversations per pair


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_grpo_on_pools_resumes_and_forks_in_the_same_bytes(
    prefect_server: str, tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    """Half of a step's four prompts are new, and half come from the pools once they are measured."""
    pools = {"easy": 0.25, "hard": 0.125, "unsolved": 0.125, "correct_from": 0.5, "return_after": 1}
    runs = grpo_runs(tmp_path, tiny_folder, algorithm__samples_per_batch=16, algorithm__steps=5)
    train = {"kind": "file", "path": str(write_prompts(tmp_path / "prompts.jsonl")), "order": "pools", "pools": pools}
    changes: dict[str, Any] = {"data": {"train": train}}
    changes |= {"rules": {"max_staleness": staleness}, "regularisation": {"importance_cap": 2.0}}
    with monkeypatch.context() as patch:
        interrupt_at(patch, flows.grpo, "take_gradient_step", step=3)
        with pytest.raises(Interrupted):
            runs.run("interrupted", **changes)
    connect.cache_clear()
    runs.run("interrupted", **changes)
    connect.cache_clear()
    runs.run("whole", **changes)
    fork_run(runs.store, "whole", "forked", step=2, code_version="test")
    connect.cache_clear()
    runs.run("forked", **changes)
    for run in ("interrupted", "forked"):
        assert runs.states(run) == runs.states("whole")
    drawn = []
    for record in runs.records("whole"):
        assert check_accounting(runs.store, record) == []
        shards = step_inputs(runs.store, record).rollouts
        drawn.append({row["prompt_index"] for shard in shards for row in runs.rows(shard)})
        assert len(drawn[-1]) == 4
    # prompts are drawn again from the step on that knows the grades of the first one, and never before
    assert not any(drawn[0] & drawn[step] for step in range(1, 1 + staleness))
    assert drawn[0] & (drawn[1 + staleness] | drawn[2 + staleness])
