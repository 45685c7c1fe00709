"""The names of flow runs: each says what the run is, and is short enough for a list of runs."""

from __future__ import annotations

from pathlib import PurePath

from tasks.datasets.spec import (
    HubDataset,
    MixtureDataset,
    PythonDataset,
    ReasoningGymDataset,
    RegisteredDataset,
    TrainingSource,
)

VERSION_LETTERS = 8


def model_title(key: str) -> str:
    """The last part of a model's key: `models/smollm2-135m` -> smollm2-135m. A long version is cut: `helper@<digest>`
    -> helper@ and the first letters of the digest."""
    name, separator, version = PurePath(key).name.partition("@")
    if len(version) > 2 * VERSION_LETTERS:
        version = version[:VERSION_LETTERS]
    return f"{name}{separator}{version}" or key


def dataset_title(source: TrainingSource) -> str:
    """The name of a dataset: of its generator or function, of the registered dataset, or of its file without folder and
    ending (for a pattern, of the folder). For several files, and for a mixture, it is the first one's, with the number
    of the others."""
    if isinstance(source, MixtureDataset):
        return f"{dataset_title(source.parts[0].dataset)} and {len(source.parts) - 1} more"
    if isinstance(source, RegisteredDataset):
        return model_title(source.key)
    if isinstance(source, ReasoningGymDataset):
        return source.name
    if isinstance(source, PythonDataset):
        return source.path.partition(":")[2]
    path = PurePath(source.path)
    if isinstance(source, HubDataset):
        return path.name
    of_folder = any(letter in path.name for letter in "*?[") and path.parent.name
    name = path.parent.name if of_folder else path.stem
    if source.further_paths:
        return f"{name} and {len(source.further_paths)} more"
    return name


def training_title(flow: str, key: str, source: TrainingSource, seed: int) -> str:
    """The name of a training run: `grpo smollm2-135m on chain_sum, seed 3`."""
    return f"{flow} {model_title(key)} on {dataset_title(source)}, seed {seed}"
