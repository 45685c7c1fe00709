"""The names of flow runs: each says what the run is, and is short enough for a list of runs."""

from __future__ import annotations

from pathlib import PurePath

from storage.store import keys
from tasks.datasets.spec import TrainingSource


def model_title(key: str) -> str:
    """The last part of a model's key: `models/smollm2-135m` -> smollm2-135m. A long version is cut: `helper@<digest>`
    -> helper@ and the first letters of the digest."""
    return keys.short_key(PurePath(key).name) or key


def training_title(flow: str, key: str, source: TrainingSource, seed: int) -> str:
    """The name of a training run: `grpo smollm2-135m on chain_sum, seed 3`."""
    return f"{flow} {model_title(key)} on {source.title}, seed {seed}"
