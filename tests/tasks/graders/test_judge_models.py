"""Tests of judges on a real, untrained model: any answer is handled, and grades can be repeated."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from engine import workspace as connecting
from engine.handles import InferenceModel
from engine.text.threads import StringThread
from engine.workspace import Workspace
from storage.chain.listing import list_runs
from storage.store import keys
from storage.store.artifacts import ArtifactRef
from storage.store.tables import SCHEMAS, commit_table, read_table
from tasks.graders.combined import CombinedGrader
from tasks.graders.judge_models import seeded, spawn_judge
from tasks.graders.judges import BinaryJudgeGrader
from tasks.graders.range_judge import NUMBER_ONLY, RangeJudgeGrader
from tasks.graders.retrieval_judges import AnswerRelevancyGrader, ContextRelevancyGrader, FaithfulnessGrader
from tasks.graders.running.grade_threads import grade_threads
from tasks.graders.running.shared_graders import tear_down_idle_graders
from tasks.graders.setting import grading_in
from tasks.graders.spec import grader_spec
from tasks.plans import Grading
from tasks.sampling.grading import grade_rollouts
from tasks.task_runs import work_of
from tests.fixtures.engines import DETERMINISTIC, PROVENANCE

THREAD = StringThread(turns=[("user", "2+3?"), ("assistant", "It is 5.")], metadata={"documents": ["2+3=5"]})


@pytest.fixture(autouse=True)
def own_engines() -> Iterator[None]:
    connecting.connect.cache_clear()
    yield
    connecting.connect.cache_clear()


def workspace(folder: Path, run: str = "training") -> Workspace:
    return Workspace(store=f"file://{folder}/store", run=run, engine=DETERMINISTIC, provenance=PROVENANCE)


async def test_every_judge_survives_a_model_that_talks_nonsense(tmp_path: Path, tiny_folder: Path) -> None:
    key, options = str(tiny_folder), {"max_judge_tokens": 8, "temperature": 1.0}
    binary = BinaryJudgeGrader("b", key, "Right?", **options)
    others = [kind(kind.__name__, key, **options) for kind in (
        FaithfulnessGrader, AnswerRelevancyGrader, ContextRelevancyGrader,
    )]  # fmt: skip
    scale = RangeJudgeGrader("r", key, "Right?", (1, 3), ["Look."])
    grader = CombinedGrader("all", [binary, scale, *others])
    with grading_in(workspace(tmp_path)):
        await grader.setup()
    (outcome,) = await grade_threads(grader, [THREAD], retries=0, timeout_seconds=300)
    logs = grader.get_logs()
    # the scale reads probabilities, which any model has; bytes drawn at random are no JSON, and are counted as such
    assert outcome.status == "ok" and outcome.reward is not None and 0 < outcome.reward < 1
    assert logs["b/unusable/count"] == 1.0 and "b/count" not in logs
    await grader.teardown()
    assert binary.model == key


async def test_the_expected_score_by_the_models_own_logprobs(tmp_path: Path, tiny_folder: Path) -> None:
    judge = await spawn_judge(str(tiny_folder), workspace(tmp_path), max_new_tokens=4)
    assert isinstance(judge, InferenceModel)
    grader = RangeJudgeGrader("r", judge, "Right?", (1, 3), ["Look."], normalize_score=False)
    grade = await grader.grade(THREAD)
    question = grader._question(THREAD, ["Look."], NUMBER_ONLY)
    odds = [math.exp(await judge.temperature(1.0).logprobs(question.assistant(str(score)))) for score in (1, 2, 3)]
    by_hand = sum(score * odd for score, odd in zip((1, 2, 3), odds, strict=True)) / sum(odds)
    assert grade.value == pytest.approx(by_hand, rel=1e-5)


async def test_a_judge_stands_beside_the_run_and_is_one_for_all(tmp_path: Path, tiny_folder: Path) -> None:
    first = await spawn_judge(str(tiny_folder), workspace(tmp_path), max_new_tokens=4)
    second = await spawn_judge(str(tiny_folder), workspace(tmp_path, "another"), max_new_tokens=4)
    assert isinstance(first, InferenceModel) and isinstance(second, InferenceModel)
    assert await first.policy() == await second.policy()
    store = workspace(tmp_path).open_store()
    assert [run.partition("/")[0] for run in list_runs(store)] == ["served"]


async def test_a_question_is_answered_alike_whoever_asks_and_whatever_was_asked_before(
    tmp_path: Path, tiny_folder: Path
) -> None:
    async def answer(run: str, before: int) -> str:
        model = (await spawn_judge(str(tiny_folder), workspace(tmp_path, run), max_new_tokens=6)).temperature(1.0)
        for number in range(before):
            await model.generate(StringThread().user(f"q{number}"))
        thread = StringThread().user("the question")
        return (await seeded(model, thread).generate(thread)).last_content()

    assert await answer("one", 0) == await answer("two", 2)


async def test_the_grade_task_spawns_the_judges_that_a_spec_names(tmp_path: Path, tiny_folder: Path) -> None:
    space = workspace(tmp_path)
    judge = {
        "path": "tasks.graders.range_judge:RangeJudgeGrader",
        "arguments": {
            "grader_key": "r", "model": str(tiny_folder), "criteria": "Right?", "score_range": [1, 3],
            "evaluation_steps": ["Look."],
        },
    }  # fmt: skip
    arguments: dict[str, Any] = {"grader_key": "c", "graders": [judge]}
    grading = Grading(grader=grader_spec("tasks.graders.combined:CombinedGrader", arguments), timeout_seconds=300)

    # Two completions that the judge scores differently.
    def shard_of(number: int) -> ArtifactRef:
        rows = [
            {
                "prompt_index": index, "prompt_id": f"p{index}", "completion": 0, "segment": 0, "first_turn": 0,
                "token_ids": [1, 2], "loss_mask": [False, True], "logprobs": [-1.0], "turn_tokens": [1],
                "stop_reasons": ["eos"], "seed": 0, "text": text,
                "thread": THREAD.model_copy(update={"turns": THREAD.turns[:1]}).to_json(), "policy_state": "s",
            }
            for index, text in enumerate(["5", "a longer reply"])
        ]  # fmt: skip
        table = pa.Table.from_pylist(rows, schema=SCHEMAS["rollouts"])
        key = keys.step_artifact(space.run, "0-grpo", 0, "rollouts", number)
        return commit_table(space.open_store(), key, table, kind="rollouts", parents=(), provenance=PROVENANCE)

    async def rewards(number: int) -> list[float]:
        graded = await work_of(grade_rollouts)(space, shard_of(number), grading, stage="0-grpo", step=0, shard=number)
        return read_table(space.open_store(), graded).column("reward").to_pylist()

    # A judge that is spawned again gives the same grades.
    first = await rewards(0)
    assert len(set(first)) == 2 and all(0 < reward < 1 for reward in first)
    await tear_down_idle_graders()
    connecting.connect.cache_clear()  # as in another process
    assert await rewards(1) == first
    await tear_down_idle_graders()
