"""A model with a scalar head goes through ZeRO: it loads, and its digest, checkpoint and export are whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from engine.backends.causal_lm import digest_weights
from engine.backends.group.group import Group
from engine.backends.packing import pack
from engine.backends.protocol import Objective
from engine.backends.scalar_lm import ScalarLM, load_model
from engine.errors import BadModelFolder, BadSpec
from engine.losses.spec import CrossEntropySpec
from storage.chain import OptimizerSpec
from tests.engine.deepspeed.conftest import OnRanks, some_samples, state_of

CPU = torch.device("cpu")
Load = Callable[..., OnRanks]


@pytest.fixture(scope="module")
def scalar_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "scalar"
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(tiny_folder, num_labels=1).save_pretrained(folder)
    return folder


def load_scalar(folder: Path) -> ScalarLM:
    model = load_model(folder, dtype=torch.float32, compute_dtype=torch.float32, device=CPU)
    assert isinstance(model, ScalarLM)
    return model


def test_values_are_the_model_s_own_scores(scalar_folder: Path) -> None:
    """Its own score of a sequence is that of the last token; packed beside another sequence it stays the same."""
    model, samples = load_scalar(scalar_folder), some_samples([9, 14])
    own = AutoModelForSequenceClassification.from_pretrained(scalar_folder)
    own.config.pad_token_id = None
    with torch.no_grad():
        values_N = model.values(pack(samples, device=CPU)).split([s.trained for s in samples])
        for sample, value in zip(samples, values_N, strict=True):
            before_last = torch.tensor([sample.token_ids[:-1]])
            assert value[-1].item() == pytest.approx(own(input_ids=before_last).logits.item(), abs=1e-5)


def test_a_scalar_head_needs_one_number(tiny_folder: Path, tmp_path: Path) -> None:
    AutoModelForSequenceClassification.from_pretrained(tiny_folder, num_labels=3).save_pretrained(tmp_path / "three")
    with pytest.raises(BadModelFolder, match="no head `score` of one number"):
        load_model(tmp_path / "three", dtype=torch.float32, compute_dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_a_scalar_head_goes_through_zero(
    stage: int, two_ranks: Group, on_ranks: Load, scalar_folder: Path, tmp_path: Path
) -> None:
    trainer = on_ranks(two_ranks, scalar_folder, zero_stage=stage)
    digest, parts = digest_weights(load_scalar(scalar_folder))
    assert "score.weight" in parts and trainer.digest() == digest
    trainer.call("export", tmp_path / "export")
    assert digest_weights(load_scalar(tmp_path / "export"))[0] == digest
    own = dict(load_scalar(scalar_folder).named_weights())
    assert all(torch.equal(tensor, own[name]) for name, tensor in state_of(trainer.checkpoint()).items())
    with pytest.raises(BadSpec, match="one number per token"):
        trainer.update(some_samples(), Objective(CrossEntropySpec()), OptimizerSpec(lr=1e-3), 30)
