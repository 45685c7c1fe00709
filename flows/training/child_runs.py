"""Helpers for the flows that run a training flow as a child run: `recurring` and `sweep`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from flows.configs.common import DatasetSource, TrainingConfig
from flows.configs.sft_to_gspo import SFTToGSPOConfig
from flows.configs.training import AnyTraining, DPOTraining, RewardModelTraining, SFTToGSPOTraining, SFTTraining
from tasks.datasets.spec import DatasetUse


def import_flow(kind: str) -> Callable[..., Any]:
    """Imports the training flow `kind`, whose function is named like its module."""
    return getattr(import_module(f"flows.{kind}"), kind)  # type: ignore[no-any-return]


def training_inputs(training: AnyTraining) -> dict[str, tuple[DatasetSource, DatasetUse]]:
    """The datasets of a training with the use of each, by the name that the run gives them. "dataset" is the first."""
    config: TrainingConfig = training.config
    use: DatasetUse = "prompt"
    if isinstance(training, SFTTraining | SFTToGSPOTraining):
        use = "completion"
    elif isinstance(training, DPOTraining):
        use = "preference"
    elif isinstance(training, RewardModelTraining):
        use = training.config.data.use
    inputs: dict[str, tuple[DatasetSource, DatasetUse]] = {"dataset": (config.data.train, use)}
    if isinstance(config, SFTToGSPOConfig):
        inputs["prompts"] = (config.data.prompts, "prompt")
    return inputs
