"""The keywords of the training classes, as a type checker and an editor see them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from flows.catalogue import DPOAlgorithm, KTOAlgorithm, ORPOAlgorithm, PreferenceAlgorithm, SimPOAlgorithm
from flows.configs.common import GRPOAlgorithm, SFTAlgorithm
from flows.configs.environments import EnvironmentConfig
from flows.configs.optimizer import SFTOptimizer
from flows.configs.ppo import CreditConfig
from flows.configs.reinforcement import BatchRules, Regularisation, RunRules, SamplingRules
from flows.configs.rejection import RFTAlgorithm
from flows.distill import Distillation
from flows.dpo import DPO, DPOOptions
from flows.env_grpo import ENVGRPO
from flows.env_gspo import ENVGSPO
from flows.env_ppo import ENVPPO
from flows.grpo import GRPO
from flows.gspo import GSPO
from flows.kto import KTO, KTOOptions
from flows.orpo import ORPO, ORPOOptions
from flows.ppo import PPO
from flows.reward_model import RewardModelling
from flows.rft import RFT
from flows.sft import SFT
from flows.simpo import SimPO, SimPOOptions
from flows.training import options
from flows.training.schedules import AdamW, ConstantScheduler
from storage.serialization import Frozen

ROOT = Path(__file__).parents[4]

EVERY = {
    "logger", "stage_notifier", "callbacks", "lr_scheduler", "max_grad_norm", "skip_nan_gradients",
    "restart_from_checkpoint", "checkpoint_frequency", "checkpoint_every_steps", "data_seed", "weight_decay",
}  # fmt: skip
SUPERVISED = EVERY | {"dataset", "model", "lr", "samples_per_batch", "epochs"}
ROLLOUTS = EVERY | {
    "dataset", "model", "epochs", "completions_per_sample", "samples_per_batch", "samples_per_mini_batch",
    "mini_epochs_per_batch", "clip_range", "kl_beta",
}  # fmt: skip
POLICY_GRADIENT = ROLLOUTS | {
    "lr", "clip_range_high", "dual_clip", "loss_norm", "advantage_estimator", "pass_k", "kl_estimator", "entropy_coef",
    "importance_cap", "importance_mask", "policy_loss", "dynamic_sampling", "mask_truncated", "overlong_buffer",
    "overlong_penalty", "max_staleness", "kl_in", "kl_controller", "kl_target", "kl_horizon",
}  # fmt: skip
CRITIC = (POLICY_GRADIENT - {"lr"}) | {
    "max_num_ppo_steps", "value_model", "value_only_fraction", "lr_policy", "lr_value", "gae_lambda", "gae_gamma",
}  # fmt: skip
KEYWORDS: dict[type, set[str]] = {
    SFT: SUPERVISED,
    DPO: SUPERVISED | {"kl_beta", "loss_variant", "label_smoothing", "rpo_alpha", "reference_free"},
    SimPO: SUPERVISED | {"beta", "simpo_gamma"},
    ORPO: SUPERVISED | {"beta"},
    KTO: SUPERVISED | {"kl_beta", "desirable_weight", "undesirable_weight"},
    RewardModelling: SUPERVISED,
    RFT: {"dataset", "model", "grader", "rounds", "keep", "start_from", "lr"},
    PPO: CRITIC | {"grader"},
    GRPO: POLICY_GRADIENT | {"grader", "max_num_grpo_steps"},
    GSPO: POLICY_GRADIENT | {"grader", "max_num_gspo_steps"},
    Distillation: POLICY_GRADIENT | {
        "grader", "teacher", "teacher_beta", "max_num_distill_steps", "divergence", "divergence_beta", "teacher_top_k",
        "teacher_column", "on_policy",
    },
    ENVGRPO: POLICY_GRADIENT | {"environment_factory", "max_num_grpo_steps", "max_turns"},
    ENVGSPO: POLICY_GRADIENT | {"environment_factory", "max_num_gspo_steps", "max_turns"},
    ENVPPO: CRITIC | {"environment_factory", "max_turns"},
}
"""The arguments that each class is documented to have."""


def keywords(kind: type) -> set[str]:
    """The parameters of a constructor, with the keys of the TypedDict that it unpacks."""
    names: set[str] = set()
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            unpacked = str(parameter.annotation).removeprefix("Unpack[").removesuffix("]")
            names |= set(get_type_hints(getattr(sys.modules[kind.__module__], unpacked)))
        else:
            names.add(name)
    return names


@pytest.mark.parametrize(("kind", "expected"), KEYWORDS.items(), ids=[kind.__name__ for kind in KEYWORDS])
def test_a_constructor_lists_its_keywords(kind: type, expected: set[str]) -> None:
    assert expected <= keywords(kind)


@pytest.mark.parametrize(
    ("config", "base", "typed"),
    [
        (GRPOAlgorithm, Frozen, options.AlgorithmOptions),
        (Regularisation, Frozen, options.RegularisationOptions),
        (BatchRules, SamplingRules, options.BatchOptions),
        (SamplingRules, RunRules, options.SamplingOptions),
        (RFTAlgorithm, Frozen, options.RFTOptions),
        (RunRules, Frozen, options.LoopOptions),
        (SFTAlgorithm, Frozen, options.SupervisedOptions),
        (DPOAlgorithm, PreferenceAlgorithm, DPOOptions),
        (ORPOAlgorithm, PreferenceAlgorithm, ORPOOptions),
        (KTOAlgorithm, PreferenceAlgorithm, KTOOptions),
        (SimPOAlgorithm, PreferenceAlgorithm, SimPOOptions),
        (CreditConfig, Frozen, options.CriticOptions),
        (EnvironmentConfig, Frozen, options.EpisodeLimits),
    ],
)
def test_every_field_of_a_config_is_an_option_of_its_class_and_declared_alike(
    config: Any, base: Any, typed: Any
) -> None:
    differently = {"steps", "path", "arguments"}  # the length and the environment are arguments of their own
    names = config.model_fields.keys() - base.model_fields.keys() - differently
    expected = [f"    {name}: {config.__annotations__[name]}" for name in config.model_fields if name in names]
    lines = inspect.getsource(typed).splitlines()
    assert [line for line in lines if line in expected] == expected, "write these lines:\n" + "\n".join(expected)


def test_a_group_is_taken_as_a_whole_and_single_options_change_it() -> None:
    model: Any = type("Policy", (), {"name": "policy"})
    algorithm = SFTAlgorithm(steps=5, samples_per_batch=4)
    optimizer = SFTOptimizer(lr=1e-3, schedule="constant", beta1=0.5)
    trainer = SFT([], model, algorithm=algorithm, optimizer=optimizer, rules=RunRules(max_idle_steps=7))
    assert trainer.algorithm == algorithm and (trainer.max_steps, trainer.samples_per_batch) == (5, 4)
    assert trainer.schedule == ConstantScheduler(1e-3) and trainer.optimizer == AdamW.of(optimizer)
    assert trainer.rules.max_idle_steps == 7
    changed = SFT([], model, algorithm=algorithm, optimizer=optimizer, max_steps=2, lr=0.1, betas=(0.6, 0.7))
    assert changed.algorithm == SFTAlgorithm(steps=2, samples_per_batch=4)
    assert changed.schedule == ConstantScheduler(0.1) and changed.optimizer.betas == (0.6, 0.7)
    with pytest.raises(ValueError, match="samples_per_batch=0.5; give a whole number"):
        SFT([], model, algorithm=algorithm, samples_per_batch=0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KEYWORDS, ids=lambda kind: kind.__name__)
def test_a_misspelt_keyword_is_refused(kind: type) -> None:
    required = [name for name, one in inspect.signature(kind).parameters.items() if one.default is one.empty]
    arguments: dict[str, Any] = {name: None for name in required if name != "options"}
    arguments |= {"value_model": type("Value", (), {"name": "value"}), "model": type("Policy", (), {"name": "policy"})}
    known = {name: value for name, value in arguments.items() if name in required}
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'data_sed'; did you mean 'data_seed'\?"):
        kind(**known, data_sed=1)


SNIPPET = """
from flows.{module} import {name}

