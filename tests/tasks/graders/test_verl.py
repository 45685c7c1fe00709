"""Tests that reward functions written for verl grade as verl would call them."""

import asyncio
import hashlib
import logging
from pathlib import Path

import pytest

from engine.text.threads import StringThread
from tasks.graders.base import GraderError
from tasks.graders.spec import GraderSpecError, grader_spec
from tasks.graders.verl import VerlReward

PLAIN = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "gsm8k" and extra_info == {"index": 3}
    return solution_str.endswith(ground_truth)
"""
DETAILED = """
async def judge(data_source, solution_str, ground_truth, extra_info):
    return {"score": 0.5, "format": 1.0, "why": "text", "said": solution_str == "It is 4"}
"""
METADATA = {"data_source": "gsm8k", "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 3}}


def answered(text: str, metadata: dict[str, object] = METADATA) -> StringThread:
    return StringThread(turns=[("user", "2+2?"), ("assistant", text)], metadata=metadata)


def source(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(text)
    return path


def grade(grader: VerlReward, thread: StringThread) -> float:
    return asyncio.run(grader.score_float_value(thread))


def test_a_plain_function_gets_what_verl_gives_it(tmp_path: Path) -> None:
    grader = VerlReward(path=str(source(tmp_path, PLAIN)))
    assert grade(grader, answered("It is 4")) == 1.0
    assert grade(grader, answered("It is 5")) == 0.0


def test_an_async_function_may_answer_with_a_score_and_numbers_to_log(tmp_path: Path) -> None:
    grader = VerlReward(path=str(source(tmp_path, DETAILED)), name="judge")
    assert grade(grader, answered("It is 4")) == 0.5
    logs = grader.get_logs()
    assert logs["format/mean"] == 1.0
    assert logs["said/mean"] == 1.0
    assert "why/mean" not in logs


def test_named_numbers_of_the_result_are_parts_of_the_reward(tmp_path: Path) -> None:
    path = source(tmp_path, DETAILED)
    parts = {"format": 2.0, "said": 0.5}
    grade_of_parts = asyncio.run(VerlReward(path=str(path), name="judge", parts=parts).grade(answered("It is 4")))
    assert [(part.name, part.value, part.weight) for part in grade_of_parts.parts] == [
        ("format", 1.0, 2.0), ("said", 1.0, 0.5),
    ]  # fmt: skip
    assert asyncio.run(VerlReward(path=str(path), name="judge").grade(answered("It is 4"))).parts == ()
    with pytest.raises(GraderError, match=r"without \['length'\]; expected a dict with the parts \['length'\]"):
        grade(VerlReward(path=str(path), name="judge", parts={"length": 1.0}), answered("It is 4"))


def test_columns_may_be_called_otherwise(tmp_path: Path) -> None:
    path = source(tmp_path, "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 2\n")
    grader = VerlReward(path=str(path), data_source_column="from", reward_model_column="truth")
    assert grade(grader, answered("x", {"from": "a", "truth": {"ground_truth": "b"}})) == 2.0


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        ({"data_source": "a"}, "'reward_model'"),
        ({"reward_model": {"ground_truth": "4"}}, "'data_source'"),
        ({"data_source": "a", "reward_model": {"style": "rule"}}, "'ground_truth'"),
        ({"data_source": "a", "reward_model": "4"}, "'ground_truth'"),
    ],
)
def test_a_row_without_what_verl_needs_is_named(tmp_path: Path, metadata: dict[str, object], word: str) -> None:
    grader = VerlReward(path=str(source(tmp_path, PLAIN)))
    with pytest.raises(GraderError, match=word):
        grade(grader, answered("4", metadata))


def test_a_dict_without_a_score_is_no_grade(tmp_path: Path) -> None:
    path = source(tmp_path, "def compute_score(**row):\n    return {'acc': 1}\n")
    with pytest.raises(GraderError, match="'score'"):
        grade(VerlReward(path=str(path)), answered("4"))


def test_a_wrong_file_or_name_fails_before_the_run(tmp_path: Path) -> None:
    path = "tasks.graders.verl:VerlReward"
    with pytest.raises(GraderSpecError, match="not a file"):
        grader_spec(path, {"path": str(tmp_path / "none.py")})
    with pytest.raises(GraderSpecError, match="no reward function 'other'"):
        grader_spec(path, {"path": str(source(tmp_path, PLAIN)), "name": "other"})


def test_a_file_that_changed_since_the_run_was_declared_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = source(tmp_path, PLAIN)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    with caplog.at_level(logging.WARNING, logger="ostinato.graders"):
        VerlReward(path=str(path), sha256=digest)
        assert caplog.records == []
        path.write_text(PLAIN + "\n# another\n")
        VerlReward(path=str(path), sha256=digest)
    assert "changed since the run was declared" in caplog.text
