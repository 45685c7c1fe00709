"""What ENVPPO and ENVGSPO learn from random weights in two turns, in dependence on the prompt (what ENVGRPO learns
without it is in test_env_flows): see tests.fixtures.guessing:TellApart, in which a policy that does not look at the
prompt earns 0.4 of 2 an episode at most. It would do so by saying six digits a turn; noise earns about 0.02.

The model is small and the prompts are ten times their digit, so that minutes suffice on one core.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from engine.backends.torch.tiny import build_tiny_model
from engine.handles import Model
from engine.specs.engine import LocalEngineSpec
from engine.text.threads import StringThread
from flows.configs.environments import ENVGSPOConfig
from flows.env_gspo import env_gspo
from flows.env_ppo import ENVPPO
from flows.recipe import RecipeContext
from flows.training.schedules import ConstantScheduler
from storage.store.objects import open_store
from tasks.environments.spec import environment_spec
from tasks.reports.step_metrics import read_metrics
from tests.fixtures.guessing import guess_config

pytestmark = pytest.mark.slow

BLIND = 0.4
"""What the best policy that does not look at the prompt earns. A digit in one of the twelve places is worth a sixth of
its turn's 1 for the one prompt that it is right for, and a ninth of that for the nine others: over the ten prompts
0.2 / 6, so 0.4 in twelve places, whichever digits they are; anything but a digit is worth nothing."""
PROMPTS = [str(digit) * 10 for digit in range(10)]


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models") / "small", seed=0, hidden=64, layers=2)


def rewards_of(folder: Path, stage: str, steps: int) -> list[float]:
    """The mean grade of an episode, by step."""
    metrics = read_metrics(open_store(str(folder / "data")), "learns", stage, steps=steps)
    assert len(metrics) == steps
    return [line.reward_mean or 0.0 for line in metrics]


def assert_learnt(rewards: list[float]) -> None:
    """From noise to twice what can be had without looking at the prompt."""
    assert statistics.mean(rewards[:3]) < 0.1
    assert statistics.mean(rewards[-10:]) > 2 * BLIND


async def test_envppo_learns_what_depends_on_the_prompt(
    prefect_server: str, tmp_path: Path, small_folder: Path
) -> None:
    """Each batch has every prompt equally often, so that no digit is favoured by chance, and an entropy bonus keeps the
    digits apart until the prompt is looked at."""
    steps = 150
    engine = LocalEngineSpec(deterministic=True, threads=1, max_rows=128)
    builder = Model(str(small_folder)).to_builder(
        RecipeContext.open("learns", store=str(tmp_path / "data"), engine=engine)
    )
    policy, value = await builder.spawn_train("policy"), await builder.into_scoring_model().spawn_train("value")
    trainer = ENVPPO(
        [StringThread([("user", prompt)]) for prompt in PROMPTS],
        policy.max_gen_len(6).min_gen_len(6),
        value,
        environment_spec("tests.fixtures.guessing:TellApart", {}),
        max_turns=2, max_num_ppo_steps=steps, samples_per_batch=80, samples_per_mini_batch=80, completions_per_sample=8,
        lr_scheduler=ConstantScheduler(3e-3), value_lr_scheduler=ConstantScheduler(2e-3), value_only_fraction=0.03,
        gae_lambda=0.9, whiten_advantages=True, entropy_coef=0.05, kl_beta=0.0, clip_range=0.2, old_logprobs="sampler",
        checkpoint_frequency=None,
    )  # fmt: skip
    await trainer.run()
    assert_learnt(rewards_of(tmp_path, "0-env_ppo", steps))


def test_envgspo_learns_what_depends_on_the_prompt(prefect_server: str, tmp_path: Path, small_folder: Path) -> None:
    """Both turns have one grade together, which is the whole sequence's."""
    steps = 180
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    settings: dict[str, Any] = {
        "run": "learns",
        "data": {"train": {"kind": "file", "path": str(prompts)}},
        "environment": {"path": "tests.fixtures.guessing:TellApart", "arguments": {"once": True}, "max_turns": 2},
        "sampling": {"max_new_tokens": 6, "min_new_tokens": 6},
        "algorithm": {
            "steps": steps, "samples_per_batch": 80, "samples_per_mini_batch": 80, "completions_per_sample": 8,
            "kl_beta": 0.0, "clip_range": 0.2, "old_logprobs": "sampler",
        },
        "optimizer": {"lr": 3e-3, "schedule": "constant"},
        "checkpoints": {"frequency": None},
        "engine": {"deterministic": True, "threads": 1, "max_rows": 128},
    }  # fmt: skip
    asyncio.run(env_gspo(ENVGSPOConfig.model_validate(guess_config(tmp_path, small_folder, **settings))))
    assert_learnt(rewards_of(tmp_path, "0-env_gspo", steps))
