"""When callbacks are called, and evaluation on the way: committed, the same after an interruption."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas
import pytest
from pydantic import ValidationError

from flows.callbacks import Cadence
from flows.configs.common import GRPOConfig
from flows.configs.validation import EvaluationConfig
from flows.grpo import grpo
from flows.training.held_out import HeldoutEvaluator
from storage.store.objects import open_store
from tasks.evaluation.validation_curve import read_validations, reward_by_prompt
from tests.fixtures.toy import toy_config, write_prompts

served = pytest.mark.usefixtures("prefect_server")


@pytest.mark.parametrize(
    ("cadence", "total", "expected"),
    [
        (Cadence(every=0.2), 10, [0, 2, 4, 6, 8, 10]),
        (Cadence(every=0.1), 30, [0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30]),
        (Cadence(every=0.3), 10, [0, 3, 6, 9, 10]),
        (Cadence(every=0.25), 10, [0, 3, 5, 8, 10]),  # at 2.5, 5, 7.5, 10: the first step that reaches it
        (Cadence(every=0.5), 1, [0, 1]),
        (Cadence(every=0.1), 3, [0, 1, 2, 3]),
        (Cadence(every_steps=4), 10, [0, 4, 8, 10]),
        (Cadence(every_steps=4, at_start=False, at_end=False), 8, [4]),
        (Cadence(), 3, [0, 3]),
    ],
)
def test_cadences(cadence: Cadence, total: int, expected: list[int]) -> None:
    assert [step for step in range(total + 1) if cadence.due(step, total)] == expected


def test_a_run_without_an_end_has_no_fractions() -> None:
    assert [step for step in range(7) if Cadence(every_steps=3).due(step, None)] == [0, 3, 6]
    with pytest.raises(ValueError, match="has no end"):
        Cadence(every=0.5).due(1, None)


@pytest.mark.parametrize("wrong", [{"every": 0.1, "every_steps": 1}, {"every": 0}, {"every": 1.5}, {"every_steps": 0}])
def test_wrong_cadences_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="every"):
        Cadence(**wrong)
    with pytest.raises(ValidationError, match="every"):
        EvaluationConfig(**wrong)


def test_copies_of_a_greedy_completion_are_refused() -> None:
    with pytest.raises(ValidationError, match="copies of one completion"):
        EvaluationConfig(samples_per_prompt=2)


def test_the_mean_of_a_prompts_completions_is_its_reward() -> None:
    rows = [("a", 1.0), ("a", 0.0), ("b", None), ("b", 0.5), ("c", None)]
    found = reward_by_prompt({"prompt_id": prompt, "reward": reward} for prompt, reward in rows)
    assert found == {"a": 0.5, "b": 0.5, "c": None}


@dataclass
class Toy:
    folder: Path
    tiny_folder: Path

    def config(self, run: str, **evaluation: Any) -> GRPOConfig:
        heldout = {"kind": "file", "path": str(write_prompts(self.folder / "heldout.jsonl")), "limit": 3}
        body = toy_config(
            self.folder, self.tiny_folder, run=run, data__heldout=heldout, evaluation=evaluation,
            grader__path="tests.fixtures.grading:even_share", algorithm__steps=3,
        )  # fmt: skip
        return GRPOConfig.model_validate(body)

    def evaluations(self, run: str) -> list[Path]:
        return sorted((self.folder / "data" / "runs" / run / "stages" / "0-grpo" / "evaluations").glob("*.parquet"))

    def curve(self, run: str) -> list[tuple[int, float]]:
        store = open_store(str(self.folder / "data"))
        return [(one.step, one.measures["reward"]) for one in read_validations(store, run, "0-grpo")]


@pytest.mark.slow
@served
def test_evaluation_on_the_way(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy(tmp_path, tiny_folder)
    drawn = {"every_steps": 1, "temperature": 1.0, "top_k": 50, "top_p": 0.9, "samples_per_prompt": 2}
    whole = asyncio.run(grpo(toy.config("whole", **drawn)))

    tables = [pandas.read_parquet(path) for path in toy.evaluations("whole")]
    assert [path.name[:6] for path in toy.evaluations("whole")] == ["000000", "000001", "000002", "000003"]
    for table in tables:
        assert list(table["prompt_index"]) == [0, 0, 1, 1, 2, 2]
    assert tables[0].groupby("prompt_index")["text"].nunique().max() == 2  # the two of a prompt are drawn apart
    means = [table.groupby("prompt_index")["reward"].mean().mean() for table in tables]
    assert toy.curve("whole") == [(step, pytest.approx(mean)) for step, mean in enumerate(means)]
    assert whole["heldout"]["n"] == 3
    assert "Held-out: reward" in Path(whole["report"]).read_text()

    evaluate, calls = HeldoutEvaluator.evaluate, []

    async def interrupted(self: HeldoutEvaluator, policy: Any) -> Any:
        calls.append(policy.step)
        if policy.step == 2 and calls.count(2) == 1:
            raise RuntimeError("the power went out")
        return await evaluate(self, policy)

    monkeypatch.setattr(HeldoutEvaluator, "evaluate", interrupted)
    with pytest.raises(RuntimeError, match="power"):
        asyncio.run(grpo(toy.config("cut", **drawn)))
    asyncio.run(grpo(toy.config("cut", **drawn)))
    assert calls.count(2) == 2, "the committed step whose evaluation was missed is evaluated after the restart"
    assert toy.curve("cut") == toy.curve("whole")
    for mine, other in zip(toy.evaluations("cut"), toy.evaluations("whole"), strict=True):
        assert pandas.read_parquet(mine).equals(pandas.read_parquet(other))


@served
@pytest.mark.slow
def test_without_the_evaluation_before(tmp_path: Path, tiny_folder: Path) -> None:
    toy = Toy(tmp_path, tiny_folder)
    result = asyncio.run(grpo(toy.config("late", before=False, every=0.5)))
    assert [step for step, _ in toy.curve("late")] == [2, 3]  # 1.5 steps are reached after 2
    assert result["heldout"] is None
