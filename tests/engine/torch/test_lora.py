"""Adapters on one base: they compute and export what peft does, are independent of each other, and never change the
base."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from engine.backends.protocol import Objective
from engine.backends.torch.decoding.lean_decoder import PackedLinear
from engine.backends.torch.loading import load_model
from engine.backends.torch.lora import LoraLinear, LoraPair
from engine.backends.torch.shared_base import SharedBase
from engine.errors import BadSpec, NonFiniteGradient
from engine.losses.policy_gradient import GRPOSpec
from engine.models.samples import Sample
from engine.protocol import TokenSequence
from engine.specs.adapters import FullSpec, LoraSpec, parse_trainable
from tests.engine.torch.peft_gradients import check_gradient_is_pefts, peft_model
from tests.fixtures.adapters import (
    CE,
    DORA,
    FAST,
    LORA,
    SOME,
    SPECS,
    SPLIT,
    WHOLE,
    backend,
    logprobs,
    samples,
    state_of,
    train,
)


@pytest.fixture
def base(tiny_folder: Path) -> SharedBase:
    return backend().load_base(tiny_folder, key="models/tiny/000001")


# -- the spec --------------------------------------------------------------------------------------------------


def test_what_a_root_says_is_trained() -> None:
    assert parse_trainable({"kind": "full"}) == FullSpec()
    assert parse_trainable({"kind": "lora", "rank": 2, "target_modules": ["q_proj"]}) == LoraSpec(
        rank=2, alpha=32.0, target_modules=("q_proj",), use_rslora=False
    )
    assert parse_trainable(SOME.model_dump(mode="json")) == SOME
    assert (LORA.scale, LoraSpec(rank=4, alpha=6.0, use_rslora=True).scale) == (1.5, 3.0)  # 6 / 4, 6 / sqrt 4


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "kind"),
        ({"kind": "ia3"}, "ia3"),
        ({"kind": "lora", "rank": 0}, "rank"),
        ({"kind": "lora", "alpha": 0}, "alpha"),
        ({"kind": "lora", "alpha": float("inf")}, "alpha"),
        ({"kind": "lora", "target_modules": []}, "target_modules"),
        ({"kind": "lora", "target_modules": "q_proj"}, "target_modules"),
        ({"kind": "lora", "r": 8}, "r=8: is not a known field"),
        ({"kind": "full", "rank": 8}, "rank=8: is not a known field"),
    ],
)
def test_a_bad_spec_is_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(BadSpec, match=f"{named}.*Expected"):
        parse_trainable(given)


@pytest.mark.parametrize(
    ("target", "reason"),
    [("no_proj", "no linear layer"), ("lm_head", "language head"), ("embed_tokens", "no linear layer"), ("proj", "no")],
)
def test_a_target_that_is_no_linear_layer_is_named(base: SharedBase, target: str, reason: str) -> None:
    with pytest.raises(BadSpec, match=f"{target}.*{reason}.*down_proj, gate_proj, k_proj") as refused:
        backend().adapter(base, LoraSpec(target_modules=("q_proj", target)), init_seed=0)
    assert "all-linear" in str(refused.value)


# -- policy 0 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [LORA, DORA], ids=["lora", "dora"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_policy_0_and_the_base_are_the_full_model_to_the_bit(tiny_folder: Path, dtype: str, spec: LoraSpec) -> None:
    engine = backend(dtype)
    full, base = engine.load(tiny_folder), engine.load_base(tiny_folder)
    expected = logprobs(full)
    assert logprobs(engine.adapter(base, spec, init_seed=3)) == expected
    assert logprobs(engine.adapter_off(base)) == expected
    assert engine.adapter_off(base).weights_digest() == full.weights_digest()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_policy_0_of_a_model_with_biases_and_a_head_of_its_own(tmp_path: Path, dtype: str) -> None:
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        qwen = Qwen2ForCausalLM(config)
        for name, parameter in qwen.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)
    qwen.save_pretrained(tmp_path / "qwen")
    engine = backend(dtype)
    base = engine.load_base(tmp_path / "qwen")
    assert logprobs(engine.adapter(base, LORA, init_seed=0)) == logprobs(engine.load(tmp_path / "qwen"))
    assert base.model.head.weight.dtype == base.model.compute_dtype
    assert "lm_head" not in base.layers
    off = engine.adapter_off(base)
    off.export_merged(tmp_path / "again")
    assert logprobs(engine.load(tmp_path / "again")) == logprobs(off)


def test_a_base_in_lower_precision_holds_its_linear_layers_once(tiny_folder: Path) -> None:
    full, half = (backend(dtype).load_base(tiny_folder) for dtype in ("float32", "bfloat16"))
    linear = sum(layer.weight.numel() for layer in full.layers.values())
    assert full.nbytes() - half.nbytes() == 2 * linear
    every = sum(p.numel() for p in full.model.module.parameters())
    half.sampling_model()
    assert full.nbytes() - half.nbytes() == 2 * linear - 2 * (every - linear)  # embeddings and norms in both


def test_a_is_drawn_by_seed_and_name_and_b_is_zero(base: SharedBase, tiny_folder: Path) -> None:
    def draw(seed: int, spec: LoraSpec = LORA, on: SharedBase = base) -> dict[str, Tensor]:
        adapter = backend().adapter(on, spec, init_seed=seed)
        return {name: p.detach().clone() for name, p in adapter.trained_parameters()}

    first, again, other = draw(0), draw(0, on=backend().load_base(tiny_folder)), draw(1)
    assert len(first) == 2 * 7 * 4  # A and B of the seven linear layers of four blocks
    a_names = [name for name in first if name.endswith("lora_A.weight")]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in a_names)
    assert not any(first[name].any() for name in first.keys() - set(a_names))
    narrow = draw(0, LoraSpec(rank=4, target_modules=("q_proj",)))
    assert all(torch.equal(narrow[name], first[name]) for name in narrow)
    same_shape = [first[name] for name in a_names if "q_proj" in name or "k_proj" in name]
    assert not any(torch.equal(x, y) for i, x in enumerate(same_shape) for y in same_shape[:i])
    for name in a_names:  # uniform in +-1/sqrt(fan in), as peft's kaiming_uniform_(a=sqrt(5))
        bound = first[name].shape[1] ** -0.5
        assert 0.9 * bound < first[name].abs().max() <= bound


@pytest.mark.parametrize("fixed", [False, True], ids=["trainer", "sampler"])
def test_dora_by_hand(fixed: bool) -> None:
    plain = nn.Linear(2, 2)
    plain.weight.data, plain.bias.data = torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([10.0, 20.0])
    layer = LoraLinear(plain.requires_grad_(False))
    # W + 2BA = [[4, 4], [0, 2]], whose rows have the lengths sqrt(32) and 2.
    a_RI, b_OR, magnitude_O = (
        torch.tensor(values, requires_grad=True) for values in ([[1.0, 0.0]], [[0.5], [0.0]], [5.0, 1.0])
    )
    layer.pair = LoraPair(a_RI, b_OR, 2.0, magnitude_O)
    if fixed:
        layer.pair = replace(layer.pair, fixed_norm_O=layer.pair.norm(layer.weight))
    output = layer(torch.tensor([1.0, 2.0]))
    assert output.tolist() == pytest.approx([12 * 5 / 32**0.5 + 10, 4 * 1 / 2 + 20])
    merged = layer.pair.merged(layer.weight)
    assert merged.flatten().tolist() == pytest.approx([20 / 32**0.5, 20 / 32**0.5, 0.0, 1.0])
    # The magnitude has a gradient, and the length by which a row is divided has none.
    output[0].backward()
    assert magnitude_O.grad is not None and b_OR.grad is not None
    assert magnitude_O.grad.tolist() == pytest.approx([12 / 32**0.5, 0.0])
    assert b_OR.grad.flatten().tolist() == pytest.approx([5 / 32**0.5 * 2 * 1, 0.0])


def test_a_root_without_dora_is_what_it_was_before_dora() -> None:
    assert "use_dora" not in LORA.model_dump(mode="json")
    assert parse_trainable(DORA.model_dump(mode="json")) == DORA


# -- peft's maths ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [WHOLE, SPLIT])
@pytest.mark.parametrize("spec", [LORA, SOME, DORA], ids=["all-linear", "some-rslora", "dora"])
def test_the_gradient_is_pefts(tiny_folder: Path, spec: LoraSpec, max_tokens: int) -> None:
    base = backend("float64").load_base(tiny_folder)
    adapter = backend("float64").adapter(base, spec, init_seed=1)
    train(adapter, 60)  # at B = 0 the gradient of A is zero
    plain = load_model(
        tiny_folder, dtype=torch.float64, compute_dtype=torch.float64, device=torch.device("cpu")
    ).module
    plain.set_attn_implementation("sdpa")  # type: ignore[operator]
    theirs = peft_model(plain, spec, adapter)
    check_gradient_is_pefts(adapter, theirs, max_tokens=max_tokens, loss_rtol=1e-12, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("spec", [LORA, SOME, DORA], ids=["all-linear", "some-rslora", "dora"])
def test_peft_loads_the_export_and_transformers_the_merged_one(
    base: SharedBase, tiny_folder: Path, tmp_path: Path, spec: LoraSpec
) -> None:
    from peft import PeftModel

    adapter = backend().adapter(base, spec, init_seed=5)
    train(adapter, 60, updates=3)
    # The export names its base.
    files = adapter.export(tmp_path / "adapter")
    assert sorted(files) == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads(files["adapter_config.json"].read_text())
    assert config["base_model_name_or_path"] == "models/tiny/000001"
    # peft's model over the base, and the merged model, have the same logits.
    plain = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.tensor([[5, 60, 61, 7, 8, 9, 100]])
    with torch.no_grad():
        untrained = plain(ids).logits
        loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()(ids).logits
        adapter.export_merged(tmp_path / "merged")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
        assert merged.dtype == torch.float32
        together = merged(ids).logits
    assert (loaded - untrained).abs().max() > 0.1
    assert (loaded - together).abs().max() <= 1e-5
    # So has the trainer.
    token = TokenSequence(ids[0].tolist(), [0.0] + [1.0] * 6, "")
    logprobs_of_adapter = torch.tensor(adapter.logprobs([token], temperature=1.0, max_tokens=WHOLE)[0])
    expected = loaded[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
    assert (logprobs_of_adapter - expected).abs().max() <= 1e-5


# -- many adapters on one base ---------------------------------------------------------------------------------

def test_adapters_trained_in_turn_are_those_trained_alone(base: SharedBase, tiny_folder: Path, tmp_path: Path) -> None:
    off = backend().adapter_off(base)
    untouched, weights = logprobs(off), base.model.module.state_dict()
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    together = [backend().adapter(base, spec, init_seed=seed) for seed, spec in enumerate(SPECS)]
    for update in range(3):
        for index, adapter in enumerate(together):
            train(adapter, 20 * index + update)
            logprobs(together[index - 1])
    assert logprobs(off) == untouched
    assert all(torch.equal(tensor, weights[name]) for name, tensor in base.model.module.state_dict().items())
    after = [logprobs(adapter) for adapter in together]
    assert len({str(values) for values in [*after, untouched]}) == 4
    for index, (spec, adapter) in enumerate(zip(SPECS, together, strict=True)):
        alone = backend().adapter(backend().load_base(tiny_folder), spec, init_seed=index)
        train(alone, 20 * index, updates=3)
        assert logprobs(alone) == after[index]
        assert alone.weights_digest() == adapter.weights_digest()
        assert state_of(alone, tmp_path / f"alone-{index}") == state_of(adapter, tmp_path / f"together-{index}")


def test_an_error_in_an_adapters_call_leaves_the_base_without_it(base: SharedBase) -> None:
    off, adapter = backend().adapter_off(base), backend().adapter(base, LORA, init_seed=0)
    train(adapter, 60)
    before = logprobs(off)
    bad = [Sample([1, 2], [0.0, 1.0], advantages=[float("inf")], old_logprobs=[-5.0])]
    with pytest.raises(NonFiniteGradient):
        adapter.update(bad, Objective(GRPOSpec(kl_beta=0)), FAST, max_tokens=WHOLE)

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adapter.update(samples(1), CE, FAST, max_tokens=WHOLE, on_micro_batch=fail)
    assert all(layer.pair is None for layer in base.layers.values())
    assert logprobs(off) == before


def test_a_call_within_a_call_has_its_own_adapter_and_gives_the_outer_one_back(base: SharedBase) -> None:
    off = backend().adapter_off(base)
    wide, narrow = (backend().adapter(base, spec, init_seed=0) for spec in SPECS[:2])
    train(wide, 60)
    train(narrow, 80)
    alone = [logprobs(trainer) for trainer in (off, wide, narrow)]
    with wide.with_own_weights():
        assert [logprobs(trainer) for trainer in (off, narrow)] == [alone[0], alone[2]]
        assert {name: layer.pair for name, layer in base.layers.items()} == wide.pairs
    assert logprobs(off) == alone[0]


def test_the_base_itself_is_only_read(base: SharedBase, tmp_path: Path) -> None:
    off = backend().adapter_off(base)
    with pytest.raises(BadSpec, match="adapter"):
        off.update(samples(1), CE, FAST, max_tokens=WHOLE)
    with pytest.raises(BadSpec, match="checkpoint"):
        off.write_checkpoint(tmp_path)
    with pytest.raises(BadSpec, match="checkpoint"):
        off.read_checkpoint({}, optimizer=False)
    assert off.nbytes() == 0


def live_tensor_bytes() -> int:
    """Bytes of all tensors that Python can reach in this process, each storage counted once. Weights that a sampler has
    packed for oneDNN have no storage, and are left out."""
    gc.collect()
    tensors = [candidate for candidate in gc.get_objects() if isinstance(candidate, Tensor) and not candidate.is_mkldnn]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_three_adapters_cost_less_than_half_a_base(tiny_folder: Path, dtype: str) -> None:
    engine = backend(dtype)
    sampler_weights = PackedLinear([nn.Linear(8, 8)])  # as other tests of this process may leave some in memory
    empty = live_tensor_bytes()
    base = engine.load_base(tiny_folder)
    alone = live_tensor_bytes() - empty
    assert base.nbytes() <= alone <= 1.01 * base.nbytes()  # buffers are not counted
    spec = LoraSpec(rank=1) if dtype == "bfloat16" else LoraSpec(rank=2)
    adapters = [engine.adapter(base, spec, init_seed=seed) for seed in range(3)]
    for adapter in adapters:
        train(adapter, 3)
    together = live_tensor_bytes() - empty
    assert together < 1.5 * alone
    assert base.nbytes() + sum(adapter.nbytes() for adapter in adapters) < 1.5 * base.nbytes()
    held = sum(adapter.nbytes(training=False) for adapter in adapters)  # no gradient between updates
    assert together - alone == pytest.approx(held, rel=0.01)
    weights = sum(p.nbytes for _, p in adapters[0].trained_parameters())
    assert adapters[0].nbytes() == 4 * weights  # and a gradient and two moments
    adapters[0].reset_optimizer()
    assert adapters[0].nbytes(training=False) == weights
    assert sampler_weights.nbytes > 0
