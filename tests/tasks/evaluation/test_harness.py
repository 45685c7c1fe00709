"""Tests of suites of the lm-evaluation-harness: the command, the scores, and a whole evaluation on tasks of local
files, for which nothing is downloaded."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flows.configs.evaluation import EvaluationFlowConfig, HarnessSuite, Suite
from flows.evaluation import _run_harness
from storage.chain.records import Chain, Root
from storage.registry.decisions import champion_of, commit_decision
from storage.registry.models import find_model, publish_model
from storage.store import keys
from storage.store.artifacts import Provenance
from storage.store.objects import ObjectStore, open_store
from tasks.evaluation import harness
from tasks.evaluation.harness import (
    HarnessError,
    HarnessModel,
    HarnessScore,
    HarnessTasks,
    harness_command,
    run_harness,
    scores_of,
)
from tests.fixtures.servers.openai_calls import OpenAIRun
from tests.fixtures.servers.openai_server import running_openai_server

PROVENANCE = Provenance(code_version="abc", config_digest="0" * 64, seed=7)

TASK = """
task: digits
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["a", "b"]
doc_to_target: answer
metric_list: [{metric: acc}]
"""


def write_task(folder: Path) -> None:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": str(n), "answer": n % 2}) + "\n" for n in range(4)))
    (folder / "digits.yaml").write_text(TASK.replace("ROWS", str(rows)))


def test_the_command_of_a_folder_and_of_an_endpoint(tmp_path: Path) -> None:
    tasks = HarnessTasks(tasks=("digits", "words"), include_path="mine", num_fewshot=0, limit=3)
    command = harness_command(HarnessModel(name="m@1", folder="/models/m"), tasks, tmp_path)
    assert command[1:] == [
        "-m", "lm_eval", "run", "--model", "hf", "--batch_size", "auto",
        "--model_args", "pretrained=/models/m,dtype=auto",
        "--tasks", "digits,words", "--output_path", str(tmp_path), "--seed", "0",
        "--include_path", "mine", "--num_fewshot", "0", "--limit", "3",
    ]  # fmt: skip
    served = HarnessModel(name="run/0-grpo/policy@3", endpoint="http://host:8777/v1")
    command = harness_command(served, tasks.model_copy(update={"chat_template": True}), tmp_path)
    arguments = command[command.index("--model_args") + 1]
    assert "local-chat-completions" in command and "--apply_chat_template" in command
    assert arguments.startswith("model=run/0-grpo/policy@3,base_url=http://host:8777/v1/chat/completions,")
    assert "base_url=http://host:8777/v1/completions," in harness_command(served, tasks, tmp_path)[7]
    # with its tokenizer, the harness can compare the logprobs of given answers
    with_tokenizer = HarnessModel(name="m@1", endpoint="http://host:8777/v1", tokenizer="/t", max_length=512)
    assert harness_command(with_tokenizer, tasks, tmp_path)[7] == (
        "model=m@1,base_url=http://host:8777/v1/completions,tokenizer_backend=huggingface,tokenizer=/t,"
        "tokenized_requests=True,max_length=512,num_concurrent=32"
    )
    # one request at a time is the harness's default
    assert ",num_concurrent=32" in arguments and "--batch_size" not in command
    more = tasks.model_copy(update={"model_arguments": {"parallelize": True, "max_length": 4096}})
    command = harness_command(HarnessModel(name="m@1", folder="/models/m"), more, tmp_path)
    assert "pretrained=/models/m,dtype=auto,parallelize=True,max_length=4096" in command
    # the digest of a suite without it stays as it was
    assert "model_arguments" not in tasks.model_dump() and "model_arguments" in more.model_dump()


async def test_the_harness_dies_with_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    # the value of the score is the signal that the child gets when its parent ends: PR_GET_PDEATHSIG is 2
    program = (
        "import ctypes, json, pathlib, sys; signal = ctypes.c_int(0); "
        "ctypes.CDLL(None).prctl(2, ctypes.byref(signal)); "
        "body = {'results': {'t': {'acc,none': signal.value}}}; "
        "pathlib.Path(sys.argv[1], 'results.json').write_text(json.dumps(body))"
    )
    monkeypatch.setattr(harness, "check_harness", lambda: None)
    monkeypatch.setattr(
        harness, "harness_command", lambda model, tasks, folder: [sys.executable, "-c", program, str(folder)]
    )
    (score,) = await run_harness(HarnessModel(name="m", folder="f"), HarnessTasks(tasks=("t",)))
    assert score.value == (signal.SIGKILL if sys.platform == "linux" else 0)


def harness_config(store: Path, *models: str) -> EvaluationFlowConfig:
    body = {
        "models": models, "storage": {"url": str(store)}, "engine": {"kind": "http", "url": "http://host:8777"},
        "suite": {"kind": "lm_eval", "tasks": ["digits"]},
    }  # fmt: skip
    return EvaluationFlowConfig.model_validate(body)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that the harness is asked to evaluate. The score is the number of models before; "m@bad" fails."""
    names: list[str] = []

    async def run(model: HarnessModel, tasks: HarnessTasks) -> list[HarnessScore]:
        names.append(model.name)
        if model.name == "m@bad":
            raise HarnessError("killed")
        return [HarnessScore(model=model.name, task="t", metric="acc", value=len(names), stderr=None, questions=1)]

    monkeypatch.setattr("flows.evaluation.check_harness", lambda: None)
    monkeypatch.setattr("flows.evaluation.run_harness", run)

    async def put_table(*arguments: Any, **named: Any) -> None:
        """The table is an artifact of Prefect, and these tests have no server."""

    monkeypatch.setattr("flows.evaluation.put_table", put_table)
    return names


