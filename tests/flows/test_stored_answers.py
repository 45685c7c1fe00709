"""Tests of evaluations of stored answers: scores by hand computation, no engine, and nothing graded twice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

import engine.workspace
import flows.evaluation
from flows.cli.main import app
from flows.configs.evaluation import EvaluationFlowConfig
from flows.evaluation import evaluation
from storage.chain.leases import is_held
from storage.chain.listing import list_runs
from storage.inspect.audit import audit_store
from storage.store.objects import open_store
from tasks.datasets.errors import DatasetError
from tasks.evaluation.statistics import mean_interval, paired_difference
from tests.fixtures.worklog import events

ANSWERS: list[tuple[int, list[str]]] = [
    (1, ["1", "it is 1", "2", "3"]),  # two of four are correct, and 1 has the most votes
    (2, ["3", "3", "2", "4"]),  # one is correct, 3 has the most votes
    (3, ["4", "4.0", "3", "3"]),  # 3 and 4 have two votes each
    (4, ["none", "no", "4", "-"]),  # one number only
    (5, ["0", "1", "2", "3"]),
]
"""The right answer of each prompt, and four answers to it."""
MEANS = [0.5, 0.25, 0.5, 0.25, 0.0]
PASS_AT_2 = [5 / 6, 0.5, 5 / 6, 0.5, 0.0]  # 1 - C(4-c, 2) / C(4, 2) for c = 2, 1, 2, 1, 0
MAJORITY = [1.0, 0.0, 0.5, 1.0, 0.0]


def rows_of_lists() -> list[dict[str, Any]]:
    return [
        {"prompt": f"Say {right}.", "metadata": {"answer": right}, "responses": answers} for right, answers in ANSWERS
    ]


def rows_of_texts() -> list[dict[str, Any]]:
    """One answer per row, round by round, so that the answers of a prompt are in different shards."""
    return [
        {"prompt": f"Say {right}.", "metadata": {"answer": right}, "completion": answers[place]}
        for place in range(4)
        for right, answers in ANSWERS
    ]


def rows_of_messages() -> list[dict[str, Any]]:
    rows = []
    for row in rows_of_texts():
        contents = {"user": row["prompt"], "assistant": row["completion"]}
        messages = [{"role": role, "content": content} for role, content in contents.items()]
        rows.append({"messages": messages, "metadata": row["metadata"]})
    return rows


class AnswerRuns:
    """Evaluations of stored answers in one store, in a process where no engine can be had."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def answers(self, rows: list[dict[str, Any]], name: str = "system-a", suffix: str = "jsonl") -> dict[str, Any]:
        path = self.folder / f"{name}.{suffix}"
        if suffix == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        column = "responses" if "responses" in rows[0] else None
        return {"name": name, "dataset": "digits", "source": {"kind": "file", "path": str(path)}, "column": column}

    def config(self, *answers: dict[str, Any], **suite: Any) -> EvaluationFlowConfig:
        body: dict[str, Any] = {
            "graders": [{"name": "number", "path": "tasks.graders.rules:LastNumber"}],
            "pass_at": [1, 2],
            "majority_vote": True,
            "prompts_per_shard": 2,
        }
        storage = {"url": str(self.folder / "data")}
        return EvaluationFlowConfig.model_validate({"answers": answers, "suite": body | suite, "storage": storage})

    def run(self, *answers: dict[str, Any], **suite: Any) -> dict[str, Any]:
        return asyncio.run(evaluation(self.config(*answers, **suite)))


