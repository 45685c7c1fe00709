"""Stop strings cut rollouts, batches, episodes and evaluations at the token that completes them, and every end of turn
of a model ends them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.protocol import SamplingParams
from engine.text.stored_models import renderer_of
from storage.store.tables import read_table
from tasks.datasets.spec import FileDataset
from tasks.environments.spec import environment_spec
from tasks.evaluation.heldout import evaluate_policy
from tasks.graders.spec import grader_spec
from tasks.plans import EpisodePlan, EvaluationPlan, Grading, PromptShard
from tasks.sampling.episodes import play_episodes
from tasks.task_runs import work_of
from tests.contracts.completion_ends import with_other_end
from tests.fixtures.runs.batch_workspace import BatchWorkspace, sampled_ids

FREE: dict[str, Any] = {"max_new_tokens": 48, "min_new_tokens": 48}


@pytest.fixture
async def batches(tmp_path: Path, tiny_folder: Path) -> BatchWorkspace:
    """A run at policy 0 over two prompts."""
    batches = await BatchWorkspace.create(tmp_path, tiny_folder)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("0", "1")))
    batches.dataset = batches.load(FileDataset(path=str(prompts)))
    return batches


def shard_of(batches: BatchWorkspace) -> PromptShard:
    assert batches.dataset is not None
    return PromptShard(base=batches.base, dataset=batches.dataset, index=0, rows=(0, 1), completions=16)


async def free_rollouts(batches: BatchWorkspace) -> tuple[list[dict[str, Any]], str]:
    """Rollouts without a stop string, and two letters that some of them have. The model's tokens are bytes."""
    rows = batches.rows(await batches.sample(shard={"completions": 16}, **FREE))
    texts = [row["text"] for row in rows]
    pairs = [text[start : start + 2] for text in texts for start in range(4, len(text) - 1)]
    return rows, next(pair for pair in pairs if pair.isascii() and pair.isprintable())


async def test_rollouts_and_their_batch_end_with_the_string(batches: BatchWorkspace) -> None:
    free, string = await free_rollouts(batches)
    decode = renderer_of(batches.store, batches.base).tokenizer.decode
    # The seeds do not depend on the index of the shard.
    cut = {"max_new_tokens": 48, "min_new_tokens": 0, "stop": (string,)}
    rollouts = await batches.sample(shard={"completions": 16, "index": 1}, **cut)
    rows, stopped = batches.rows(rollouts), 0
    for row, whole in zip(rows, free, strict=True):
        if row["stop_reasons"] != ["stop"]:
            continue
        length = len(sampled_ids(row))
        assert sampled_ids(row) == sampled_ids(whole)[:length]
        assert row["text"] == decode(sampled_ids(row)) and row["text"].endswith(string)
        assert string not in decode(sampled_ids(row)[:-1]) and len(row["logprobs"]) == length
        stopped += 1
    assert stopped and all(string not in row["text"] for row in rows if row["stop_reasons"] != ["stop"])
    graded = batches.commit_grades(rollouts, [float(index % 3) for index in range(32)])
    trained = [len(row["advantages"]) for row in await batches.batch(rollouts, graded)]
    assert trained == [len(sampled_ids(row)) for row in rows]


async def test_a_rollout_ends_where_the_template_ends_a_turn(tmp_path: Path, tiny_folder: Path) -> None:
    """The configs of the model say 5, and its template ends turns with 2. The text has neither."""
    folder = with_other_end(tiny_folder, tmp_path / "planted", end=5)
    batches = await BatchWorkspace.create(tmp_path, folder)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "0"}) + "\n")
    batches.dataset = batches.load(FileDataset(path=str(prompts)))
    shard = {"rows": (0,), "completions": 64}
    rows = batches.rows(await batches.sample(shard=shard, max_new_tokens=64, min_new_tokens=0))
    ended = [row for row in rows if row["stop_reasons"] == ["eos"]]
    assert {sampled_ids(row)[-1] for row in ended} == {2, 5}
    decode = renderer_of(batches.store, batches.base).tokenizer.decode
    assert all(row["text"] == decode(sampled_ids(row)[:-1]) for row in ended)


async def test_evaluations_are_cut_and_have_a_name_of_their_own(batches: BatchWorkspace) -> None:
    grading = Grading(grader=grader_spec("tests.fixtures.grading:even_share", None), retries=0)
    plan = EvaluationPlan(prompts=shard_of(batches), sampling=SamplingParams.model_validate(FREE), source=grading)
    evaluate = work_of(evaluate_policy)
    whole = read_table(batches.store, await evaluate(batches.workspace, batches.policy, plan)).to_pylist()
    text = whole[3]["text"]
    string = next(text[start] for start in range(4, len(text)) if text[start].isalpha() and text[start].isascii())
    sampling = SamplingParams(max_new_tokens=48, stop=(string,))
    cut_plan = plan.model_copy(update={"sampling": sampling})
    rows = read_table(batches.store, await evaluate(batches.workspace, batches.policy, cut_plan)).to_pylist()
    assert cut_plan.name(batches.policy) != plan.name(batches.policy)
    assert any(row["text"].endswith(string) for row in rows)
    assert all(string not in row["text"][:-1] for row in rows)


async def test_answers_of_episodes_are_cut(batches: BatchWorkspace) -> None:
    _, string = await free_rollouts(batches)
    plan = EpisodePlan(environment=environment_spec("tests.fixtures.guessing:SayAgain"), max_turns=2)
    sampling = SamplingParams(max_new_tokens=48, stop=(string[0],))
    ref = await work_of(play_episodes)(batches.workspace, batches.policy, shard_of(batches), sampling, plan, step=1)
    answers = []
    for row in batches.rows(ref):
        turns = json.loads(row["thread"])["turns"]
        answers += [turn["content"] for turn in turns if turn["role"] == "assistant"]
    assert len(answers) == 64  # 32 episodes of two turns
    assert any(answer.endswith(string[0]) for answer in answers)
    assert all(string[0] not in answer[:-1] for answer in answers)
