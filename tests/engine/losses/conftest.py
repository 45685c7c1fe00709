"""Two models of one layer, small enough for an update in milliseconds: a language head, and a scalar one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.loading import load_model
from engine.backends.torch.tiny import build_tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="package")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models") / "small", seed=3, hidden=64, layers=1)


@pytest.fixture(scope="package")
def small_scalar_folder(small_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("models") / "small-scalar"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForSequenceClassification.from_pretrained(small_folder, num_labels=1).save_pretrained(folder)
    return folder


def load(folder: Path, dtype: torch.dtype) -> CausalLM:
    return load_model(folder, dtype=dtype, compute_dtype=dtype, device=CPU)


@pytest.fixture(scope="package")
def exact(small_folder: Path) -> CausalLM:
    """The model in float64. Its weights never change, because updates of these tests have lr 0."""
    return load(small_folder, torch.float64)


@pytest.fixture(scope="package")
def exact_scalar(small_scalar_folder: Path) -> CausalLM:
    return load(small_scalar_folder, torch.float64)