@pytest.fixture
def runs(prefect_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AnswerRuns:
    def no_engine(*_: Any) -> Any:
        raise AssertionError("an evaluation of stored answers asked for an engine")

    monkeypatch.setattr(engine.workspace, "connect", no_engine)
    return AnswerRuns(tmp_path)


@pytest.mark.parametrize(
    ("make_rows", "suffix"),
    [(rows_of_lists, "jsonl"), (rows_of_lists, "parquet"), (rows_of_texts, "jsonl"), (rows_of_messages, "parquet")],
)
def test_the_scores_are_those_of_hand_computation(
    make_rows: Callable[[], list[dict[str, Any]]], suffix: str, runs: AnswerRuns
) -> None:
    result = runs.run(runs.answers(make_rows(), suffix=suffix))
    by_name = {score["grader"]: score for score in result["scores"]}
    expected = {"number": MEANS, "number pass@1": MEANS, "number pass@2": PASS_AT_2, "number majority": MAJORITY}
    assert list(by_name) == list(expected)
    for name, values in expected.items():
        score, interval = by_name[name], mean_interval(values)
        assert (score["mean"], score["low"], score["high"]) == pytest.approx(
            (interval.mean, interval.low, interval.high)
        )
        assert (score["model"], score["dataset"]) == ("system-a", "digits")
        assert (score["prompts"], score["completions"], score["masked"]) == (5, 20, 0)


def test_two_systems_are_compared_on_the_same_prompts(runs: AnswerRuns) -> None:
    # the other system answers in another layout, always right, and only to the first three prompts
    right = [row | {"completion": str(row["metadata"]["answer"])} for row in rows_of_texts()[:3]]
    result = runs.run(runs.answers(rows_of_lists()), runs.answers(right, "system-b"), pass_at=[], majority_vote=False)
    (difference,) = result["differences"]
    assert (difference["first"], difference["second"], difference["grader"]) == ("system-a", "system-b", "number")
    assert difference["paired"] == paired_difference(MEANS[:3], [1.0, 1.0, 1.0]).model_dump(mode="json")
    # the first answer of each system to the first prompts; a shard has two prompts
    shown = [(each["model"], each["prompt"], each["answer"], each["reward"]) for each in result["samples"]]
    first = [(f"Say {right}.", answers[0], float(answers[0] == str(right))) for right, answers in ANSWERS[:2]]
    assert shown == [("system-a", *each) for each in first] + [
        ("system-b", prompt, prompt.removeprefix("Say ").removesuffix("."), 1.0) for prompt, _, _ in first
    ]


def test_the_command_prints_sample_answers(runs: AnswerRuns, tmp_path: Path) -> None:
    rows = [{"prompt": "Say 1.", "metadata": {"answer": 1}, "completion": "it is\x1b[31m 2"}]
    config = runs.config(runs.answers(rows), pass_at=[], majority_vote=False)
    (tmp_path / "answers.yaml").write_text(config.model_dump_json())
    done = CliRunner().invoke(app, ["evaluate", "--config", str(tmp_path / "answers.yaml")])
    assert done.exit_code == 0, done.output
    assert r"  'Say 1.'  system-a: 'it is\x1b[31m 2'  digits/number 0" in done.output


def test_graded_shards_are_not_graded_again(
    runs: AnswerRuns, worklog: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grade, failing = flows.evaluation.grade_rollouts, [2]

    async def fails_once(*args: Any, **kwargs: Any) -> Any:
        if kwargs["shard"] in failing:
            raise RuntimeError("the process ends here")
        return await grade(*args, **kwargs)

    monkeypatch.setattr(flows.evaluation, "grade_rollouts", fails_once)
    answers = runs.answers(rows_of_lists())
    with pytest.raises(RuntimeError, match="ends here"):
        runs.run(answers)
    before = len(events(worklog, "grade"))
    failing.clear()
    result = runs.run(answers)
    assert len(events(worklog, "grade")) == 3  # shards of two rows, each graded once
    assert 0 <= before < 3

    # another evaluation of the same table takes the grades, and a finished one returns its result
    further = runs.run(answers, pass_at=[4])
    assert runs.run(answers) == result
    assert len(events(worklog, "grade")) == 3
    assert further["scores"][0]["mean"] == pytest.approx(fmean(MEANS))
    assert audit_store(open_store(str(runs.folder / "data"))).problems == ()


@pytest.mark.parametrize("value", [[], ["1", 2], 3])
def test_a_row_without_an_answer_is_named(value: Any, runs: AnswerRuns) -> None:
    rows = rows_of_lists()
    rows[3]["responses"] = value
    with pytest.raises(DatasetError, match=r"row 4 of .*'responses' is .* expected an answer"):
        runs.run(runs.answers(rows))


@pytest.mark.parametrize(
    ("suffix", "message"),
    [("parquet", "no column .*; the file has none"), ("jsonl", r"row 1.*: given .*columns.*expected")],
)
@pytest.mark.parametrize("column", [None, "responses"])
def test_answers_without_columns_are_refused(
    suffix: str, message: str, column: str | None, runs: AnswerRuns
) -> None:
    answers = runs.answers([{}, {}], suffix=suffix) | {"column": column}
    with pytest.raises(DatasetError, match=rf"system-a\.{suffix}.*{message}"):
        runs.run(answers)
    # without a result, and without a lease that a next try would wait for
    store = open_store(str(runs.folder / "data"))
    assert not [info.key for info in store.list() if info.key.endswith("result.json")]
    assert not any(is_held(store, run) for run in list_runs(store))


SOURCE = {"kind": "file", "path": "a.jsonl"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answers": []}, "nothing to evaluate"),
        ({"models": ["m"]}, "models without suite.datasets"),
        ({"suite": {"datasets": [{"name": "d", "source": SOURCE}]}}, "suite.datasets without models"),
        ({"answers": [{"name": "a", "source": SOURCE}] * 2}, "heldout/a more than once"),
        ({"answers": [{"name": "a/b", "source": SOURCE}]}, "is not a name"),
        ({"suite": {"pass_at": [0]}}, "greater than or equal to 1"),
        ({"suite": {"pass_at": [2, 2]}}, "2 more than once"),
        ({"models": ["m"], "suite": {"datasets": [{"source": SOURCE}], "pass_at": [2]}}, "samples_per_prompt=1"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    suite = {"graders": [{"path": "tasks.graders.rules:LastNumber"}]} | changes.pop("suite", {})
    body = {"answers": [{"name": "a", "source": SOURCE}], "suite": suite} | changes
    with pytest.raises(ValidationError, match=message):
        EvaluationFlowConfig.model_validate(body)
