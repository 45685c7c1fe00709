"""Runs the training flow that a config names: what `recurring` and `sweep` do with theirs."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from flows.configs.common import DatasetSource, TrainingConfig
from flows.configs.sft_to_gspo import SFTToGSPOConfig
from flows.configs.training import AnyTraining, DPOTraining, RewardModelTraining, SFTToGSPOTraining, SFTTraining
from tasks.datasets.spec import DatasetUse


def flow_of(kind: str) -> Callable[..., Any]:
    """A flow's function has its module's name."""
    return getattr(import_module(f"flows.{kind}"), kind)  # type: ignore[no-any-return]


def inputs_of(training: AnyTraining) -> dict[str, tuple[DatasetSource, DatasetUse]]:
    """What the flow trains on, as its run names it ("dataset" first), and what it is read as."""
    config: TrainingConfig = training.config
    use: DatasetUse = "prompt"
    if isinstance(training, SFTTraining | SFTToGSPOTraining):
        use = "completion"
    elif isinstance(training, DPOTraining):
        use = "preference"
    elif isinstance(training, RewardModelTraining):
        use = training.config.data.use
    further: dict[str, tuple[DatasetSource, DatasetUse]] = {}
    if isinstance(config, SFTToGSPOConfig):
        further["prompts"] = (config.data.prompts, "prompt")
    return {"dataset": (config.data.train, use), **further}