def publish(store: ObjectStore, folder: Path, *versions: str) -> None:
    for version in versions:
        (folder / version).write_text(json.dumps({"model_type": version}))
        publish_model(store, "m", version, {"config.json": folder / version}, provenance=PROVENANCE)


def promote(store: ObjectStore, version: str) -> None:
    champion = champion_of(store, "m")
    commit_decision(store, "m", version, "promote", over=champion, reasons=["r"], who="ada", provenance=PROVENANCE)


async def evaluate(config: EvaluationFlowConfig) -> list[tuple[str, float]]:
    assert isinstance(config.suite, HarnessSuite)
    result = await _run_harness(config, config.suite)
    return [(row["model"], row["value"]) for row in result["harness"]]


async def test_a_name_of_an_engine_server_is_the_model_that_it_names_now(tmp_path: Path, asked: list[str]) -> None:
    store = open_store(tmp_path / "store")
    publish(store, tmp_path, "v1", "v2")
    promote(store, "v1")
    config = harness_config(tmp_path / "store", "m@champion")
    assert await evaluate(config) == [("m@v1", 1)]
    assert await evaluate(config) == [("m@v1", 1)] and asked == ["m@v1"]
    promote(store, "v2")
    assert await evaluate(config) == [("m@v2", 2)]
    with pytest.raises(ValueError, match=r"models has m@v2 more than once \(as m@v2\)"):
        await evaluate(harness_config(tmp_path / "store", "m@champion", "m@v2"))
    with pytest.raises(ValueError, match=r"models has m@v3: no model 'm@v3'"):
        await evaluate(harness_config(tmp_path / "store", "m@v3"))


async def test_a_policy_of_a_run_is_identified_by_its_state(tmp_path: Path, asked: list[str]) -> None:
    store = open_store(tmp_path / "store")
    publish(store, tmp_path, "v1", "v2")
    config = harness_config(tmp_path / "store", "r")
    for number, version in ((1, "v1"), (2, "v2")):
        # the same name stands for another policy after the run is begun again from another model
        store.delete(keys.chain_root("r", "0-sft", "policy"))
        base = find_model(store, "m", version)
        assert base is not None
        Chain(store, "r", "0-sft", "policy").create_root(Root(base=base, base_digest=base.sha256))
        for _ in range(2):
            assert await evaluate(config) == [("r/0-sft/policy@0", number)]
    assert asked == 2 * ["r/0-sft/policy@0"]


