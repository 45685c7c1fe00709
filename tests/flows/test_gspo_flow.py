"""`gspo` from end to end: its defaults, its loss on the chain, and that it learns the toy task."""

from __future__ import annotations

import asyncio
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flows.configs.gspo import GSPOConfig
from flows.grpo import GRPO
from flows.gspo import GSPO, gspo
from flows.training.schedules import ConstantScheduler
from storage.chain.records import Chain
from storage.store.objects import open_store
from tasks.graders.spec import grader_spec
from tests.fixtures.toy import toy_config

STEPS = 180


def config_of(folder: Path, tiny_folder: Path, run: str = "g", **changes: Any) -> GSPOConfig:
    return GSPOConfig.model_validate(toy_config(folder, tiny_folder, run=run, **changes))


def chain(folder: Path, run: str = "g") -> Chain:
    return Chain(open_store(str(folder / "data")), run, "0-gspo", "policy")


GRADER = grader_spec("tests.fixtures.grading:even_share")


def test_its_defaults_are_those_of_the_algorithm() -> None:
    trainer = GSPO([], None, GRADER, max_num_gspo_steps=3)  # type: ignore[arg-type]
    assert (trainer.loss.kind, trainer.loss.norm) == ("gspo", "sequence_mean")
    assert (trainer.loss.clip_low, trainer.loss.clip_high, trainer.loss.kl_beta) == (0.01, 0.01, 0.01)
    assert (trainer.max_steps, trainer.algorithm.completions_per_sample, trainer.prompts_per_batch) == (3, 8, 16)
    assert isinstance(trainer, GRPO)
    high = GSPO([], None, GRADER, max_num_gspo_steps=3, clip_range=3e-4, clip_range_high=4e-4)  # type: ignore[arg-type]
    assert (high.loss.clip_low, high.loss.clip_high) == (3e-4, 4e-4)


def test_the_config_has_the_same_defaults(tmp_path: Path, tiny_folder: Path) -> None:
    body = toy_config(tmp_path, tiny_folder) | {"algorithm": {"steps": 1}}
    algorithm = GSPOConfig.model_validate(body).algorithm
    assert (algorithm.clip_range, algorithm.loss_norm, algorithm.kl_beta) == (0.01, "sequence_mean", 0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dual_clip": 3.0, "max_num_gspo_steps": 1}, "ratio per token"),
        ({"policy_loss": "cispo", "max_num_gspo_steps": 1}, "ratios per token"),
        ({"epochs": 1, "max_num_gspo_steps": 1}, "both max_num_gspo_steps=1 and epochs=1"),
        ({"max_num_grpo_steps": 1}, "max_num_grpo_steps"),
    ],
)
def test_what_it_cannot_do_is_said(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        GSPO([], None, None, **arguments)  # type: ignore[arg-type]


def test_an_endless_run_needs_a_constant_rate() -> None:
    trainer = GSPO(
        [], None, GRADER, lr_scheduler=ConstantScheduler(1e-6), checkpoint_every_steps=5  # type: ignore[arg-type]
    )  # fmt: skip
    assert trainer.max_steps is None


def test_a_config_with_a_ratio_per_token_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    with pytest.raises(ValidationError, match="ratio per token"):
        config_of(tmp_path, tiny_folder, algorithm__dual_clip=3.0)
    with pytest.raises(ValidationError, match="ratios per token"):
        config_of(tmp_path, tiny_folder, regularisation={"policy_loss": "cispo"})


@pytest.mark.parametrize("adapter", [None, pytest.param({"rank": 4}, marks=pytest.mark.slow)])
def test_every_step_of_the_chain_minimises_its_loss(
    prefect_server: str, tiny_folder: Path, tmp_path: Path, adapter: dict[str, Any] | None
) -> None:
    grader = "tests.fixtures.grading:even_share"
    changes = {"algorithm__steps": 2, "grader__path": grader, "algorithm__clip_range": 0.02}
    result = asyncio.run(gspo(config_of(tmp_path, tiny_folder, model__adapter=adapter, **changes)))
    records = list(chain(tmp_path).records(0, 2))
    assert [(r.request.loss["kind"], r.request.loss["norm"]) for r in records] == [("gspo", "sequence_mean")] * 2
    assert [r.request.loss["clip_low"] for r in records] == [0.02] * 2
    assert all(r.request.reference == chain(tmp_path).policy(0) for r in records)
    assert len({r.weights_digest for r in records}) == 2  # both moved the weights
    assert result["model"].startswith("toy@")
    assert asyncio.run(gspo(config_of(tmp_path, tiny_folder, model__adapter=adapter, **changes))) == result


@pytest.mark.slow
def test_gspo_learns_the_toy_from_random_weights(prefect_server: str, tiny_folder: Path, tmp_path: Path) -> None:
    sizes = {"samples_per_batch": 128, "samples_per_mini_batch": 128, "completions_per_sample": 8}
    rest = {"steps": STEPS, "prompts_per_shard": 16, "clip_range": 0.2, "kl_beta": 0.0, "old_logprobs": "sampler"}
    engine = {"deterministic": True, "threads": 1, "max_rows": 128}
    settings: dict[str, Any] = {"algorithm": sizes | rest, "checkpoints": {"frequency": None}, "engine": engine}
    asyncio.run(gspo(config_of(tmp_path, tiny_folder, **settings)))
    files = sorted((tmp_path / "data" / "runs" / "g" / "stages" / "0-gspo" / "metrics").glob("*.json"))
    rewards = [json.loads(file.read_text())["reward_mean"] for file in files]
    assert len(rewards) == STEPS
    assert statistics.mean(rewards[:5]) < 0.1
    assert statistics.mean(rewards[-10:]) > 0.9
