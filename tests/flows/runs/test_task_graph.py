"""Tests of the graph of tasks that Prefect's page draws. Each task comes after the tasks whose artifacts it reads, and
has the tag of its kind. Names count steps from 1. An input that precedes another input has no edge of its own: a batch
reads rollouts and grades, and has edges from the grades alone. The expected edges follow from what the steps of each
algorithm read."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from flows.catalogue import DPOConfig, SFTToGSPOConfig
from flows.configs.environments import ENVGRPOConfig
from flows.configs.evaluation import EvaluationFlowConfig
from flows.configs.ppo import PPOConfig
from flows.dpo import dpo
from flows.env_grpo import env_grpo
from flows.evaluation import evaluation
from flows.ppo import ppo
from flows.sft_to_gspo import sft_to_gspo
from tests.e2e.test_kill_stages import config_of
from tests.fixtures.guessing import guess_config
from tests.fixtures.preferences import preference_config
from tests.fixtures.runs.task_graph import read_task_graph
from tests.fixtures.runs.toy_run import ToyRun
from tests.fixtures.toy import toy_config, write_prompts

Edges = list[tuple[str, list[str]]]

TAGS = {
    "load": "load", "rollout": "rollout", "grade": "grade", "batch": "prepare", "step": "train", "value": "train",
    "checkpoint": "checkpoint", "publish": "publish", "report": "report", "episodes": "rollout",
    "evaluate": "evaluate", "compare": "compare",
}  # fmt: skip


def step_before(step: int) -> str:
    """The task before the first task of a step."""
    return f"step-{step - 1:06d}" if step > 1 else "load-prompts"


def rollouts_and_grades(step: int) -> Edges:
    """Two shards, each sampled from the policy of the step before, and graded."""
    edges: Edges = []
    for shard in ("00", "01"):
        rollout = f"rollout-{step:06d}/{shard}"
        edges += [(rollout, [step_before(step)]), (f"grade-{step:06d}/{shard}", [rollout])]
    return edges


def checkpoint(steps: int) -> Edges:
    before = [f"step-{steps:06d}"]
    return [(f"checkpoint-{steps:06d}", before), (f"checkpoint-{steps:06d}/begin", before)]


def end(model: str, steps: int) -> Edges:
    """The last checkpoint, the model and the report come after the last step."""
    before = [f"step-{steps:06d}"]
    return [*checkpoint(steps), (f"publish-{model}", before), ("report", before)]


def check(api: str, run: str, expected: Edges) -> None:
    """Compares the graph of a flow run with the expected edges of all its task runs."""
    graph = read_task_graph(api, run, names=[name for name, _ in expected])
    assert graph.after == sorted(expected), "the inputs of the task runs"
    assert graph.drawn == sorted(expected), "the graph of the page"
    # Prefect's query lists an edge once per input of the task that it leads from, and the page draws it once
    inputs = dict(expected)  # of several task runs of one name, all have as many
    repeated = {}
    for name, befores in expected:
        for before in befores:
            if len(inputs[before]) > 1:
                repeated[before, name] = len(inputs[before])
    assert graph.repeated == repeated
    assert graph.tags == {name: {TAGS[name.partition("-")[0]]} for name, _ in expected}


def test_each_task_of_grpo_comes_after_what_it_reads(toy_run: ToyRun, prefect_server: str) -> None:
    expected: Edges = [("load-prompts", [])]
    for step in range(1, 5):
        expected += rollouts_and_grades(step)
        expected.append((f"batch-{step:06d}", [f"grade-{step:06d}/00", f"grade-{step:06d}/01"]))
        expected.append((f"step-{step:06d}", [f"batch-{step:06d}"]))
    expected += [*checkpoint(2), *checkpoint(4), *end("toy", 4)]
    check(prefect_server, "toy", expected)


@pytest.mark.slow
def test_each_task_of_ppo_comes_after_what_it_reads(tmp_path: Path, tiny_folder: Path, prefect_server: str) -> None:
    changes = {"grader__path": "tests.fixtures.grading:even_share", "algorithm__completions_per_sample": 1}
    small = {"algorithm__steps": 2, "algorithm__samples_per_batch": 4, "algorithm__samples_per_mini_batch": 4}
    config = toy_config(tmp_path, tiny_folder, run="graph-ppo", checkpoints__recovery_steps=None, **changes, **small)
    asyncio.run(ppo(PPOConfig.model_validate(config)))
    expected: Edges = [("load-prompts", [])]
    for step in range(1, 3):
        expected += rollouts_and_grades(step)
        values = [f"value-{step - 1:06d}"] if step > 1 else []  # the credit is the value model's
        expected.append((f"batch-{step:06d}", [f"grade-{step:06d}/00", f"grade-{step:06d}/01", *values]))
        expected += [(f"step-{step:06d}", [f"batch-{step:06d}"]), (f"value-{step:06d}", [f"batch-{step:06d}"])]
    last_value = [(name, ["value-000002"]) for name, _ in checkpoint(2)]
    check(prefect_server, "graph-ppo", [*expected, *last_value, *end("toy", 2)])


@pytest.mark.slow
def test_each_task_of_dpo_comes_after_what_it_reads(tmp_path: Path, tiny_folder: Path, prefect_server: str) -> None:
    config = preference_config(
        tmp_path, tiny_folder, run="graph-dpo", algorithm__steps=2, checkpoints__recovery_steps=None
    )
    asyncio.run(dpo(DPOConfig.model_validate(config)))
    expected: Edges = [("load-preferences", [])]
    for step in range(1, 3):
        before = step_before(step).replace("prompts", "preferences")
        expected += [(f"batch-{step:06d}", [before]), (f"step-{step:06d}", [f"batch-{step:06d}"])]
    check(prefect_server, "graph-dpo", [*expected, *end("toy", 2)])


@pytest.mark.slow
def test_each_task_in_an_environment_comes_after_what_it_reads(
    tmp_path: Path, tiny_folder: Path, prefect_server: str
) -> None:
    config = guess_config(tmp_path, tiny_folder, run="graph-env", algorithm__steps=2, checkpoints__recovery_steps=None)
    config["data"]["heldout"] = {"kind": "file", "path": config["data"]["train"]["path"], "limit": 3}
    asyncio.run(env_grpo(ENVGRPOConfig.model_validate(config)))
    expected: Edges = [("load-prompts", []), ("load-prompts", []), ("evaluate-000000", ["load-prompts"])]
    for step in range(1, 3):
        episodes = [f"episodes-{step:06d}/00", f"episodes-{step:06d}/01"]
        expected += [(name, [step_before(step)]) for name in episodes]
        expected += [(f"batch-{step:06d}", episodes), (f"step-{step:06d}", [f"batch-{step:06d}"])]
    expected += [*checkpoint(2), ("publish-toy", ["step-000002"])]
    expected.append(("evaluate-000002", ["load-prompts", "step-000002"]))
    expected.append(("report", ["evaluate-000000", "evaluate-000002"]))
    check(prefect_server, "graph-env", expected)


@pytest.mark.slow
def test_the_second_stage_comes_after_the_first(tmp_path: Path, tiny_folder: Path, prefect_server: str) -> None:
    config = config_of("sft_to_gspo", tmp_path, tiny_folder, None) | {"run": "graph-stages"}
    asyncio.run(sft_to_gspo(SFTToGSPOConfig.model_validate(config)))
    # Both stages have tasks named batch-000001 and step-000001.
    of_both_stages = ["batch-000001", "step-000001"] * 2
    names = [*of_both_stages, "step-000002", "load-prompts", "rollout-000001/00", "rollout-000001/01", "report"]
    graph = read_task_graph(prefect_server, "graph-stages", names=names)
    expected = [(f"rollout-000001/{shard}", ["load-prompts", "step-000002"]) for shard in ("00", "01")]
    assert [edge for edge in graph.after if edge[0].startswith("rollout-000001/")] == expected
    assert [edge for edge in graph.after if edge[0] == "step-000001"] == [("step-000001", ["batch-000001"])] * 2


@pytest.mark.slow
def test_each_task_of_an_evaluation_comes_after_what_it_reads(
    tmp_path: Path, tiny_folder: Path, prefect_server: str
) -> None:
    """Ten prompts in three shards, and two graders."""
    graders = [{"name": name, "path": f"tests.fixtures.grading:{name}"} for name in ("even_share", "by_hash")]
    prompts = {"name": "digits", "source": {"kind": "file", "path": str(write_prompts(tmp_path / "suite.jsonl"))}}
    sampling = {"max_new_tokens": 6, "min_new_tokens": 6}
    config = {
        "run": "graph-evaluation",
        "models": [str(tiny_folder)],
        "suite": {"datasets": [prompts], "graders": graders, "sampling": sampling, "prompts_per_shard": 4},
        "engine": {"threads": 1},
        "storage": {"url": str(tmp_path / "data")},
    }
    asyncio.run(evaluation(EvaluationFlowConfig.model_validate(config)))
    rollouts: Edges = [(f"rollout-000001/{shard:02d}", ["load-prompts"]) for shard in range(3)]
    grades: Edges = [(f"grade-000001/{shard:02d}", [f"rollout-000001/{shard:02d}"]) for shard in range(3)] * 2
    compare = ("compare", sorted(name for name, _ in grades))
    expected = [("load-prompts", []), *rollouts, *grades, compare]
    check(prefect_server, "graph-evaluation", expected)
