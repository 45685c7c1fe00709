"""Tests of the validation loss: the training loss on held-out rows, for every evaluated policy."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from engine.losses.base import PairLoss, TokenLoss
from engine.losses.inputs import LossInputs, Outputs
from engine.losses.pairs import DPOSpec, RankingSpec
from engine.losses.values import MSESpec
from engine.protocol import Measurement
from flows.catalogue import DPOConfig, RewardModelConfig
from flows.configs.common import SFTConfig
from flows.dpo import dpo
from flows.reward_model import reward_model
from flows.sft import sft
from storage.chain.records import Chain
from storage.store.objects import open_store
from tasks.evaluation.lm_validation import measures_of
from tasks.evaluation.validation_curve import Validation, read_validations
from tests.fixtures.preferences import preference_config, write_ratings


def f64(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def dpo_loss(loss: DPOSpec, gap: float) -> float:
    """The loss of one pair, whose log-ratios to the reference differ by `gap`."""
    inputs = LossInputs(
        Outputs(logprobs_N=f64(gap, 0.0)), lengths_S=(1, 1), reference_N=f64(0.0, 0.0),
        preferred_P=torch.tensor([0]), dispreferred_P=torch.tensor([1]),
    )  # fmt: skip
    return loss.compute(inputs).values_P.item()


def measure_ranking(scores: list[tuple[float, float]]) -> PairLoss:
    """The loss of pairs (score of the chosen answer, score of the rejected one)."""
    members = torch.arange(2 * len(scores))
    outputs = Outputs(values_N=f64(*[score for pair in scores for score in pair]))
    lengths = (1,) * len(members)
    return RankingSpec().compute(
        LossInputs(outputs, lengths_S=lengths, preferred_P=members[::2], dispreferred_P=members[1::2])
    )


def measure_ratings(scores: list[float], ratings: list[float]) -> TokenLoss:
    return MSESpec().compute(LossInputs(Outputs(values_N=f64(*scores)), returns_N=f64(*ratings)))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (DPOSpec(beta=0.1), 0.62095705),
        (DPOSpec(beta=0.05), 0.65635014),
        (DPOSpec(beta=0.1, variant="cdpo", label_smoothing=0.1), 0.63595705),
        (DPOSpec(beta=0.1, variant="ipo"), 12.25),
    ],
)
def test_the_loss_of_a_pair(loss: DPOSpec, expected: float) -> None:
    """Logprobs -10 and -12, of the reference -11 and -11.5: golden values of the algorithm notes."""
    assert dpo_loss(loss, (-10 + 12) - (-11 + 11.5)) == pytest.approx(expected, abs=1e-8)
    if loss.variant == "sigmoid":
        assert dpo_loss(loss, 0.0) == pytest.approx(math.log(2))
        assert dpo_loss(loss, 1e6) == 0.0
        assert dpo_loss(loss, -1e6) == pytest.approx(loss.beta * 1e6)


def test_the_loss_of_scores() -> None:
    """By hand: -log σ(1) = 0.31326169, -log σ(-0.5) = 0.97407698; (1 - 3)² = 4, (0.5 - 0)² = 0.25."""
    ranking = measure_ranking([(2.0, 1.0), (-1.0, -0.5), (0.0, 0.0)])
    losses, margins = tuple(ranking.values_P.tolist()), tuple(ranking.margin_P.tolist())
    assert losses == pytest.approx([0.31326169, 0.97407698, math.log(2)], abs=1e-8)
    assert margins == (1.0, -0.5, 0.0)
    metrics = {"loss": math.fsum(losses) / 3}
    measures = measures_of(Measurement(metrics=metrics, losses=losses, tokens=(2, 2, 2), margins=margins))
    assert measures["accuracy"] == pytest.approx(1 / 3)  # equal scores tell nothing apart
    assert measures["margin"] == pytest.approx(0.5 / 3)
    assert measures["loss"] == pytest.approx((0.31326169 + 0.97407698 + math.log(2)) / 3, abs=1e-8)
    squared = tuple(measure_ratings([1.0, 0.5], [3.0, 0.0]).values_N.tolist())
    assert squared == (4.0, 0.25)
    measures = measures_of(Measurement(metrics={"loss": math.fsum(squared) / 2}, losses=squared, tokens=(1, 1)))
    assert measures == {"loss": 2.125}


@pytest.mark.parametrize("use", ["preference", pytest.param("rating", marks=pytest.mark.slow)])
def test_the_validation_loss_of_a_reward_model_is_that_of_a_step_on_the_same_rows(
    use: str, prefect_server: str, tmp_path: Path, tiny_folder: Path
) -> None:
    rows = 10 if use == "preference" else 20
    body = preference_config(
        tmp_path, tiny_folder, run="v", validation={"every_steps": 1},
        algorithm={"steps": 2, "samples_per_batch": rows},
    )  # fmt: skip
    if use == "rating":
        body["data"]["train"]["path"] = str(write_ratings(tmp_path / "ratings.jsonl"))
    body["data"] |= {"heldout": body["data"]["train"], "use": use}
    asyncio.run(reward_model(RewardModelConfig.model_validate(body)))
    curve = validations(tmp_path, "0-reward_model")
    assert [(validation.step, validation.name) for validation in curve] == [(step, "validation") for step in range(3)]
    chain = Chain(open_store(str(tmp_path / "data")), "v", "0-reward_model", "policy")
    for validation in curve[:2]:
        step = chain.record(validation.step + 1).metrics  # of the policy before that step
        assert validation.measures["loss"] == pytest.approx(step["loss"], rel=1e-5)
        if use == "preference":
            assert validation.measures["accuracy"] == pytest.approx(step["accuracy_mean"])
            apart = step["score_chosen_mean"] - step["score_rejected_mean"]
            assert validation.measures["margin"] == pytest.approx(apart, abs=1e-5)
    assert curve[-1].measures["loss"] < curve[0].measures["loss"]


def validations(folder: Path, stage: str) -> list[Validation]:
    return read_validations(open_store(str(folder / "data")), "v", stage)


@pytest.mark.slow
def test_the_validation_loss_of_dpo_is_that_of_a_step_on_the_same_rows(
    prefect_server: str, tmp_path: Path, tiny_folder: Path
) -> None:
    body = preference_config(
        tmp_path, tiny_folder, run="v", validation={"every": 0.25}, algorithm={"steps": 4, "samples_per_batch": 10}
    )
    body["data"]["heldout"] = body["data"]["train"]
    result = asyncio.run(dpo(DPOConfig.model_validate(body)))
    curve = validations(tmp_path, "0-dpo")
    assert [(validation.step, validation.name) for validation in curve] == [(step, "validation") for step in range(5)]
    assert curve[0].measures["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert curve[0].measures["margin"] == pytest.approx(0, abs=1e-5)
    chain = Chain(open_store(str(tmp_path / "data")), "v", "0-dpo", "policy")
    for validation in curve[:4]:
        step = chain.record(validation.step + 1).metrics  # of the policy before that step
        assert validation.measures["loss"] == pytest.approx(step["loss"], rel=1e-4)
        assert validation.measures["margin"] == pytest.approx(step["reward_margin_mean"], abs=1e-4)
        assert validation.step == 0 or validation.measures["accuracy"] == pytest.approx(step["accuracy_mean"])
    assert "Validation: loss" in Path(result["report"]).read_text()


def test_the_validation_loss_of_sft_is_that_of_a_step_on_the_same_rows(
    prefect_server: str, tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the tracker that the environment configures is sent both, in their order."""
    rows = [{"prompt": str(n), "completion": str(n) * (1 + n)} for n in range(6)]  # of unequal lengths
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "file", "path": str(path)}
    body = {
        "model": {"key": str(tiny_folder)}, "data": {"train": source, "heldout": source}, "run": "v",
        "algorithm": {"steps": 3, "samples_per_batch": 6}, "optimizer": {"lr": 1e-3, "schedule": "constant"},
        "checkpoints": {"frequency": None}, "validation": {"every_steps": 1},
        "logging": {"folder": str(tmp_path / "logs")},
        "engine": {"deterministic": True, "threads": 1}, "storage": {"url": str(tmp_path / "data")},
    }  # fmt: skip
    # A fake logger that records what it is sent.
    lines: list[tuple[int, dict[str, float]]] = []
    module = ModuleType("swanlab")
    module.__dict__["init"] = lambda **_: SimpleNamespace(
        log=lambda figures, step: lines.append((step, figures)), finish=lambda: lines.append((-1, {}))
    )
    monkeypatch.setitem(sys.modules, "swanlab", module)
    monkeypatch.setenv("SWANLAB_PROJ_NAME", "p")
    asyncio.run(sft(SFTConfig.model_validate(body)))
    # The held-out rows are the training rows, so the losses are equal.
    curve = validations(tmp_path, "0-sft")
    chain = Chain(open_store(str(tmp_path / "data")), "v", "0-sft", "policy")
    losses = [chain.record(step).metrics["loss"] for step in (1, 2, 3)]  # of the policies before these steps
    assert [validation.step for validation in curve] == [0, 1, 2, 3]
    assert [validation.measures["loss"] for validation in curve[:3]] == pytest.approx(losses, rel=1e-5)
    assert [step for step, _ in lines] == [0, 1, 1, 2, 2, 3, 3, -1]
    assert [figures["train/loss"] for _, figures in lines if "train/loss" in figures] == losses
    assert lines[0][1] == {"validation/loss": curve[0].measures["loss"]}


def test_held_out_rows_decide_nothing() -> None:
    body = {"model": {"key": "m"}, "data": {"train": {"kind": "file", "path": "p.jsonl"}}}
    with_rows = body | {"data": body["data"] | {"heldout": {"kind": "file", "path": "h.jsonl"}}}
    for make in (SFTConfig, DPOConfig, RewardModelConfig):
        plain = make.model_validate(body).semantic()
        assert make.model_validate(with_rows | {"validation": {"every": 0.1}}).semantic() == plain
        with pytest.raises(ValidationError, match="give one of them"):
            make.model_validate(body | {"validation": {"every": 0.1, "every_steps": 2}})
