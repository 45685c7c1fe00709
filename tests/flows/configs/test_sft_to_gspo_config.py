"""Tests of the config of `sft_to_gspo`: each stage has the settings of a run of its own, and the fields that decide the
result are known."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from flows.catalogue import SFTToGSPOConfig
from flows.runs.estimate import Estimate

CHATS = {"kind": "file", "path": "chats.jsonl"}
PROMPTS = {"kind": "file", "path": "prompts.jsonl"}
BODY: dict[str, Any] = {
    "model": {"key": "m", "adapter": {"rank": 4}},
    "data": {"train": CHATS, "prompts": PROMPTS, "heldout": PROMPTS | {"path": "heldout.jsonl"}, "truncation": "left"},
    "grader": {"path": "tests.fixtures.toy:digit_share"},
    "sft": {"algorithm": {"epochs": 2}},
    "gspo": {"algorithm": {"steps": 3}, "optimizer": {"weight_decay": 0.1}},
    "seed": 5,
}


def config(**changes: Any) -> SFTToGSPOConfig:
    return SFTToGSPOConfig.model_validate(BODY | changes)


def test_each_stage_is_a_run_of_its_own() -> None:
    first, second = config().first, config().second
    assert (first.data.train.path, first.algorithm.epochs, first.optimizer.lr) == ("chats.jsonl", 2, 1e-5)
    assert (second.data.train.path, second.algorithm.steps, second.optimizer.lr) == ("prompts.jsonl", 3, 7.5e-7)
    assert (second.algorithm.clip_range, second.optimizer.weight_decay) == (0.01, 0.1)
    assert second.data.truncation == "left" and second.data.heldout is not None
    assert first.model == second.model and first.seed == second.seed == 5
    assert first.checkpoints == second.checkpoints == config().checkpoints


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gspo": {}}, "neither algorithm.steps nor algorithm.epochs"),
        ({"gspo": {"algorithm": {"steps": 3, "dual_clip": 3}}}, "ratio per token"),
        ({"sft": {"algorithm": {"steps": 1, "epochs": 1}}}, "both steps=1 and epochs=1"),
        ({"sampling": {"temperature": 0}}, "sampling.temperature=0"),
        ({"data": {"train": CHATS}}, "prompts"),
        ({"algorithm": {"steps": 3}}, "algorithm"),
    ],
)
def test_what_a_stage_alone_would_refuse_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**changes)


def test_what_decides_the_result() -> None:
    semantic = config().semantic()
    for same in (
        {"checkpoints": {"frequency": 0.5}},
        {"model": BODY["model"] | {"publish_as": "other"}},
        {"grader": BODY["grader"] | {"retries": 9}},
        {"evaluation": {"samples_shown": 1}},
        {"sft": BODY["sft"] | {"rules": {"max_idle_steps": 3}}},
    ):
        assert config(**same).semantic() == semantic, same
    for other in (
        {"sft": {"algorithm": {"epochs": 3}}},
        {"sft": BODY["sft"] | {"optimizer": {"lr": 1e-4}}},
        {"gspo": {"algorithm": {"steps": 4}}},
        {"data": BODY["data"] | {"prompts": CHATS}},
        {"data": BODY["data"] | {"train": PROMPTS}},
        {"seed": 6},
    ):
        assert config(**other).semantic() != semantic, other
    assert config().other()["sft"] == {"rules": {"max_idle_steps": 20}}
    assert config().other()["gspo"] == {"rules": {"max_idle_steps": 20, "max_skipped_steps": 5}}
    assert config().other()["data"].keys() == {"heldout"}
    assert {"checkpoints", "engine", "storage"} <= config().other().keys()


def test_what_both_stages_take() -> None:
    """The larger of the memories, and the sums of the rest, where both are known."""
    first, second = Estimate(10, 100, 1.0), Estimate(30, 200, None)
    assert first.followed_by(second) == second.followed_by(first) == Estimate(30, 300, None)
    assert first.followed_by(first) == Estimate(10, 200, 2.0)
