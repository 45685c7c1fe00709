"""Tests of `sft` from end to end: the loss falls, the model learns where an answer ends, and the run resumes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest

import flows.training.supervised_loop
from engine.errors import BadSpec, SampleTooLong
from engine.workspace import connect
from flows.configs.common import SFTConfig
from flows.sft import SFT, sft
from storage.chain.checkpoint_names import named_checkpoints
from storage.chain.fork import fork_run
from storage.chain.listing import stored_checkpoint_steps
from storage.inspect.accounting import step_inputs
from storage.store.artifacts import read_manifest
from storage.store.tables import RowReader
from tests.fixtures.configs import with_changes
from tests.fixtures.runs.flow_runs import FlowRuns
from tests.fixtures.runs.interruption import Interrupted, interrupt_at

STAGE = "0-sft"
ANSWER = "yes"


def sft_config(folder: Path, tiny_folder: Path, **changes: Any) -> dict[str, Any]:
    """A config over eight rows of two prompts with one answer."""
    rows = [{"prompt": f"ok{n % 2}?", "completion": ANSWER} for n in range(8)]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config: dict[str, Any] = {
        "model": {"key": str(tiny_folder), "publish_as": "toy-sft"},
        "data": {"train": {"kind": "file", "path": str(path)}},
        "algorithm": {"samples_per_batch": 4},
        "optimizer": {"lr": 3e-3, "schedule": "constant"},
        "checkpoints": {"frequency": None, "recovery_steps": 2, "max_redo_seconds": 0},
        "engine": {"deterministic": True, "threads": 1},
        "storage": {"url": str(folder / "data")},
    }
    return with_changes(config, changes)


def sft_runs(folder: Path, tiny_folder: Path) -> FlowRuns:
    return FlowRuns(folder, tiny_folder, sft, SFTConfig, stage=STAGE, make_config=sft_config)


@pytest.fixture
def runs(prefect_server: str, tmp_path: Path, tiny_folder: Path) -> FlowRuns:
    return sft_runs(tmp_path, tiny_folder)


@pytest.fixture(scope="module")
def learnt(
    prefect_server: str, tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path
) -> tuple[FlowRuns, dict[str, Any]]:
    """Runs with one finished run, `learnt`, of 20 steps, and its result."""
    runs = sft_runs(tmp_path_factory.mktemp("sft"), tiny_folder)
    return runs, runs.run("learnt", algorithm__steps=20)


@pytest.mark.parametrize(
    ("rows", "mixed", "size", "note"),
    [(1096, False, 1096, ["1,096 rows, and samples_per_batch=2048: every step is the whole dataset"]),
     (1096, True, 1096, []), (2048, False, 2048, []), (5000, False, 2048, [])],
)  # fmt: skip
def test_a_batch_has_at_most_the_rows_of_the_dataset(rows: int, mixed: bool, size: int, note: list[str]) -> None:
    notes: list[str] = []
    loop: Any = SimpleNamespace(samples_per_batch=2048, logger=SimpleNamespace(note=notes.append))
    assert SFT.batch_size(loop, rows, mixed=mixed) == size
    assert notes == note


def test_the_loss_of_a_repeated_conversation_falls(learnt: tuple[FlowRuns, dict[str, Any]]) -> None:
    runs, _ = learnt
    lines = runs.metrics("learnt")
    losses = [line["loss"] for line in lines]
    assert len(losses) == 20
    assert 4.0 < losses[0] < 7.0  # an untrained model spreads over 261 tokens: ln 261 = 5.56
    assert losses[-1] < 0.1
    assert losses[10] < losses[5] < losses[0]
    assert all(line["reward_mean"] is None and line["masked"] == 0 for line in lines)


def test_exactly_the_answer_and_its_end_are_trained(learnt: tuple[FlowRuns, dict[str, Any]]) -> None:
    from transformers import AutoTokenizer

    runs, result = learnt
    tokenizer = AutoTokenizer.from_pretrained(runs.published(result))
    batch = runs.tables("learnt", "batch")[0]
    assert len(batch) == 4
    for _, row in batch.iterrows():
        trained = [int(token) for token, weight in zip(row["token_ids"], row["loss_mask"], strict=True) if weight > 0]
        assert trained[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(trained[:-1]) == ANSWER
        assert len(trained) == len(ANSWER) + 1  # bytes are tokens
        # what is trained is one run of tokens, after the prompt
        assert "ok" in tokenizer.decode(row["token_ids"][: list(row["loss_mask"] > 0).index(True)])


def test_the_published_model_says_the_answer_and_stops(learnt: tuple[FlowRuns, dict[str, Any]]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    runs, result = learnt
    published = runs.published(result)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(published), AutoTokenizer.from_pretrained(published)
    messages = [{"role": "user", "content": "ok1?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == ANSWER
    assert len(answer) == len(ANSWER) + 1 and int(answer[-1]) == tokenizer.eos_token_id


def first_batch(runs: FlowRuns, run: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of the first batch, and the facts in its manifest."""
    batch = runs.records(run)[0].request.batch
    return runs.rows(batch), dict(read_manifest(runs.store, batch.key).extra)


