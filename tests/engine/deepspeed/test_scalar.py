"""Tests of models with a scalar head under ZeRO: loading, training on values, digests, checkpoints and exports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from engine.backends.deepspeed.meta_model import open_meta_model, streamed_weights
from engine.backends.protocol import Objective
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.loading import load_model
from engine.backends.torch.packing import pack
from engine.backends.torch.probes import probe_model
from engine.backends.torch.scalar_lm import ScalarLM, is_scalar
from engine.backends.torch.trainer import TorchTrainer
from engine.backends.torch.updates import adamw_groups, set_adamw
from engine.backends.weight_files.digests import digest_tensors
from engine.cluster.rank_group import RankGroup
from engine.errors import BadModelFolder, BadSpec
from engine.losses.likelihood import CrossEntropySpec
from engine.losses.pairs import RankingSpec
from engine.losses.values import MSESpec
from engine.models.samples import Sample
from engine.protocol import TokenSequence
from engine.specs.engine import LocalEngineSpec
from storage.chain.records import OptimizerSpec
from tests.engine.deepspeed.conftest import (
    VALUE_TOLERANCE,
    OnRanks,
    assert_weights_close,
    same_bytes,
    some_samples,
    state_of,
)

CPU = torch.device("cpu")
Load = Callable[..., OnRanks]


def load_scalar(folder: Path) -> ScalarLM:
    model = load_model(folder, dtype=torch.float32, compute_dtype=torch.float32, device=CPU)
    assert isinstance(model, ScalarLM)
    return model


def test_values_are_the_model_s_own_scores(scalar_folder: Path) -> None:
    """transformers' score of a sequence is the value of its last token, also when it is packed with another
    sequence."""
    model, samples = load_scalar(scalar_folder), some_samples([9, 14])
    reference = AutoModelForSequenceClassification.from_pretrained(scalar_folder)
    reference.config.pad_token_id = None
    with torch.no_grad():
        values_N = model.values(pack(samples, device=CPU)).split([s.trained for s in samples])
        for sample, value in zip(samples, values_N, strict=True):
            before_last = torch.tensor([sample.token_ids[:-1]])
            assert value[-1].item() == pytest.approx(reference(input_ids=before_last).logits.item(), abs=1e-5)


def test_a_scalar_head_needs_one_number(tiny_folder: Path, tmp_path: Path) -> None:
    AutoModelForSequenceClassification.from_pretrained(tiny_folder, num_labels=3).save_pretrained(tmp_path / "three")
    with pytest.raises(BadModelFolder, match="no head 'score' of one number"):
        load_model(tmp_path / "three", dtype=torch.float32, compute_dtype=torch.float32, device=CPU)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_scalar_head_goes_through_zero(
    stage: int, two_ranks: RankGroup, on_ranks: Load, scalar_folder: Path, tmp_path: Path
) -> None:
    trainer = on_ranks(two_ranks, scalar_folder, zero_stage=stage)
    digest, parts = digest_tensors(load_scalar(scalar_folder).named_weights())
    assert "score.weight" in parts and trainer.digest() == digest
    trainer.call("export", tmp_path / "export")
    assert digest_tensors(load_scalar(tmp_path / "export").named_weights())[0] == digest
    stored = dict(load_scalar(scalar_folder).named_weights())
    assert all(torch.equal(tensor, stored[name]) for name, tensor in state_of(trainer.checkpoint()).items())
    with pytest.raises(BadSpec, match="one number per token"):
        trainer.update(some_samples(), Objective(CrossEntropySpec()), OptimizerSpec(lr=1e-3), 30)


def untied(tiny_folder: Path, folder: Path) -> Path:
    """The tiny model with a head that is not the embedding."""
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_folder)
    model.config.tie_word_embeddings = False
    torch.manual_seed(1)
    type(model)(model.config).save_pretrained(folder)
    assert "lm_head.weight" in load_file(folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("tied", [True, False])
def test_a_new_head_is_drawn_and_the_decoder_alone_is_read(tied: bool, tiny_folder: Path, tmp_path: Path) -> None:
    folder = tiny_folder if tied else untied(tiny_folder, tmp_path / "untied")
    meta_model = open_meta_model(folder, dtype=torch.float32, parameter_dtype=torch.float32, device=CPU, head_seed=7)
    assert not meta_model.probed  # read from the files, not by way of transformers
    weights = {name: torch.empty(tensor.shape) for name, tensor in meta_model.model.named_weights()}
    for name, tensor in weights.items():
        half = tensor.numel() // 2  # in two pieces, as ranks read it
        meta_model.weights.read_into(name, tensor.view(-1)[:half])
        meta_model.weights.read_into(name, tensor.view(-1)[half:], start=half)
    whole = new_trainer(folder).weights_digest()
    assert digest_tensors(sorted(weights.items())) == whole
    with streamed_weights(meta_model):
        probe_model(meta_model.model, folder)
    meta_model.model.module.config.save_pretrained(tmp_path / "config")
    assert is_scalar(tmp_path / "config")


def new_trainer(folder: Path) -> TorchTrainer:
    spec = LocalEngineSpec(device="cpu", compute_dtype="float32", threads=1)
    return TorchBackend(spec).load(folder, head="scalar", init_seed=7)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_language_model_gets_the_torch_trainer_s_head_on_ranks(
    stage: int, two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path, tmp_path: Path
) -> None:
    """Head and values are equal to the torch trainer's, and so are steps on values and on pairs, up to rounding."""
    trainer = on_ranks(two_ranks, tiny_folder, head="scalar", init_seed=7, zero_stage=stage)
    reference = new_trainer(tiny_folder)
    assert trainer.digest() == reference.weights_digest()[0]
    scored = [TokenSequence(s.token_ids, s.loss_mask) for s in some_samples()]

    def gap() -> float:
        theirs, mine = (each.values(scored, max_tokens=30) for each in (trainer.trainer, reference))
        pairs = [pair for rows in zip(theirs, mine, strict=True) for pair in zip(*rows, strict=True)]
        return max(abs(a - b) for a, b in pairs)

    # Equal values before training, and nearly equal ones after a step of each loss.
    assert gap() <= VALUE_TOLERANCE
    fitted = [replace(s, returns=[1.0] * s.trained) for s in some_samples()]
    ends = [
        Sample([5, 6, token, 2], [0.0, 0.0, 0.0, 1.0], str(token // 2), preferred=token % 2 == 0)
        for token in range(8, 14)
    ]
    optimizer = OptimizerSpec(lr=1e-4, eps=1e-3)
    for samples, objective in ((fitted, Objective(MSESpec())), (ends, Objective(RankingSpec()))):
        report = trainer.update(samples, objective, optimizer, 30)
        other = reference.update(samples, objective, optimizer, max_tokens=30)
        assert report.metrics["loss"] == pytest.approx(other.metrics["loss"], abs=VALUE_TOLERANCE)
        assert report.metrics["grad_norm"] == pytest.approx(other.metrics["grad_norm"], rel=1e-3)
    assert gap() <= 1e-3
    # A scalar model has no logprobs, and its export has the digest of the ranks.
    with pytest.raises(BadSpec, match="no logprobs"):
        trainer.trainer.logprobs(scored, temperature=1.0, max_tokens=30)
    trainer.call("export", tmp_path / "export")
    assert digest_tensors(load_scalar(tmp_path / "export").named_weights())[0] == trainer.digest()


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        {"zero_stage": 0}, {"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3},
        {"zero_stage": 3, "activation_checkpointing": "recompute"},
    ],
    ids=str,
)  # fmt: skip
def test_values_train_on_two_ranks_as_on_one(
    spec: dict[str, object], two_ranks: RankGroup, on_ranks: Load, scalar_folder: Path, tmp_path: Path
) -> None:
    """Loss and gradient are those over the trained tokens of all ranks, and each side reads the other's files."""
    samples, targets = some_samples([9, 14, 11, 6]), [0.5, -1.0, 2.0, 0.25]
    targets_N = torch.tensor([t for s, t in zip(samples, targets, strict=True) for _ in range(s.trained)])
    # The reference is AdamW over the whole batch in one process.
    trainer, reference = on_ranks(two_ranks, scalar_folder, **spec), TorchTrainer(load_scalar(scalar_folder))
    model, optimizer = reference.model, OptimizerSpec(lr=1e-3, eps=1e-3, max_grad_norm=0.5)
    assert isinstance(model, ScalarLM)
    adamw = torch.optim.AdamW(adamw_groups(list(model.module.parameters())))
    set_adamw(adamw.param_groups, optimizer)
    for _ in range(2):
        adamw.zero_grad()
        loss = (model.values(pack(samples, device=CPU)) - targets_N).square().mean()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.module.parameters(), 0.5))
        adamw.step()
        found_loss, found_norm = trainer.call("update_values", samples, targets, optimizer)
        assert found_loss == pytest.approx(loss.item(), abs=VALUE_TOLERANCE)
        assert found_norm == pytest.approx(norm, rel=1e-4)
    # Checkpoints go from the ranks to one process and back without a changed byte.
    files = trainer.checkpoint()
    state = state_of(files)
    assert_weights_close({name: state[name] for name, _ in reference.weights()}, dict(reference.weights()))
    reference.read_checkpoint(files, optimizer=True)
    back = reference.write_checkpoint(tmp_path / "torch")
    assert same_bytes(state_of(back), state)
    again = on_ranks(two_ranks, scalar_folder, **spec)
    again.call("read_checkpoint", back, True)
    assert same_bytes(state_of(again.checkpoint()), state)
    trainer.call("export", tmp_path / "export")
    assert digest_tensors(load_scalar(tmp_path / "export").named_weights())[0] == reference.weights_digest()[0]
