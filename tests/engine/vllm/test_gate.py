"""Faults planted between the trainer and vLLM's live layers, on the way of a sync. Each must end in SamplerOutOfSync
before a completion is returned, or leave no trace in what is sampled. The workers run in this process, so a test plants
a fault by patching the extension that they are made of, or vLLM itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.protocol import sync
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.trainer import TorchTrainer
from engine.backends.vllm.extension import Extension
from engine.backends.weight_files.tensor_files import read_tensors, write_tensors
from tests.engine.vllm.gating import LAYER, assert_drawn_from, assert_recovers, assert_refused, draw, plant, spec_of

pytestmark = pytest.mark.vllm

# -- one tensor ---------------------------------------------------------------------------------------------------

NAMES = [
    LAYER + "self_attn.o_proj.weight",
    LAYER + "self_attn.q_proj.weight",
    LAYER + "self_attn.k_proj.weight",
    LAYER + "self_attn.v_proj.weight",
    LAYER + "mlp.up_proj.weight",
    LAYER + "mlp.down_proj.weight",
    LAYER + "input_layernorm.weight",
    "model.norm.weight",
    "model.embed_tokens.weight",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_that_stays_as_it_was(
    sampler: Any, trainer: TorchTrainer, monkeypatch: pytest.MonkeyPatch, tiny_folder: Path, name: str
) -> None:
    old = dict(TorchBackend(spec_of()).load(tiny_folder).model.exported_weights())[name].detach().clone()
    plant(monkeypatch, lambda tensors: ((n, old if n == name else t) for n, t in tensors))
    assert_refused(sampler, trainer, f"tensor {name} is not what the live model computes with")
    assert_recovers(sampler, trainer, monkeypatch)


def test_a_tensor_that_never_reaches_vllm(
    sampler: Any, trainer: TorchTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, lambda tensors: ((n, t) for n, t in tensors if n != NAMES[0]))
    assert_refused(sampler, trainer, f"tensor {NAMES[0]} is not what the live model computes with")
    assert_recovers(sampler, trainer, monkeypatch)


@pytest.mark.parametrize("name", [n for n in NAMES if "norm" not in n])
def test_a_tensor_of_which_one_value_changed_and_was_not_applied(
    backend: Any, trainer: TorchTrainer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In bfloat16 a step moves few of the rounded values: the columns that are read are those that changed."""
    sampler = backend.new_sampler(trainer)
    sync(sampler, trainer, "state-0")
    weight = dict(trainer.model.exported_weights())[name]
    old = weight.detach().clone()
    with torch.no_grad():
        weight[33, 100] += 1e-4
    plant(monkeypatch, lambda tensors: ((n, old if n == name else t) for n, t in tensors))
    assert_refused(sampler, trainer, f"tensor {name} is not what the live model computes with")
    sampler.close()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("model.layers.0.self_attn.o_proj.weight", "model.layers.2.self_attn.o_proj.weight"),
        ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"),
        ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.layers.0.input_layernorm.weight", "model.norm.weight"),
    ],
)
def test_two_tensors_of_one_shape_swapped(
    sampler: Any, trainer: TorchTrainer, monkeypatch: pytest.MonkeyPatch, one: str, other: str
) -> None:
    swap = {one: other, other: one}
    plant(monkeypatch, lambda tensors: ((swap.get(n, n), t) for n, t in tensors))
    assert_refused(sampler, trainer, f"tensor ({one}|{other}) is not what the live model computes with")
    assert_recovers(sampler, trainer, monkeypatch)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the head shares the tensor of the embedding")
def test_a_tied_head_that_keeps_the_old_embedding(
    sampler: Any, trainer: TorchTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state that vLLM 0.32 leaves on the CPU when the head is not tied again."""
    monkeypatch.setattr(Extension, "ostinato_retie", staticmethod(lambda model: None))
    assert_refused(sampler, trainer, "tensor model.embed_tokens.weight is not what .* lm_head")
    assert_recovers(sampler, trainer, monkeypatch)


def test_a_tensor_that_the_trainer_forgot(
    sampler: Any, trainer: TorchTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing from weights and manifest alike, so that no digest tells."""
    everything = trainer.model.exported_weights
    for name in (NAMES[0], NAMES[2], NAMES[6]):
        remaining = [(n, t) for n, t in everything() if n != name]
        monkeypatch.setattr(trainer.model, "exported_weights", lambda remaining=remaining: iter(remaining))
        assert_refused(sampler, trainer, "staged no tensor for the live parameter model.layers.1")
    assert_recovers(sampler, trainer, monkeypatch)


# -- files --------------------------------------------------------------------------------------------------------


@pytest.fixture
def staged(sampler: Any) -> Any:
    """The sampler, told to take files."""
    sampler.spec = spec_of(transport="shm").sampler
    return sampler


def in_two_files(trainer: TorchTrainer, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[list[Path]], Any]) -> None:
    honest = trainer.stage_weights

    def stage(folder: Path, *, dtype: torch.dtype) -> list[Path]:
        (whole,) = honest(folder, dtype=dtype)
        tensors = [(name, tensor.clone()) for name, tensor in read_tensors(whole)]
        paths = [folder / "a.safetensors", folder / "b.safetensors"]
        write_tensors(paths[0], tensors[:9])
        write_tensors(paths[1], tensors[9:])
        whole.unlink()
        return spoil(paths) or paths

    monkeypatch.setattr(trainer, "stage_weights", stage)


def flip_a_byte(paths: list[Path]) -> None:
    content = bytearray(paths[1].read_bytes())
    content[-1000] ^= 1
    paths[1].write_bytes(content)


def cut_short(paths: list[Path]) -> None:
    paths[1].write_bytes(paths[1].read_bytes()[:-8])


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (flip_a_byte, "arrived with other bytes"),
        (lambda paths: paths[:1], "did not arrive"),
        (lambda paths: paths[1].unlink(), "b.safetensors is not a whole safetensors file"),
        (cut_short, "is not a whole safetensors file"),
        (lambda paths: [*paths, paths[0]], "arrived twice"),
    ],
    ids=["garbled", "not-named", "gone", "cut-short", "twice"],
)
def test_a_staged_file_spoilt(
    staged: Any, trainer: TorchTrainer, monkeypatch: pytest.MonkeyPatch, spoil: Any, match: str
) -> None:
    in_two_files(trainer, monkeypatch, spoil)
    assert_refused(staged, trainer, match)
    assert_recovers(staged, trainer, monkeypatch)


def test_staged_files_are_gone_afterwards(
    staged: Any, trainer: TorchTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []
    in_two_files(trainer, monkeypatch, lambda paths: seen.extend(paths))
    sync(staged, trainer, "state-1")
    assert_drawn_from(trainer, draw(staged))
    assert seen and not any(path.parent.exists() for path in seen)


# -- what no checksum sees ----------------------------------------------------------------------------------------


def test_the_same_weights_that_compute_something_else(
    sampler: Any, trainer: TorchTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = sampler._shared.ensure_running()._llm.llm_engine.model_executor.driver_worker.worker.model_runner
    norm = runner.get_model().model.layers[0].input_layernorm
    monkeypatch.setattr(norm, "variance_epsilon", 1.0)
    assert_refused(sampler, trainer, "logprobs differ from the trainer's by")
    assert_recovers(sampler, trainer, monkeypatch)
