"""Adapters on a base in 4 bits (QLoRA): the NF4 code, the gradient of peft with bitsandbytes, and what stays as it is
with plain weights. They need the package bitsandbytes, which the extra qlora has."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engine.backends.torch import lora
from engine.backends.torch.lora import check_four_bit, four_bit_layer
from engine.backends.torch.shared_base import SharedBase, SharedTrainer
from engine.errors import BadSpec
from engine.protocol import SamplingParams, TokenSequence
from engine.specs.adapters import LoraSpec, parse_trainable
from tests.engine.torch.peft_gradients import check_gradient_is_pefts, peft_model
from tests.fixtures.adapters import (
    DORA,
    LORA,
    SPLIT,
    WHOLE,
    backend,
    logprobs,
    sampler_for,
    state_of,
    train,
)

pytest.importorskip("bitsandbytes", reason="needs the package bitsandbytes, which the extra qlora has")

QLORA = LORA.model_copy(update={"load_in_4bit": True})
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
"""The values of the code: arXiv:2305.14314, appendix E."""


@pytest.fixture
def base(tiny_folder: Path) -> SharedBase:
    return backend().load_base(tiny_folder, key="models/tiny/000001", load_in_4bit=True)


# -- the code --------------------------------------------------------------------------------------------------


def nf4(weight_OI: Tensor) -> Tensor:
    """Each number as the nearest value of the code, times the largest magnitude of its block of 64."""
    blocks = weight_OI.flatten().split(64)
    rounded = []
    for block in blocks:
        scale = block.abs().max()
        nearest = (block[:, None] / scale - torch.tensor(NF4)).abs().argmin(1)
        rounded.append(torch.tensor(NF4)[nearest] * scale)
    return torch.cat(rounded).reshape(weight_OI.shape)


@pytest.mark.parametrize("shape", [(64, 64), (3, 192)], ids=str)
def test_a_weight_is_rounded_to_the_code_of_the_paper(shape: tuple[int, int]) -> None:
    rows, columns = shape
    plain = nn.Linear(columns, rows, bias=False)
    nn.init.normal_(plain.weight, std=0.02, generator=torch.Generator().manual_seed(0))
    weight = plain.weight.detach().clone()
    held = four_bit_layer(plain, device=torch.device("cpu")).base_weight()
    torch.testing.assert_close(held, nf4(weight), rtol=1e-6, atol=0)
    # The widest gap of the code is the first, so no number moves by more than half of it.
    assert (held - weight).abs().max() <= (NF4[1] - NF4[0]) / 2 * weight.abs().max()


def test_a_layer_whose_rows_are_no_whole_blocks_keeps_its_plain_weight() -> None:
    """bitsandbytes dequantises a weight of shape (3, 96) wrongly on CPUs with AVX-512."""
    plain = nn.Linear(96, 3)
    assert four_bit_layer(plain, device=torch.device("cpu")).base_weight() is plain.weight


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_base_takes_4_5_bits_per_weight_of_its_linear_layers(tiny_folder: Path, dtype: str) -> None:
    plain, base = (backend(dtype).load_base(tiny_folder, load_in_4bit=in_4bit) for in_4bit in (False, True))
    linear = sum(layer.weight.numel() for layer in plain.layers.values())
    assert plain.nbytes() - base.nbytes() == linear * (backend(dtype).compute_dtype.itemsize - 4.5 / 8)
    # A sampler in lower precision copies the other weights only.
    plain.sampling_model()
    base.sampling_model()
    assert plain.nbytes() - base.nbytes() == linear * (backend(dtype).compute_dtype.itemsize - 4.5 / 8)


# -- what it computes ------------------------------------------------------------------------------------------


def plain_base(base: SharedBase, folder: Path, dtype: str) -> SharedBase:
    """A base with plain weights, equal to the dequantised ones of `base`."""
    plain = backend(dtype).load_base(folder)
    for name, layer in plain.layers.items():
        layer.weight.data.copy_(base.layers[name].base_weight())
    return plain


@pytest.mark.parametrize("spec", [QLORA, DORA], ids=["lora", "dora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_computes_and_trains_as_with_the_dequantised_weights(
    tiny_folder: Path, tmp_path: Path, dtype: str, spec: LoraSpec
) -> None:
    engine = backend(dtype)
    base = engine.load_base(tiny_folder, load_in_4bit=True)
    plain = plain_base(base, tiny_folder, dtype)
    assert logprobs(engine.adapter_off(base)) == logprobs(engine.adapter_off(plain))
    adapters = [engine.adapter(on, spec, init_seed=1) for on in (base, plain)]
    assert logprobs(adapters[0]) == logprobs(engine.adapter_off(base))  # policy 0
    for adapter in adapters:
        train(adapter, 60, updates=3)
    assert logprobs(adapters[0]) == logprobs(adapters[1])
    assert state_of(adapters[0], tmp_path / "0") == state_of(adapters[1], tmp_path / "1")


@pytest.mark.parametrize("spec", [QLORA, DORA], ids=["lora", "dora"])
def test_the_gradient_is_that_of_peft_with_bitsandbytes(tiny_folder: Path, spec: LoraSpec) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    base = backend().load_base(tiny_folder, load_in_4bit=True)
    adapter = backend().adapter(base, spec, init_seed=1)
    train(adapter, 60)  # at B = 0 the gradient of A is zero
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    module = AutoModelForCausalLM.from_pretrained(
        tiny_folder, quantization_config=quantization, dtype=torch.float32, device_map="cpu", attn_implementation="sdpa"
    )
    # In eval mode, bitsandbytes rounds what a first layer on a CPU computes to bfloat16.
    theirs = peft_model(module, spec, adapter).train()
    check_gradient_is_pefts(adapter, theirs, max_tokens=SPLIT, loss_rtol=1e-5, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_the_sampler_draws_from_the_same_base(tiny_folder: Path, dtype: str, tolerance: float) -> None:
    engine = backend(dtype)
    base = engine.load_base(tiny_folder, load_in_4bit=True)
    trainers: list[SharedTrainer] = [engine.adapter(base, QLORA, init_seed=0), engine.adapter_off(base)]
    train(trainers[0], 60, updates=4)
    prompts = [[60, 61, 7], [5, 6]]
    for trainer in trainers:
        completions = sampler_for(trainer).sample(prompts, [1, 2], SamplingParams(max_new_tokens=8))
        for prompt, completion in zip(prompts, completions, strict=True):
            sampled = len(completion.token_ids)
            weights = [0.0] * len(prompt) + [1.0] * sampled
            sequence = TokenSequence([*prompt, *completion.token_ids], weights, "")
            expected = trainer.logprobs([sequence], temperature=1.0, max_tokens=WHOLE)[0]
            assert completion.logprobs == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("spec", [QLORA, DORA], ids=["lora", "dora"])
def test_the_merged_model_computes_what_the_policy_does(base: SharedBase, tmp_path: Path, spec: LoraSpec) -> None:
    adapter = backend().adapter(base, spec, init_seed=5)
    train(adapter, 60, updates=3)
    for trainer, name in ((adapter, "adapter"), (backend().adapter_off(base), "base")):
        trainer.export_merged(tmp_path / name)
        merged = backend().load(tmp_path / name)
        for ours, theirs in zip(logprobs(trainer), logprobs(merged), strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)


# -- state -----------------------------------------------------------------------------------------------------


def test_the_digest_is_that_of_the_plain_weights(base: SharedBase, tiny_folder: Path) -> None:
    plain = backend().load_base(tiny_folder)
    assert base.digest == plain.digest == backend().load(tiny_folder).weights_digest()[0]
    assert backend().adapter(base, QLORA, init_seed=0).weights_digest() == (
        backend().adapter(plain, LORA, init_seed=0).weights_digest()
    )


def test_a_restored_adapter_on_a_new_base_goes_on_as_if_it_had_never_stopped(
    base: SharedBase, tiny_folder: Path, tmp_path: Path
) -> None:
    trained = backend().adapter(base, QLORA, init_seed=0)
    train(trained, 60, updates=2)
    files = trained.write_checkpoint(tmp_path / "checkpoint")
    again = backend().load_base(tiny_folder, load_in_4bit=True)
    restored = backend().adapter(again, QLORA, init_seed=9)
    restored.read_checkpoint(files, optimizer=True)
    for adapter in (trained, restored):
        train(adapter, 80, updates=2)
    assert restored.weights_digest() == trained.weights_digest()
    assert state_of(restored, tmp_path / "restored") == state_of(trained, tmp_path / "trained")


def test_a_root_with_plain_weights_is_what_it_was_before() -> None:
    assert "load_in_4bit" not in LORA.model_dump(mode="json")
    assert parse_trainable(QLORA.model_dump(mode="json")) == QLORA


# -- refusals --------------------------------------------------------------------------------------------------


def test_a_missing_package_is_named(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(lora, "version", version)
    with pytest.raises(BadSpec, match=r"load_in_4bit=true.*bitsandbytes is not installed.*ostinato\[qlora\]"):
        backend().load_base(tiny_folder, load_in_4bit=True)


def test_a_device_that_cannot_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadSpec, match=r"load_in_4bit=true.*does not compute.*'meta'.*leave load_in_4bit out"):
        check_four_bit(torch.device("meta"), torch.float32)
