"""Tests of `evaluation` from end to end on the tiny model: its results, repeated runs, and shared samples."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas
import pytest
from pydantic import ValidationError

import flows.evaluation
from engine.workspace import connect
from flows.configs.evaluation import EvaluationFlowConfig
from flows.evaluation import evaluation
from flows.runs.recorded_config import read_config
from storage.inspect.audit import audit_store
from storage.store.objects import open_store
from storage.store.tables import read_table
from tasks.evaluation.statistics import paired_difference
from tests.fixtures.prefect import prefect_client
from tests.fixtures.toy import write_prompts
from tests.fixtures.worklog import events

PROMPTS = 10


def suite(folder: Path, **changes: Any) -> dict[str, Any]:
    """Ten prompts, two graders, two completions each, in shards of four prompts."""
    prompts = write_prompts(folder / "suite.jsonl")
    body: dict[str, Any] = {
        "datasets": [{"name": "digits", "source": {"kind": "file", "path": str(prompts)}}],
        "graders": [
            {"name": "even", "path": "tests.fixtures.grading:even_share"},
            {"name": "hash", "path": "tests.fixtures.grading:by_hash"},
        ],
        "sampling": {"max_new_tokens": 6, "min_new_tokens": 6, "temperature": 1.0},
        "samples_per_prompt": 2,
        "prompts_per_shard": 4,
    }  # fmt: skip
    return body | changes


class EvaluationRuns:
    """Evaluations that share one store, and two models that differ."""

    def __init__(self, folder: Path, models: list[Path]) -> None:
        self.folder, self.models = folder, [str(model) for model in models]
        self.store = open_store(str(folder / "data"))

    def config(self, *models: str, **changes: Any) -> EvaluationFlowConfig:
        return EvaluationFlowConfig.model_validate(
            {
                "models": list(models or self.models),
                "suite": suite(self.folder, **changes.pop("suite", {})),
                "engine": {"deterministic": True, "threads": 1},
                "storage": {"url": str(self.folder / "data")},
                **changes,
            }
        )

    def run(self, *models: str, **changes: Any) -> dict[str, Any]:
        return asyncio.run(evaluation(self.config(*models, **changes)))

    def keys(self) -> set[str]:
        return {info.key for info in self.store.list()}


@pytest.fixture
def other_folder(tmp_path: Path, tiny_folder: Path) -> Path:
    """The tiny model with other weights."""
    import shutil

    from safetensors.torch import load_file, save_file

    folder = tmp_path / "other"
    shutil.copytree(tiny_folder, folder)
    weights = load_file(folder / "model.safetensors")
    changed = {name: value.flip(0).contiguous() if value.dim() == 2 else value for name, value in weights.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def runs(prefect_server: str, tmp_path: Path, tiny_folder: Path, other_folder: Path) -> EvaluationRuns:
    return EvaluationRuns(tmp_path, [tiny_folder, other_folder])


def test_models_are_compared_by_prompt_and_a_repetition_does_no_work(runs: EvaluationRuns, worklog: Path) -> None:
    result = runs.run()
    assert len(events(worklog, "shard")) == 2 * 3  # two models, ten prompts in shards of four
    assert len(events(worklog, "grade")) == 2 * 2 * 3
    names = [score["model"] for score in result["scores"]]
    assert len(names) == 4 and len(set(names)) == 2
    assert all((s["prompts"], s["completions"], s["masked"]) == (PROMPTS, 2 * PROMPTS, 0) for s in result["scores"])
    _figures_are_those_of_the_grades(runs, result)
    assert audit_store(runs.store).problems == ()

    before = runs.keys()
    worklog.write_text("")
    assert runs.run() == result
    assert runs.keys() == before
    assert worklog.read_text() == ""  # not even a lease
    # the record is a config, which is this evaluation again
    recorded = read_config(runs.store, result["run"])
    assert "'ostinato evaluate --config FILE'" in recorded.text and "retries" not in recorded.text
    assert EvaluationFlowConfig.model_validate(recorded.values) == runs.config(run=result["run"])


def _figures_are_those_of_the_grades(runs: EvaluationRuns, result: dict[str, Any]) -> None:
    """Recomputes the figures from the graded tables, which have tests of their own."""
    # Rewards by model and grader, and by prompt.
    files = sorted((runs.folder / "data").glob("runs/evaluation/*/stages/*/steps/000000/graded/*.parquet"))
    by_stage: dict[tuple[str, str], dict[str, list[float]]] = {}
    for path in files:
        run, stage = path.parts[-7], path.parts[-5]
        rewards = by_stage.setdefault((run, stage), {})
        for row in pandas.read_parquet(path).to_dict("records"):
            rewards.setdefault(row["prompt_id"], []).append(row["reward"])
    means = []
    for rewards in by_stage.values():
        assert {len(of_prompt) for of_prompt in rewards.values()} == {2}
        means.append({prompt: fmean(of_prompt) for prompt, of_prompt in rewards.items()})
    assert len(means) == 4
    # The reported differences are those of two of the four.
    expected = set()
    for early in means:
        for late in means:
            paired = paired_difference(list(early.values()), [late[prompt] for prompt in early])
            expected.add((paired.before_mean, paired.after_mean, paired.low, paired.high, paired.n))
    assert len(result["differences"]) == 2
    for difference in result["differences"]:
        paired = difference["paired"]
        reported = (paired["before_mean"], paired["after_mean"], paired["low"], paired["high"], paired["n"])
        assert any(reported == pytest.approx(figures) for figures in expected)
    table = pandas.read_parquet(next((runs.folder / "data").glob("runs/evaluation-*/stages/*/evaluations/*.parquet")))
    assert len(table) == 2 * 2 * PROMPTS


@pytest.mark.slow
def test_a_model_is_sampled_once_however_many_it_meets(runs: EvaluationRuns, worklog: Path) -> None:
    runs.run(runs.models[0])
    worklog.write_text("")
    runs.run()
    assert len(events(worklog, "shard")) == 3  # of the second model only
    worklog.write_text("")
    third = {"name": "constant", "path": "tests.fixtures.grading:constant"}
    runs.run(suite={"graders": [third]})
    # Another grader reads the same samples.
    assert (len(events(worklog, "shard")), len(events(worklog, "grade"))) == (0, 2 * 3)
    worklog.write_text("")
    runs.run(suite={"seed": 1})
    assert len(events(worklog, "shard")) == 2 * 3


@pytest.mark.slow
def test_an_evaluation_that_was_interrupted_goes_on(
    runs: EvaluationRuns, worklog: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = runs.run(run="whole")
    (runs.folder / "again").mkdir()
    again = EvaluationRuns(runs.folder / "again", [Path(model) for model in runs.models])
    grade, left = flows.evaluation.grade_rollouts, [1]

    async def raises_once(*args: Any, **kwargs: Any) -> Any:
        if kwargs["shard"] in left:
            left.clear()
            raise RuntimeError("the process ends here")
        return await grade(*args, **kwargs)

    monkeypatch.setattr(flows.evaluation, "grade_rollouts", raises_once)
    with pytest.raises(RuntimeError, match="ends here"):
        again.run(run="whole")
    connect.cache_clear()
    worklog.write_text("")
    resumed = again.run(run="whole")
    assert len(events(worklog, "shard")) == 3  # the first model's are kept
    assert resumed["scores"] == whole["scores"] and resumed["differences"] == whole["differences"]


def test_prefect_shows_the_table_and_the_comparison(runs: EvaluationRuns, prefect_server: str) -> None:
    result = runs.run(runs.models[0], suite={"samples_per_prompt": 1})
    query = {"artifacts": {"key": {"any_": ["evaluation", "comparison"]}}, "sort": "CREATED_DESC"}
    with prefect_client(prefect_server) as client:
        artifacts = client.post("/artifacts/filter", json=query).json()
    newest = {artifact["key"]: artifact for artifact in reversed(artifacts)}
    rows = json.loads(newest["evaluation"]["data"])
    assert [row["mean"] for row in rows] == [round(score["mean"], 4) for score in result["scores"]]
    assert "| digits | even |" in newest["comparison"]["data"]


@pytest.mark.slow
def test_a_registered_model_by_name_needs_no_folder(runs: EvaluationRuns) -> None:
    first = runs.run(runs.models[0])
    name = first["scores"][0]["model"]
    assert runs.run(name)["run"] == first["run"]
    with pytest.raises(ValueError, match="more than once"):
        runs.run(name, runs.models[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples_per_prompt": 2, "sampling": {"temperature": 0.0}}, "copies of one completion"),
        ({"graders": []}, "at least 1"),
        ({"graders": [{"name": "a/b", "path": "tests.fixtures.grading:even_share"}]}, "is not a name"),
        ({"graders": [{"path": "tests.fixtures.grading:even_share"}] * 2}, "reward more than once"),
    ],
)
def test_a_suite_that_makes_no_sense_is_refused_before_anything_runs(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        EvaluationRuns(tmp_path, [tmp_path]).config(suite=change)


def test_the_table_is_readable_through_its_uri(runs: EvaluationRuns) -> None:
    from storage.store.artifacts import find_artifact

    result = runs.run(runs.models[0], suite={"samples_per_prompt": 1})
    ref = find_artifact(runs.store, result["table"].partition("#")[0])
    assert ref is not None and ref.uri == result["table"]
    assert read_table(runs.store, ref).num_rows == 2 * PROMPTS
    assert isinstance(ref.parents, tuple) and len(ref.parents) == 2 * 3