@pytest.mark.parametrize("truncation", ["left", pytest.param("right", marks=pytest.mark.slow)])
def test_conversations_that_are_too_long_are_cut(learnt: tuple[FlowRuns, dict[str, Any]], truncation: str) -> None:
    runs, _ = learnt
    whole_rows, facts = first_batch(runs, "learnt")
    length = len(whole_rows[0]["token_ids"])
    assert {len(row["token_ids"]) for row in whole_rows} == {length} and "cut" not in facts

    # Two tokens of every conversation are too many. The training rows are also held out.
    limit = length - 2
    heldout = {"kind": "file", "path": str(runs.folder / "rows.jsonl")}
    cut = {"algorithm__max_tokens": limit, "algorithm__truncation": truncation}
    runs.run(truncation, algorithm__steps=1, data__heldout=heldout, **cut)
    rows, facts = first_batch(runs, truncation)
    remaining = slice(2, None) if truncation == "left" else slice(limit)
    assert [row["token_ids"] for row in rows] == [row["token_ids"][remaining] for row in whole_rows]
    assert [row["loss_mask"] for row in rows] == [row["loss_mask"][remaining] for row in whole_rows]
    assert facts["cut"] == 4

    # next to these tables is the batch of the held-out rows
    evaluations = [path for path in runs.files(truncation, "evaluations") if not path.name.startswith("held-out")]
    trained_tokens = sum(rows[0]["loss_mask"])
    assert evaluations
    for path in evaluations:
        assert set(pandas.read_parquet(path)["tokens"]) == {trained_tokens}


def test_a_conversation_that_is_too_long_fails_the_run_by_its_row(runs: FlowRuns) -> None:
    with pytest.raises(SampleTooLong, match=r"row [1-9]\d* of .*\.jsonl has \d+ tokens, and at most 9 fit"):
        runs.run("long", algorithm__max_tokens=9)
    with pytest.raises(BadSpec, match="4 were truncated and 0 dropped"):  # the prompt alone is longer
        runs.run("short", algorithm__max_tokens=9, algorithm__truncation="right")


def test_the_lengths_decide_the_result(tiny_folder: Path, tmp_path: Path) -> None:
    runs = sft_runs(tmp_path, tiny_folder)
    plain = runs.config("a").semantic()["algorithm"]
    assert (plain["max_tokens"], plain["truncation"]) == (None, "error")
    cut = runs.config("a", algorithm__max_tokens=64, algorithm__truncation="left").semantic()["algorithm"]
    assert cut == plain | {"max_tokens": 64, "truncation": "left"}