async def test_scores_of_earlier_models_outlive_a_failure(tmp_path: Path, asked: list[str]) -> None:
    publish(open_store(tmp_path / "store"), tmp_path, "v1", "bad")
    config = harness_config(tmp_path / "store", "m@v1", "m@bad")
    for _ in range(2):
        with pytest.raises(HarnessError):
            await evaluate(config)
    assert asked == ["m@v1", "m@bad", "m@bad"]


def test_the_scores_of_a_result_file() -> None:
    measures = {"alias": "digits", "sample_len": 4, "acc,none": 0.5, "acc_stderr,none": 0.25, "exact_match,strict": 1.0,
                "exact_match_stderr,strict": "N/A"}  # fmt: skip
    results = {"results": {"digits": measures}, "n-samples": {"digits": {"original": 9, "effective": 4}}}
    first, second = scores_of("m@1", results)
    assert (first.task, first.metric, first.value, first.stderr, first.questions) == ("digits", "acc", 0.5, 0.25, 4)
    assert (second.metric, second.value, second.stderr) == ("exact_match (strict)", 1.0, None)


def test_a_suite_without_a_kind_has_prompts() -> None:
    prompts = {"graders": [{"path": "a:b"}], "datasets": [{"source": {"kind": "file", "path": "a"}}]}
    config = EvaluationFlowConfig.model_validate({"models": ["m"], "suite": prompts})
    assert type(config.suite) is Suite and "kind" not in config.suite.model_dump()
    assert EvaluationFlowConfig.model_validate(config.model_dump(mode="json")) == config
    config = EvaluationFlowConfig.model_validate({"models": ["m"], "suite": {"kind": "lm_eval", "tasks": ["digits"]}})
    assert config.suite == HarnessSuite(tasks=("digits",))
    assert EvaluationFlowConfig.model_validate(config.model_dump(mode="json")) == config
    for body in ({"models": []}, {"models": ["m"], "suite": {"kind": "lm_eval", "tasks": []}}):
        with pytest.raises(ValidationError):
            EvaluationFlowConfig.model_validate({"suite": {"kind": "lm_eval", "tasks": ["digits"]}} | body)


@pytest.mark.slow
def test_the_endpoint_gives_the_score_of_the_folder(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that compares the logprobs of given answers."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    write_task(tmp_path)
    tasks = HarnessTasks(tasks=("digits",), include_path=str(tmp_path))
    run = OpenAIRun(tmp_path, tiny_folder)
    with running_openai_server(run.local, run.store) as url:
        served = HarnessModel(name="r", endpoint=url, tokenizer=str(tiny_folder), max_length=128)
        (by_endpoint,) = asyncio.run(run_harness(served, tasks))
    asyncio.run(run.local.close())
    (by_folder,) = asyncio.run(run_harness(HarnessModel(name="r", folder=str(tiny_folder)), tasks))
    assert (by_endpoint.value, by_endpoint.questions) == (by_folder.value, 4)


@pytest.mark.slow
async def test_models_are_evaluated_on_local_tasks(
    tmp_path: Path, tiny_folder: Path, prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.evaluation import evaluation

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    write_task(tmp_path)
    body: dict[str, Any] = {
        "models": [str(tiny_folder)], "storage": {"url": str(tmp_path / "store")},
        "suite": {"kind": "lm_eval", "tasks": ["digits"], "include_path": str(tmp_path)},
    }  # fmt: skip
    result = await evaluation(EvaluationFlowConfig.model_validate(body))
    (score,) = result["harness"]
    assert (score["task"], score["metric"], score["questions"]) == ("digits", "acc", 4) and 0 <= score["value"] <= 1
    assert score["model"].startswith("tiny@")
    assert await evaluation(EvaluationFlowConfig.model_validate(body)) == result
    unknown = HarnessTasks(tasks=("no-such-task",), include_path=str(tmp_path))
    with pytest.raises(HarnessError, match=r"lm_eval ended with status 1 on m; its last lines: (.|\n)*no-such-task"):
        await run_harness(HarnessModel(name="m", folder=str(tiny_folder)), unknown)