def train(dataset: list, model, value_model, grader, factory) -> None:
    {name}({positional}, {right})
    {name}({positional}, {wrong})
"""
CASES = [
    ("sft", "SFT", "dataset, model", "samples_per_batch=8", "sample_per_batch=8"),
    ("dpo", "DPO", "dataset, model", "loss_variant='ipo'", "loss_variant='ppo'"),
    ("simpo", "SimPO", "dataset, model", "simpo_gamma=0.5", "simpo_gamma='0.5'"),
    ("orpo", "ORPO", "dataset, model", "beta=0.2", "kl_beta=0.2"),
    ("kto", "KTO", "dataset, model", "desirable_weight=2.0", "desirable_weights=2.0"),
    ("reward_model", "RewardModelling", "dataset, model", "lr=1e-6", "learning_rate=1e-6"),
    ("grpo", "GRPO", "dataset, model, grader", "kl_beta=0.1", "kl_betta=0.1"),
    ("gspo", "GSPO", "dataset, model, grader", "max_num_gspo_steps=1", "max_num_grpo_steps=1"),
    ("distill", "Distillation", "dataset, model, teacher", "teacher_beta=0.5", "beta=0.5"),
    ("ppo", "PPO", "dataset, model, value_model, grader", "lr_policy=1e-6", "lr=1e-6"),
    ("env_grpo", "ENVGRPO", "dataset, model, factory", "max_turns=2", "max_turn=2"),
    ("env_gspo", "ENVGSPO", "dataset, model, factory", "max_turns=2", "max_turn=2"),
    ("env_ppo", "ENVPPO", "dataset, model, value_model, factory", "gae_lambda=0.9", "gae_lamda=0.9"),
]


@pytest.mark.slow
def test_mypy_refuses_a_misspelt_keyword_of_every_class(tmp_path: Path) -> None:
    fields = ("module", "name", "positional", "right", "wrong")
    for case in CASES:
        text = SNIPPET.format(**dict(zip(fields, case, strict=True)))
        (tmp_path / f"use_{case[0]}.py").write_text(text)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--follow-imports=silent", "--config-file",
               str(ROOT / "pyproject.toml"), *map(str, sorted(tmp_path.glob("use_*.py")))]  # fmt: skip
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in process.stdout.splitlines() if "[call-arg]" in line or "[arg-type]" in line]
    refused = {Path(line.partition(":")[0]).stem.removeprefix("use_"): line for line in lines}
    assert sorted(refused) == sorted(case[0] for case in CASES), process.stdout + process.stderr
    assert len(lines) == len(CASES)
    for module, *_, wrong in CASES:
        assert wrong.partition("=")[0] in refused[module]
