"""Helpers for the flows that run a training flow as a child run: `recurring` and `sweep`."""

from __future__ import annotations

from collections.abc import Coroutine
from importlib import import_module
from typing import Any

from prefect import Flow

from engine.models.hub import hub_repo_of_key
from flows.configs.common import PromptDataConfig, TrainingConfig
from flows.configs.sft_to_gspo import SFTToGSPOConfig
from flows.configs.training import AnyTraining, DPOTraining, RewardModelTraining, SFTToGSPOTraining, SFTTraining
from storage.registry.hub import resolve_commit
from storage.store.objects import ObjectStore
from tasks.datasets.spec import DatasetUse, TrainingSource


def import_flow(kind: str) -> Flow[..., Coroutine[Any, Any, Any]]:
    """Imports the training flow `kind`, whose function is named like its module."""
    return getattr(import_module(f"flows.{kind}"), kind)  # type: ignore[no-any-return]


def with_full_versions(store: ObjectStore, training: AnyTraining) -> AnyTraining:
    """The training with the full versions of its registered datasets, and with commits in place of branches of the hub,
    so that all child runs use the same. Raises DatasetError, HubError, BadModelFolder."""
    uses = {"train" if name == "dataset" else name: use for name, (_, use) in training_inputs(training).items()}
    data: Any = training.config.data
    if getattr(data, "heldout", None) is not None:
        uses["heldout"] = "prompt" if isinstance(data, PromptDataConfig) else uses["train"]
    resolved = {name: getattr(data, name).resolved(store, use) for name, use in uses.items()}
    model = training.config.model
    repo = hub_repo_of_key(model.key)
    if repo is not None:
        model = model.model_copy(update={"key": resolve_commit(repo).uri})
    config = training.config.model_copy(update={"model": model, "data": data.model_copy(update=resolved)})
    return training.model_copy(update={"config": config})


def training_inputs(training: AnyTraining) -> dict[str, tuple[TrainingSource, DatasetUse]]:
    """The datasets of a training with the use of each, by the name that the run gives them. "dataset" is the first."""
    config: TrainingConfig = training.config
    use: DatasetUse = "prompt"
    if isinstance(training, SFTTraining | SFTToGSPOTraining):
        use = "completion"
    elif isinstance(training, DPOTraining):
        use = "preference"
    elif isinstance(training, RewardModelTraining):
        use = training.config.data.use
    inputs: dict[str, tuple[TrainingSource, DatasetUse]] = {"dataset": (config.data.train, use)}
    if isinstance(config, SFTToGSPOConfig):
        inputs["prompts"] = (config.data.prompts, "prompt")
    return inputs
