"""Tests of interrupted `grpo` runs on a toy: they resume, repeat no committed work, and end in the same bytes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

import flows.grpo
from engine.local.engine import LocalEngine
from engine.workspace import connect
from storage.chain.leases import is_held
from storage.errors import SemanticMismatch
from tests.fixtures.runs.flow_runs import FlowRuns, grpo_runs
from tests.fixtures.runs.interruption import Interrupted, interrupt_at, keep_leases
from tests.fixtures.worklog import events


@pytest.fixture
def runs(prefect_server: str, tmp_path: Path, tiny_folder: Path) -> FlowRuns:
    return grpo_runs(tmp_path, tiny_folder)


def steps_of(worklog: Path, event: str) -> list[int]:
    """The steps in the lines of an event, in order."""
    return [line["step"] for line in events(worklog, event)]


@pytest.mark.slow
def test_a_run_that_fails_gives_its_lease_back_and_leaves_nothing_to_redo(
    runs: FlowRuns, worklog: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = {"frequency": None, "recovery_steps": None}
    interrupt_at(monkeypatch, flows.grpo, "take_gradient_step", step=3)
    with pytest.raises(Interrupted):
        runs.run("failed", algorithm__steps=5, checkpoints=checkpoints)
    store = runs.chain("failed").store
    assert not is_held(store, "failed")
    config = runs.config("failed")
    engine = cast(LocalEngine, connect(config.storage.url, config.engine))
    asyncio.run(engine.close(checkpoint=False))  # waits for the upload that leaving began
    connect.cache_clear()
    worklog.write_text("")
    result = runs.run("failed", algorithm__steps=5, checkpoints=checkpoints)
    assert events(worklog, "redo") == []
    assert 3 in steps_of(worklog, "restore")
    assert result["policy"].split("@")[1].startswith("5#")
    assert not is_held(store, "failed")


@pytest.mark.parametrize(
    ("task_name", "recovery_steps", "restored", "redone", "shards_again"),
    [
        ("prepare_batch", 2, 2, [3], {0}),  # from the checkpoint after step 2; the shards of step 4 are there
        pytest.param(  # from the base model: no step is lost without a checkpoint
            "take_gradient_step", None, 0, [1, 2, 3], {0}, marks=pytest.mark.slow
        ),
        pytest.param(  # of the two shards, one never ran, and one was on its way
            "generate_rollouts", 1, 3, [], {1, 2}, marks=pytest.mark.slow
        ),
    ],
)
def test_an_interrupted_run_resumes_and_ends_in_the_same_bytes(
    runs: FlowRuns, worklog: Path, monkeypatch: pytest.MonkeyPatch,
    task_name: str, recovery_steps: int | None, restored: int, redone: list[int], shards_again: set[int],
) -> None:  # fmt: skip
    checkpoints = {"frequency": None, "recovery_steps": recovery_steps, "keep_last": 9}
    interrupt_at(monkeypatch, flows.grpo, task_name, step=3)
    keep_leases(monkeypatch)
    with pytest.raises(Interrupted):
        runs.run("interrupted", algorithm__steps=5, checkpoints=checkpoints)
    assert list(runs.chain("interrupted").steps()) == [1, 2, 3]
    connect.cache_clear()  # after a crash nothing is in memory
    worklog.write_text("")
    result = runs.run("interrupted", algorithm__steps=5, checkpoints=checkpoints)
    assert [line["resumed_from"] for line in events(worklog, "start")] == [3]
    assert steps_of(worklog, "redo") == redone
    # The reference of the KL term, step 0, is restored too, at its first use.
    assert restored in steps_of(worklog, "restore")
    assert steps_of(worklog, "step") == [4, 5]
    assert steps_of(worklog, "shard").count(3) in shards_again
    assert result["policy"].split("@")[1].startswith("5#")

    whole = runs.run("whole", algorithm__steps=5)
    assert whole["policy"].split("#")[1] == result["policy"].split("#")[1]
    assert runs.digests("interrupted") == runs.digests("whole")
    assert None not in runs.digests("whole") and len(set(runs.digests("whole"))) == 5
    assert [line["resumed"] for line in runs.metrics("interrupted")] == [False, False, False, True, False]


@pytest.mark.slow
def test_a_run_of_an_adapter_publishes_a_whole_model_and_resumes_to_the_same_bytes(
    runs: FlowRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {"algorithm__steps": 3, "model__adapter": {"rank": 2}, "model__publish_as": "adapted"}
    whole = runs.run("adapter", **changes)
    assert len(set(runs.digests("adapter"))) == 3
    interrupt_at(monkeypatch, flows.grpo, "take_gradient_step", step=2)
    with pytest.raises(Interrupted):
        runs.run("again", **changes)
    connect.cache_clear()
    assert runs.run("again", **changes)["policy"].split("#")[1] == whole["policy"].split("#")[1]
    assert runs.digests("again") == runs.digests("adapter")
    folder = next((runs.data / "models" / "adapted").glob("000003-*"))
    assert {"model.safetensors", "tokenizer.json", "adapter"} <= {path.name for path in folder.iterdir()}
    assert (folder / "adapter" / "adapter_config.json").is_file()
    with pytest.raises(SemanticMismatch, match=r"model\.adapter\.rank: the run has 2, given 4"):
        runs.run("adapter", **changes | {"model__adapter": {"rank": 4}})
