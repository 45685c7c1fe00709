"""Tests of `grpo` from end to end on a toy: the results of a run, and what a second run under the same key does.
`test_grpo_resume` tests interrupted runs."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

import tasks.report
from flows.configs.common import GRPOConfig
from flows.grpo import grpo
from storage.errors import SemanticMismatch
from storage.store import keys
from tests.fixtures.prefect import prefect_client
from tests.fixtures.runs.flow_runs import FlowRuns, grpo_runs
from tests.fixtures.runs.task_graph import RECORDING_SECONDS
from tests.fixtures.toy import toy_config, write_prompts
from tests.fixtures.waiting import wait_until
from tests.fixtures.worklog import events

HELDOUT_PROMPTS = 4


@pytest.fixture
def runs(prefect_server: str, tmp_path: Path, tiny_folder: Path) -> FlowRuns:
    return grpo_runs(tmp_path, tiny_folder)


@pytest.fixture(scope="module")
def finished(
    prefect_server: str, tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path
) -> tuple[FlowRuns, dict[str, Any]]:
    """Runs with one finished run of three steps, `done`, and its result. Tests do not change it."""
    runs = grpo_runs(tmp_path_factory.mktemp("finished"), tiny_folder)
    write_prompts(runs.folder / "heldout.jsonl")
    return runs, runs.run("done", **three_steps(runs))


def three_steps(runs: FlowRuns) -> dict[str, Any]:
    """The changes of the config of the run `done`."""
    return {"algorithm__steps": 3, "data__heldout": heldout(runs), "model__name": "policy"}


def heldout(runs: FlowRuns) -> dict[str, Any]:
    return {"kind": "file", "path": str(runs.folder / "heldout.jsonl"), "limit": HELDOUT_PROMPTS}


# -- what a run leaves behind ------------------------------------------------------------------------------------


def test_each_step_is_one_record_and_one_line_of_metrics(finished: tuple[FlowRuns, dict[str, Any]]) -> None:
    runs, result = finished
    assert list(runs.chain("done").steps()) == [1, 2, 3]
    head = runs.chain("done").head()
    assert result["policy"] == head.uri
    metrics = runs.metrics("done")
    assert [line["step"] for line in metrics] == [0, 1, 2]
    assert all(line["completions"] == 16 and line["masked"] == 0 for line in metrics)
    assert [line["prompts"] for line in metrics[:2]] == [4, 4]
    assert all(line["completion_length_mean"] == 6.0 and line["completion_tokens"] == 96 for line in metrics)
    assert [line["resumed"] for line in metrics] == [False, False, False]
    # the first step is taken from the reference itself
    assert metrics[0]["kl_mean"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[2]["kl_mean"] > 1e-6


def test_steps_change_the_weights_and_spend_prompts_once(finished: tuple[FlowRuns, dict[str, Any]]) -> None:
    runs, _ = finished
    assert len(set(runs.digests("done"))) == 3
    records = list(runs.chain("done").records(0, 3))
    # four prompts a step, ten in an epoch
    assert [record.request.cursor_in for record in records] == [
        {"epoch": 0, "index": 0}, {"epoch": 0, "index": 4}, {"epoch": 0, "index": 8},
    ]  # fmt: skip
    assert records[-1].cursor_out == {"epoch": 1, "index": 2}
    rollouts = pandas.concat(runs.tables("done", "rollouts"))
    # Four completions of each prompt. Two prompts are sampled again in epoch 1.
    assert sorted(rollouts["prompt_index"].value_counts()) == [4] * 8 + [8] * 2
    assert rollouts["seed"].nunique() == 48


def test_tables_open_with_pandas(finished: tuple[FlowRuns, dict[str, Any]]) -> None:
    runs, _ = finished
    rollouts, graded = runs.files("done", "steps/000000/rollouts"), runs.files("done", "steps/000000/graded")
    assert len(rollouts) == len(graded) == 2  # two shards of two prompts
    for sampled_file, graded_file in zip(rollouts, graded, strict=True):
        sampled, grades = pandas.read_parquet(sampled_file), pandas.read_parquet(graded_file)
        assert len(sampled) == 8
        assert sampled[["prompt_id", "completion"]].equals(grades[["prompt_id", "completion"]])
        for text, thread, reward in zip(sampled["text"], sampled["thread"], grades["reward"], strict=True):
            assert json.loads(thread)["turns"][0]["role"] == "user"
            assert reward == pytest.approx(len([c for c in text[:6] if ord(c) in range(0, 1 << 21, 2)]) / 6)
    (batch_file,) = runs.files("done", "steps/000000/batch")
    batch = pandas.read_parquet(batch_file)
    assert len(batch) == 16
    for _, row in batch.iterrows():
        trained = int((row["loss_mask"] > 0).sum())
        assert trained == 6
        assert len(row["token_ids"]) == len(row["loss_mask"])
        for column in ("advantages", "reference_logprobs", "sampler_logprobs"):
            assert len(row[column]) == trained
        assert row["old_logprobs"] is None  # the batch is one update, whose forward pass gives them
        # at step 0 the reference is the policy: the same weights in the same precision; the sampler's distribution
        # leaves end-of-sequence out of six tokens (min_new_tokens), which an untrained model gives about one
        # probability of 261
        gap = row["sampler_logprobs"] - row["reference_logprobs"]
        assert gap.min() > 0 and gap.max() < 2 / 261
    # the step measures the same gap in its own forward pass
    gaps = np.concatenate(list(batch["sampler_logprobs"] - batch["reference_logprobs"]))
    assert runs.metrics("done")[0]["logprob_gap"] == pytest.approx(gaps.mean(), rel=1e-3)
    # a group's advantages sum to zero, and some group teaches something
    batch["advantage"] = [row[0] for row in batch["advantages"]]
    assert batch.groupby("group")["advantage"].sum().abs().max() < 1e-5
    assert batch["advantage"].abs().max() > 0.5


def test_the_published_model_is_a_plain_folder_that_answers(finished: tuple[FlowRuns, dict[str, Any]]) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    runs, result = finished
    folder = runs.published(result)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "3"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert answer.shape[1] == prompt["input_ids"].shape[1] + 4
    trained, base = load_file(folder / "model.safetensors"), load_file(runs.model_folder / "model.safetensors")
    assert any(not torch.equal(trained[name].float(), base[name].float()) for name in base)


def test_heldout_prompts_are_evaluated_before_and_after_and_compared_in_pairs(
    finished: tuple[FlowRuns, dict[str, Any]],
) -> None:
    runs, result = finished
    first, second = runs.files("done", "evaluations")
    before, after = pandas.read_parquet(first), pandas.read_parquet(second)
    assert first.name.startswith("000000-") and second.name.startswith("000003-")
    assert list(before["prompt_id"]) == list(after["prompt_id"])
    assert result["heldout"]["n"] == len(before) == HELDOUT_PROMPTS
    assert result["heldout"]["before_mean"] == pytest.approx(before["reward"].mean())
    assert result["heldout"]["after_mean"] == pytest.approx(after["reward"].mean())
    assert result["heldout"]["difference"] == pytest.approx((after["reward"] - before["reward"]).mean())


def test_the_report_stands_beside_the_run(finished: tuple[FlowRuns, dict[str, Any]]) -> None:
    runs, result = finished
    page = Path(result["report"]).read_text()
    assert Path(result["report"]) == runs.data / keys.report("done")
    assert "done" in page and "<html" in page.lower()


@pytest.mark.slow
def test_the_report_shows_as_many_samples_as_asked_for(runs: FlowRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    write_prompts(runs.folder / "heldout.jsonl")
    seen = []
    render = tasks.report.render_report
    monkeypatch.setattr(tasks.report, "render_report", lambda data: seen.append(data) or render(data))
    runs.run("few", algorithm__steps=1, data__heldout=heldout(runs), evaluation={"samples_shown": 1})
    assert [(len(data.samples_before), len(data.samples_after)) for data in seen] == [(1, 1)]


# -- the same key again ------------------------------------------------------------------------------------------


def test_a_finished_key_answers_at_once(finished: tuple[FlowRuns, dict[str, Any]], worklog: Path) -> None:
    runs, result = finished
    config = json.loads((runs.data / keys.run_json("done")).read_text())["semantic"]
    assert config["algorithm"]["steps"] == 3
    assert runs.run("done", **three_steps(runs)) == result
    assert [line["event"] for line in events(worklog)] == ["open"]


def test_another_hyper_parameter_under_the_key_is_refused_with_both_values(
    finished: tuple[FlowRuns, dict[str, Any]], worklog: Path
) -> None:
    runs, _ = finished
    with pytest.raises(SemanticMismatch) as refused:
        runs.run("done", optimizer__lr=5e-4, algorithm__clip_range=0.3, **three_steps(runs))
    message = str(refused.value)
    assert "optimizer.lr: the run has 0.001, given 0.0005" in message
    assert "algorithm.clip_range: the run has 0.2, given 0.3" in message
    assert "fork" in message and "'done'" in message
    assert message.count("the run has") == 2
    assert worklog.read_text() == ""


@pytest.mark.slow
def test_another_dataset_under_the_same_path_is_refused(runs: FlowRuns) -> None:
    runs.run("k", algorithm__steps=1)
    config = runs.config("k", algorithm__steps=1)
    write_prompts(runs.folder / "prompts.jsonl", repeats=2)
    with pytest.raises(SemanticMismatch, match=r"inputs\.dataset"):
        asyncio.run(grpo(config))


def test_what_does_not_decide_the_result_may_change(
    finished: tuple[FlowRuns, dict[str, Any]], worklog: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    runs, result = finished
    monkeypatch.setenv("OSTINATO_CODE_VERSION", "another-commit")
    config = toy_config(runs.folder, runs.model_folder, run="done", **three_steps(runs))
    config["grader"] = {
        "path": "tests.fixtures.grading:even_share", "timeout_seconds": 5.0, "retries": 0, "concurrency": 2,
        "max_masked_fraction": 1.0,
    }  # fmt: skip
    config["checkpoints"] = {"frequency": 0.5, "keep_last": 1}
    config["model"]["publish_as"] = "another-name"
    config["engine"]["max_rows"] = 8
    config["data"]["heldout"] = None
    assert asyncio.run(grpo(GRPOConfig.model_validate(config))) == result
    output = " ".join(capsys.readouterr().out.split())
    assert "warning: code version" in output and "another-commit" in output
    assert not events(worklog, "step", "shard")


@pytest.mark.slow
def test_another_seed_is_another_run(runs: FlowRuns) -> None:
    runs.run("seed-0", algorithm__steps=1)
    runs.run("seed-1", algorithm__steps=1, seed=1)
    assert runs.digests("seed-0") != runs.digests("seed-1")


# -- Prefect -----------------------------------------------------------------------------------------------------


def test_prefect_has_the_flow_run_and_every_task_run(runs: FlowRuns, prefect_server: str) -> None:
    seed = time.time_ns() % 1_000_000_007  # no other run on this server has this name
    runs.run("recorded", algorithm__steps=2, seed=seed)
    title = runs.config("recorded", seed=seed).title
    expected = {
        "load-prompts": 1, "rollout": 4, "grade": 4, "batch": 2, "step": 2, "checkpoint": 1, "publish": 1, "report": 1,
    }  # fmt: skip
    counts, states = _task_runs(prefect_server, title, expected)
    assert counts == expected | {"checkpoint": counts.get("checkpoint", 0)}
    assert counts["checkpoint"] >= 1
    assert states == {"COMPLETED"}


def test_the_page_and_the_log_have_the_evaluations_of_the_report(
    finished: tuple[FlowRuns, dict[str, Any]], prefect_server: str
) -> None:
    runs, result = finished
    heldout, title = result["heldout"], runs.config("done", **three_steps(runs)).title
    before, after, change = (heldout[name] for name in ("before_mean", "after_mean", "difference"))
    assert f"{before:.3f} → {after:.3f}" in Path(result["report"]).read_text()
    with prefect_client(prefect_server) as client:

        def ask(what: str, **query: Any) -> list[dict[str, Any]]:
            return client.post(f"/{what}/filter", json=query).json()  # type: ignore[no-any-return]

        stages = {run["id"] for run in ask("flow_runs", flow_runs={"name": {"any_": [title]}})}
        pages = ask("artifacts", artifacts={"key": {"any_": ["training"]}, "flow_run_id": {"any_": list(stages)}})
        (page,) = [page for page in pages if "### Run `done`" in page["data"]]
        assert f"| held-out: reward | {before:.3f} | {after:.3f} | 3 | {change:+.3f} |" in page["data"]
        assert f"- report: `{result['report']}`" in page["data"]

        def lines() -> list[str]:
            logs = ask("logs", logs={"flow_run_id": {"any_": [page["flow_run_id"]]}}, sort="TIMESTAMP_ASC")
            return [log["message"] for log in logs if log["name"] == "ostinato.steps"]

        wait_until(lambda: f"report: {result['report']}" in lines(), seconds=RECORDING_SECONDS)
        assert [line for line in lines() if "held-out" in line or "publish" in line] == [
            f"evaluating {HELDOUT_PROMPTS} held-out prompts before training …",
            f"held-out before training, {HELDOUT_PROMPTS} prompts: reward {before:.4f}",
            f"evaluating {HELDOUT_PROMPTS} held-out prompts after training …",
            f"held-out after training, {HELDOUT_PROMPTS} prompts: "
            f"reward {after:.4f} ({change:+.4f} since before training)",
            "publishing the model as toy …",
            f"published {result['model']}",
        ]


def _task_runs(api: str, flow_run: str, expected: dict[str, int]) -> tuple[dict[str, int], set[str]]:
    """The number of task runs of a finished flow run by the first part of their names, and their states.

    Waits until there are as many of each name as expected, because the server records them after the run."""
    flow_runs: list[dict[str, Any]] = []
    task_runs: list[dict[str, Any]] = []

    def counts() -> Counter[str]:
        names = [task_run["name"] for task_run in task_runs]
        return Counter(next((part for part in expected if name.startswith(part)), name) for name in names)

    def states() -> set[str]:
        return {task_run["state_type"] for task_run in task_runs}

    def recorded() -> bool:
        flow_runs[:] = client.post("/flow_runs/filter", json={"flow_runs": {"name": {"any_": [flow_run]}}}).json()
        ended = [run["id"] for run in flow_runs if run["state_type"] == "COMPLETED"]
        if ended:
            query = {"flow_runs": {"id": {"any_": ended[:1]}}, "limit": 200}
            task_runs[:] = client.post("/task_runs/filter", json=query).json()
        return Counter(expected) <= counts() and states() == {"COMPLETED"}

    with prefect_client(api) as client:
        wait_until(recorded, seconds=RECORDING_SECONDS, interval=0.5, describe=lambda: (counts(), states()))
    assert len(flow_runs) == 1, f"the server has {len(flow_runs)} runs called {flow_run}"
    return dict(counts()), states()
