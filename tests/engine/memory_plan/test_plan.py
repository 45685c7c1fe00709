"""Memory plans, against counts made by hand, published counts and the figures of the ZeRO paper."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.backends.deepspeed.memory import state_bytes
from engine.errors import BadSpec
from engine.memory_plan.plan import plan_memory
from engine.memory_plan.records import GIB, Machine, MemoryPlan, MemoryPool, Workload
from engine.memory_plan.remedies import Scenario, remedies
from engine.memory_plan.shape import (
    CHUNK_BYTES,
    FAMILIES,
    ModelShape,
    activations,
    autocast_weights,
    head_activations,
    kv_bytes_per_token,
    layer_activations,
    preset,
    read_shape,
    shape_of,
    torch_states,
)
from engine.specs.engine import DeepSpeedSpec, LocalEngineSpec

SMALL = ModelShape(
    name="small", hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocabulary=10, context=64,
    parameters=1000, tied=False,
)  # fmt: skip


def size(name: str) -> ModelShape:
    shape = preset(name)
    assert shape is not None
    return shape


def spec(**keys: Any) -> LocalEngineSpec:
    return LocalEngineSpec.model_validate(keys)


def part(load: MemoryPool, key: str, phase: Any = "backward") -> float:
    return sum(p.bytes.get(phase, 0.0) for p in load.parts if p.key == key)


# -- shapes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "published"),
    [("135M", 134_515_008), ("0.5B", 494_032_768), ("1.5B", 1_543_714_304), ("8B", 8_030_261_248),
     ("70B", 70_553_706_496)],
)  # fmt: skip
def test_presets_have_the_published_number_of_parameters(name: str, published: int) -> None:
    assert size(name).parameters == published


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("biased", [False, True])
def test_every_family_is_counted_as_transformers_builds_it(family: str, biased: bool) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    keys: dict[str, Any] = {
        "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    # Not every family has these keys.
    if family != "gpt_neox":
        keys["num_key_value_heads"] = 2
    if family not in ("gpt_neox", "phi3"):
        keys["head_dim"] = 20
    if biased:
        keys |= {"attention_bias": True, "mlp_bias": True}
    # Compare with the model that transformers builds without allocating it.
    config = AutoConfig.for_model(family, **keys)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    shape = shape_of(keys | {"model_type": family}, family)
    assert shape.parameters == sum(p.numel() for p in built.parameters())
    if type(config) not in AutoModelForSequenceClassification._model_mapping:
        return
    # The same with a scalar head, by the plan and read from a config.
    config.num_labels = 1
    with torch.device("meta"):
        scored = AutoModelForSequenceClassification.from_config(config)
    expected = sum(p.numel() for name, p in scored.named_parameters() if name != "score.bias")
    assert shape.with_scalar_head().parameters == expected
    names = {"model_type": family, "architectures": [type(scored).__name__]}
    read = shape_of(keys | names, family)
    assert (read.scalar, read.parameters, read.with_scalar_head()) == (True, expected, read)


def test_a_folder_is_counted_from_its_files_and_from_its_config_alike(tiny_folder: Path, tmp_path: Path) -> None:
    counted = read_shape(tiny_folder)
    (tmp_path / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())
    assert read_shape(tmp_path).parameters == counted.parameters


@pytest.mark.parametrize(
    ("config", "message"),
    [({"model_type": "llama", "num_local_experts": 8}, "mixture of experts"),
     ({"model_type": "novel"}, "unknown model_type 'novel'"),
     ({"model_type": "llama", "num_attention_heads": 4}, "hidden_size=None")],
)  # fmt: skip
def test_a_shape_that_cannot_be_known_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSpec, match=message):
        shape_of(config, "m")


# -- formulas --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "gigabytes"), [(1, 31.4), (2, 16.6), (3, 1.9)])
def test_figure_1_of_the_zero_paper(stage: int, gigabytes: float) -> None:
    # 7.5B parameters, 64 devices, K = 12; gradients of 2 bytes in the paper, ours add up in float32
    size, ranks = 7_500_000_000, 64
    spec = DeepSpeedSpec(zero_stage=stage)  # type: ignore[arg-type]
    held = state_bytes(spec, parameters=size, buffer_bytes=0, ranks=ranks, compute_bytes=2, master_bytes=4).device
    gradients = 2 * size / (ranks if stage >= 2 else 1)
    assert round(((held.weights + held.masters + held.moments) / ranks + gradients) / 1e9, 1) == gigabytes


def test_the_torch_trainer_holds_16_bytes_a_parameter() -> None:
    states = torch_states(10)
    assert (states.weights, states.gradients, states.optimizer) == (40, 40, 80)


def test_activations_of_a_layer_by_hand() -> None:
    # Q = 8, K = 4, I = 16, H = 8. float32: 4 * (6*8 + 4*8 + 2*4 + 4*16) = 608
    assert layer_activations(SMALL, compute=4, autocast=False) == 608
    # bfloat16: 16*8 + 2 * (32 + 8 + 64) = 336; under autocast 26*8 + 208 = 416
    assert layer_activations(SMALL, compute=2, autocast=False) == 336
    assert layer_activations(SMALL, compute=2, autocast=True) == 416


@pytest.mark.parametrize(("dtype", "compute"), [("float32", 4), ("bfloat16", 2)])
def test_a_forward_saves_what_the_formula_says(tiny_folder: Path, dtype: str, compute: int) -> None:
    """The tensors that autograd keeps, without the parameters."""
    import torch

    from engine.backends.torch.loading import load_model
    from engine.backends.torch.packing import pack
    from engine.models.samples import Sample

    model = load_model(
        tiny_folder, dtype=torch.float32, compute_dtype=getattr(torch, dtype), device=torch.device("cpu")
    )
    weights = {p.data_ptr() for p in model.module.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept.setdefault(storage.data_ptr(), tensor)
        return tensor

    tokens = 1024
    samples = [Sample([5] * 128, [0.0] + [1.0] * 127) for _ in range(tokens // 128)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.logprobs(pack(samples, device=torch.device("cpu")))
    saved = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    shape = read_shape(tiny_folder)
    layers, _ = activations(shape, tokens, compute=compute, autocast=compute == 2, recompute="none")
    logits = 4 * tokens * shape.vocabulary
    # further per token: rotations, the last norm, logsumexp of attention
    assert saved == pytest.approx(layers + logits + autocast_weights(shape, compute), rel=0.05)


def test_recomputing_keeps_inputs_and_one_layer() -> None:
    layer = 10 * 336
    whole = activations(SMALL, 10, compute=2, autocast=False, recompute="none")
    assert whole == (2 * layer, 0)
    inputs = 2 * 10 * 8 * 2  # two layers, ten tokens, H = 8, bfloat16
    assert activations(SMALL, 10, compute=2, autocast=False, recompute="recompute") == (layer + inputs, 0)
    assert activations(SMALL, 10, compute=2, autocast=False, recompute="offload") == (layer, inputs)


def test_logits_are_bounded_by_the_chunk() -> None:
    causal_lm = pytest.importorskip("engine.backends.torch.causal_lm")
    assert causal_lm.CHUNK_BYTES == CHUNK_BYTES
    # an untrained head, 100 tokens of 10 logits: a logit and its gradient, 4 bytes each
    assert head_activations(SMALL, 100, compute=4, trained=False) == 8_000
    many = CHUNK_BYTES  # forty times as many logits as a chunk has
    assert head_activations(SMALL, many, compute=4, trained=False) == 8 * (CHUNK_BYTES // 40) * 10


def test_a_scalar_head_has_no_logits_and_no_sampler() -> None:
    # Llama-3.1-8B without its head of 128256 x 4096, with one of 4096
    shape = size("8B").with_scalar_head()
    assert shape.parameters == 8_030_261_248 - 128256 * 4096 + 4096
    for keys in ({"device": "cuda"}, {"device": "cuda", "sampler": {"kind": "vllm"}}):
        work = Workload(shape, context=4096, frozen=0)
        (load, *_) = plan_memory(spec(**keys, compute_dtype="float32"), work, Machine.gpus("h200-141", 1)).pools
        assert part(load, "weights") == 4 * shape.parameters
        assert part(load, "logits") == 4 * spec().max_tokens_per_forward * 4096  # the head's input, float32
        assert sum(part(load, key, "sampling") for key in ("sampler", "kv", "vllm")) == 0
    with_both_heads = size("8B").with_scalar_head(keep_language_head=True)
    assert with_both_heads.parameters == 8_030_261_248 + 4096  # the base model is shared
    assert autocast_weights(shape, 2) == 2 * 32 * shape.layer_linear


def test_keys_and_values_of_a_token() -> None:
    # Llama-3.1-8B in bfloat16: 2 * 32 layers * 8 heads * 128 * 2 bytes = 128 KiB
    assert kv_bytes_per_token(size("8B"), 2) == 128 << 10


# -- plans -----------------------------------------------------------------------------------------------------


def planned(keys: dict[str, Any], machine: Machine, model: str = "8B", **work: Any) -> MemoryPlan:
    return plan_memory(spec(**keys), Workload(size(model), **{"context": 4096, "frozen": 0} | work), machine)


EIGHT = Machine.gpus("h100-80", 8, node_gib=1024)
SPLIT: dict[str, Any] = {
    "device": "cuda", "trainer": {"kind": "deepspeed", "ranks": 4, "zero_stage": 3},
    "sampler": {"kind": "vllm", "replicas": 2, "tensor_parallel": 2},
}  # fmt: skip


def test_four_gpus_train_and_four_sample() -> None:
    plan = planned(SPLIT, EIGHT)
    trains, samples, node = plan.pools
    assert trains.name == "GPU 0-3 (h100-80): trains"
    assert samples.name == "GPU 4-7 (h100-80): samples"
    assert part(trains, "weights") == 2 * 8_030_261_248 / 4
    assert part(trains, "moments") == 12 * 8_030_261_248 / 4
    assert part(samples, "vllm", "sampling") > 8_030_261_248  # 2P over two GPUs
    assert part(trains, "kv", "sampling") == part(samples, "moments") == 0
    assert part(node, "loading", "start") == 2 * 8_030_261_248  # the shards of four ranks, once
    assert part(trains, "loading", "start") == 2 * 128256 * 4096  # the embedding, whole
    assert trains.bytes_in("start") < trains.bytes_in("step")


def test_a_vllm_that_shares_the_gpu_sleeps_unless_told_not_to() -> None:
    machine = Machine.gpus("h100-80", 1)
    keys: dict[str, Any] = {"device": "cuda", "sampler": {"kind": "vllm", "gpu_share": 0.4}}
    asleep = planned(keys, machine, "1.5B").pools[0]
    assert asleep.name == "GPU 0 (h100-80): trains and samples"
    assert part(asleep, "kv", "sampling") > 20 * GIB
    assert part(asleep, "kv", "backward") == 0
    keys["sampler"]["sleep"] = False
    awake = planned(keys, machine, "1.5B").pools[0]
    assert part(awake, "kv", "backward") == part(asleep, "kv", "sampling")


def test_the_sequences_are_what_the_share_leaves() -> None:
    # two servers of two GPUs, each with 40 GiB of cache: 2 * 2 * 40 GiB / (4096 tokens * 128 KiB) = 320
    keys = SPLIT | {"sampler": SPLIT["sampler"] | {"kv_cache_gib": 40.0}}
    assert planned(keys, EIGHT).sequences == 320


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_plan_and_the_deepspeed_backend_count_alike(stage: int, offload: str) -> None:
    changes = {"zero_stage": stage, "offload_optimizer": offload}
    load, _, node = planned(SPLIT | {"trainer": SPLIT["trainer"] | changes, "compute_dtype": "bfloat16"}, EIGHT).pools
    trainer = DeepSpeedSpec(ranks=4, **changes)
    places = state_bytes(
        trainer, parameters=8_030_261_248, buffer_bytes=0, ranks=4, compute_bytes=2, master_bytes=4
    )
    for held, at, ranks in ((places.device, load, 4), (places.host, node, 1)):
        assert ranks * part(at, "weights") == held.weights
        assert ranks * part(at, "moments") == held.masters + held.moments
        assert ranks * part(at, "gradients") == held.gradients
        assert ranks * part(at, "gradients", "sampling") == held.gradients_at_load


def test_offloaded_moments_lie_in_the_machine() -> None:
    keys = SPLIT | {"trainer": SPLIT["trainer"] | {"offload_optimizer": "cpu"}}
    trains, _, node = planned(keys, EIGHT).pools
    assert part(trains, "moments") == 0
    assert part(node, "moments") == 12 * 8_030_261_248  # 12P/N on each of N ranks
    assert part(node, "gradients") == 8 * 8_030_261_248  # of the micro-batches, and of the masters


def test_weights_of_a_broadcast_are_held_by_the_ranks_and_others_lie_in_the_machine() -> None:
    by_files = planned(SPLIT, EIGHT).pools
    assert part(by_files[0], "staged") == 0
    assert part(by_files[2], "staged") == 2 * 8_030_261_248
    by_broadcast = planned(SPLIT | {"sampler": SPLIT["sampler"] | {"transport": "nccl"}}, EIGHT).pools
    assert part(by_broadcast[0], "staged") == 2 * 8_030_261_248 / 4
    assert part(by_broadcast[2], "staged") == 0


def test_every_policy_that_waits_for_the_samplers_is_counted() -> None:
    weights = 2 * 8_030_261_248
    assert part(planned(SPLIT, EIGHT, staged=3).pools[2], "staged") == 3 * weights
    by_broadcast = planned(SPLIT | {"sampler": SPLIT["sampler"] | {"transport": "nccl"}}, EIGHT, staged=3).pools
    assert part(by_broadcast[0], "staged") == 3 * weights / 4
    sampler = {"kind": "torch", "own_lane": True}
    torch_keys = {"device": "cpu", "compute_dtype": "float32", "sampler": sampler}
    (own_lane,) = planned(torch_keys, Machine.cpu(64 * GIB), "135M", staged=2).pools
    assert part(own_lane, "staged") == 2 * 4 * 134_515_008


def test_on_the_cpu_everything_shares_one_memory() -> None:
    sampler = {"kind": "vllm", "replicas": 2, "kv_cache_gib": 1.0}
    keys = {"device": "cpu", "compute_dtype": "bfloat16", "sampler": sampler}
    (load,) = planned(keys, Machine.cpu(64 * GIB), "135M").pools
    assert part(load, "weights") == 4 * 134_515_008
    assert part(load, "kv") == 2 * GIB
    assert part(load, "vllm") == 2 * 2 * 134_515_008
    assert part(load, "staged", "sampling") == 2 * 134_515_008  # one set of files for both


def test_an_adapter_takes_its_base_and_a_little() -> None:
    keys: dict[str, Any] = {"device": "cuda", "compute_dtype": "bfloat16"}
    shape, machine = size("8B"), Machine.gpus("h100-80", 1)
    whole = planned(keys, machine).pools[0]
    adapter = planned(keys, machine, lora_rank=16).pools[0]
    # rank * (in + out) of q, k, v, o, gate, up, down, 32 layers
    per_layer = 16 * (8192 + 5120 + 5120 + 8192 + 3 * 18432)
    assert part(adapter, "moments") == 8 * 32 * per_layer
    assert part(adapter, "base") == 2 * (shape.parameters - shape.embedding - 65 * 4096) + 4 * (
        shape.embedding + 65 * 4096
    )
    assert part(adapter, "gradients") < part(whole, "gradients") / 100


def test_a_base_in_4_bits_takes_4_5_bits_per_weight_of_its_layers() -> None:
    keys: dict[str, Any] = {"device": "cuda", "compute_dtype": "bfloat16"}
    shape, machine = size("8B"), Machine.gpus("h100-80", 1)
    plain, small = (planned(keys, machine, lora_rank=16, load_in_4bit=held).pools[0] for held in (False, True))
    # q and o, k and v, gate, up and down of 32 layers
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert part(plain, "base") - part(small, "base") == matrices * (2 - 4.5 / 8)
    # one of the largest matrices in bfloat16
    assert part(small, "casts") - part(plain, "casts") == 2 * 4096 * 14336
    # on a CPU, the weights are read in float32 first
    (on_cpu,) = planned({"device": "cpu", "compute_dtype": "bfloat16"}, Machine.cpu(64 * GIB), lora_rank=16,
                        load_in_4bit=True).pools  # fmt: skip
    assert part(on_cpu, "loading", "start") + part(on_cpu, "base", "start") == 4 * shape.parameters
    with pytest.raises(BadSpec, match="load_in_4bit=true was given.*'deepspeed'"):
        planned(keys | {"trainer": {"kind": "deepspeed"}}, machine, lora_rank=16, load_in_4bit=True)


@pytest.mark.parametrize(
    ("keys", "message"),
    [({"trainer": {"kind": "deepspeed", "ranks": 9}}, "9 ranks do not fit, as this machine has 8 GPUs"),
     ({"sampler": {"kind": "vllm", "replicas": 3, "tensor_parallel": 4}}, "1 rank and 3 x 4 GPUs that sample do not"),
     ({"sampler": {"kind": "vllm", "tensor_parallel": 9}}, "1 x 9 GPUs that sample do not fit")],
)  # fmt: skip
def test_devices_that_there_are_not(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSpec, match=message):
        planned({"device": "cuda"} | keys, EIGHT)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_on_ranks_the_base_is_frozen_and_the_adapters_states_are_split(stage: int) -> None:
    shape, ranks = size("8B"), 8
    adapter = 32 * 16 * (8192 + 5120 + 5120 + 8192 + 3 * 18432)  # rank * (in + out) of seven layers in 32 blocks
    keys = {"device": "cuda", "compute_dtype": "bfloat16", "trainer": {"kind": "deepspeed", "zero_stage": stage}}
    pool = planned(keys, EIGHT, lora_rank=16).pools[0]
    mixed = 2 * shape.parameters + 2 * (shape.embedding + 65 * 4096)  # embedding and norms in float32
    assert part(pool, "base") == (2 * shape.parameters / ranks if stage == 3 else mixed)
    assert part(pool, "weights") == 4 * adapter  # whole on every rank
    assert part(pool, "moments") == 12 * adapter / ranks  # float32 masters and two moments
    assert part(pool, "gradients") == (4 * adapter if stage == 1 else 4 * adapter / ranks)


def test_a_budget_a_cache_and_a_forward_that_are_too_small_are_problems() -> None:
    keys: dict[str, Any] = {"device": "cpu", "compute_dtype": "float32", "memory_gib": 1.0}
    budget = planned(keys, Machine.cpu(64 * GIB), "135M", context=512)
    assert "memory_gib=1.0 admits 1.0 GiB" in budget.reasons()[0]  # 16 bytes of 135M are 2.0 GiB
    short = planned({"device": "cpu", "max_tokens_per_forward": 1024}, Machine.cpu(64 * GIB), "135M")
    assert "max_tokens_per_forward=1024" in short.reasons()[0]
    cache = {"device": "cuda", "sampler": {"kind": "vllm", "kv_cache_gib": 0.1}}
    assert any("holds no context" in reason for reason in planned(cache, EIGHT).reasons())


# -- remedies --------------------------------------------------------------------------------------------------


def test_remedies_are_changes_that_fit_by_their_own_plan() -> None:
    # 32768 tokens without recomputation are 200 GiB of activations, whatever ZeRO does
    keys = SPLIT | {"max_tokens_per_forward": 32768}
    work = Workload(size("8B"), context=4096, frozen=0)
    setting = Scenario(spec(**keys), work, EIGHT)
    assert not setting.fits()
    ways = remedies(setting)
    assert 'trainer.activation_checkpointing="recompute"' in ways
    assert setting.with_changes({"trainer": {"activation_checkpointing": "recompute"}}).fits()
    assert any(way.startswith("max_tokens_per_forward=") for way in ways)
    assert 'trainer.offload_optimizer="cpu"' not in ways
    tokens = next(int(way.split("=")[1]) for way in ways if way.startswith("max_tokens_per_forward="))
    assert setting.with_changes({"max_tokens_per_forward": tokens}).fits()
    assert not setting.with_changes({"max_tokens_per_forward": 2 * tokens}).fits()


def test_where_nothing_fits_nothing_is_named() -> None:
    keys = {"device": "cuda", "memory_gib": 500.0}
    assert remedies(Scenario(spec(**keys), Workload(size("70B"), context=4096), Machine.gpus("l40s-48", 1))) == []


def test_plans_need_no_torch() -> None:
    modules = "engine.memory_plan.plan, engine.memory_plan.remedies, flows.cli.plan"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