@pytest.mark.slow
def test_an_interrupted_run_resumes_and_ends_in_the_same_bytes(
    runs: FlowRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(monkeypatch, flows.training.supervised_loop, "take_gradient_step", step=3)
    with pytest.raises(Interrupted):
        runs.run("interrupted", algorithm__steps=5)
    assert list(runs.chain("interrupted").steps()) == [1, 2, 3]
    connect.cache_clear()  # after a crash nothing is in memory
    runs.run("interrupted", algorithm__steps=5)
    runs.run("whole", algorithm__steps=5)
    assert runs.digests("interrupted") == runs.digests("whole")
    assert len(set(runs.digests("whole")) - {None}) == 5
    assert [line["resumed"] for line in runs.metrics("interrupted")] == [False, False, False, True, False]


@pytest.mark.parametrize(
    ("algorithm", "steps"),
    [
        pytest.param({"epochs": 2}, 4, marks=pytest.mark.slow),  # 16 rows in batches of 4
        pytest.param({"epochs": 1, "samples_per_batch": 3}, 3, marks=pytest.mark.slow),  # 8 rows: and one of the next
        ({}, 2),  # neither: one epoch
        pytest.param({"samples_per_batch": 512}, 1, marks=pytest.mark.slow),  # a batch larger than the dataset is it
        pytest.param({"steps": 3}, 3, marks=pytest.mark.slow),
    ],
)
def test_how_many_steps_a_run_has(runs: FlowRuns, algorithm: dict[str, Any], steps: int) -> None:
    runs.run("r", algorithm={"samples_per_batch": 4} | algorithm)
    assert list(runs.chain("r").steps()) == list(range(1, steps + 1))


def test_the_rows_are_trained_in_the_order_of_the_file(runs: FlowRuns) -> None:
    in_order = {"kind": "file", "path": str(runs.folder / "rows.jsonl"), "order": "file"}
    runs.run("r", algorithm__steps=1, data__train=in_order)
    record = runs.records("r")[0]
    dataset = step_inputs(runs.store, record).datasets[0]
    names = [row["id"] for row in RowReader(runs.store, dataset).rows(range(4))]
    assert [row["group"] for row in runs.rows(record.request.batch)] == names
    assert record.request.cursor_out == {"epoch": 0, "index": 4}


def test_steps_and_epochs_together_are_refused() -> None:
    with pytest.raises(ValueError, match="both max_steps=2 and epochs=1 were given; give one"):
        SFT([], None, epochs=1, max_steps=2)  # type: ignore[arg-type]


def test_a_split_holds_rows_out_of_the_training(runs: FlowRuns, capsys: pytest.CaptureFixture[str]) -> None:
    result = runs.run("split", data__heldout={"split": 1e-3}, algorithm__steps=1)
    # one of the two prompts is held out with its four rows
    dataset = step_inputs(runs.store, runs.records("split")[0]).datasets[0]
    assert dataset.key.startswith("datasets/rows-train/") and dataset.rows == 4
    assert list(runs.store.list("datasets/rows-heldout/"))
    assert "held out: 4 rows of rows (split: 0.001)" in capsys.readouterr().out
    assert runs.run("split", data__heldout={"split": 1e-3}, algorithm__steps=1) == result


def test_a_quick_run_keeps_no_checkpoint_and_is_redone_for_a_fork(runs: FlowRuns) -> None:
    runs.run("whole", algorithm__steps=2)
    # the last step has the name of the whole run, as it has by default
    runs.run("quick", algorithm__steps=2, checkpoints__max_redo_seconds=600, checkpoints__frequency=0.5)
    steps = {run: stored_checkpoint_steps(runs.chain(run)) for run in ("whole", "quick")}
    assert steps == {"whole": [2], "quick": []}
    # a fork at the last step continues with the same weights, which are redone
    for run in ("whole", "quick"):
        connect.cache_clear()
        fork_run(runs.store, run, f"{run}-longer", step=2, code_version="test")
        runs.run(f"{run}-longer", algorithm__steps=3)
    assert named_checkpoints(runs.store, "quick")  # its name stays
    assert runs.digests("quick-longer") == runs.digests("whole-longer") and len(runs.digests("quick-longer")) == 3
