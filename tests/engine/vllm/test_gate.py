"""Faults planted between the trainer and vLLM's live layers. Each must end in SamplerOutOfSync before a completion is
returned, or leave no trace in what is sampled. The workers run in this process, so a test plants a fault by patching
the extension that they are made of, or vLLM itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.adapters import LoraSpec
from engine.backends.shared_base import AdapterTrainer
from engine.backends.tensor_files import read_tensors, write_tensors
from engine.backends.torch_backend import TorchBackend
from engine.backends.torch_trainer import TorchTrainer
from engine.backends.vllm.extension import Extension
from engine.errors import SamplerOutOfSync
from engine.protocol import SamplingParams, TokenSequence
from engine.sampler_spec import VllmSpec
from engine.spec import LocalEngineSpec

pytestmark = pytest.mark.vllm

PROMPT = [3 + n % 250 for n in range(300)]
"""Several blocks of the prefix cache."""
PARAMS = SamplingParams(max_new_tokens=4, min_new_tokens=4)
LAYER = "model.layers.1."

Tensors = Iterator[tuple[str, Tensor]]


def spec_of(**changes: Any) -> LocalEngineSpec:
    sampler = VllmSpec(max_context=512, kv_cache_gib=0.25, max_lora_rank=8, sleep=True, **changes)
    return LocalEngineSpec(device="cpu", compute_dtype="float32", threads=1, sampler=sampler)


@pytest.fixture(scope="module")
def backend() -> Iterator[Any]:
    pytest.importorskip("vllm")
    from engine.backends.vllm.backend import VllmSamplers

    backend = VllmSamplers(spec_of(), compute_dtype=torch.float32, device=torch.device("cpu"))
    yield backend
    backend.close()


@pytest.fixture
def trainer(tiny_folder: Path) -> TorchTrainer:
    return TorchBackend(spec_of()).load(tiny_folder)


@pytest.fixture
def sampler(backend: Any, trainer: TorchTrainer) -> Iterator[Any]:
    """Holds state-0; the trainer has gone on to other weights."""
    sampler = backend.sampler(trainer)
    sampler.sync(trainer, "state-0")
    move(trainer)
    yield sampler
    sampler.close()


def move(trainer: Any, *, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in trainer.trained():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


def draw(sampler: Any) -> Any:
    return sampler.sample([PROMPT], [1], PARAMS)[0]


def assert_drawn_from(trainer: Any, drawn: Any) -> None:
    """Up to rounding, at temperature 1 and without the ids that may not end a completion yet."""
    ids = PROMPT + drawn.token_ids
    sequence = TokenSequence(ids, [0.0] * len(PROMPT) + [1.0] * len(drawn.token_ids))
    ours = trainer.logprobs([sequence], temperature=1.0, max_tokens=1024)[0]
    assert drawn.logprobs == pytest.approx(ours, abs=0.05)  # the end held back: -ln(1 - p), p about 1/259
    assert drawn.logprobs != pytest.approx(ours, abs=1e-9)


def plant(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensors], Tensors]) -> None:
    """Changes the tensors on their last step, from the receipt to vLLM's loader."""
    honest = Extension.ostinato_apply
    monkeypatch.setattr(Extension, "ostinato_apply", lambda self, tensors: honest(self, change(tensors)))


def assert_refused(sampler: Any, trainer: Any, match: str) -> None:
    with pytest.raises(SamplerOutOfSync, match=match):
        sampler.sync(trainer, "state-1")
    assert sampler.holds is None
    with pytest.raises(SamplerOutOfSync, match="sync it with the trainer first"):
        draw(sampler)


def assert_recovers(sampler: Any, trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    sampler.sync(trainer, "state-1")
    assert_drawn_from(trainer, draw(sampler))


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
    sampler = backend.sampler(trainer)
    sampler.sync(trainer, "state-0")
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


def test_a_tied_head_that_keeps_the_old_embedding(
    sampler: Any, trainer: TorchTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM 0.32 leaves behind on the CPU when nobody ties the head again."""
    monkeypatch.setattr(Extension, "ostinato_retie", staticmethod(lambda model: None))
    assert_refused(sampler, trainer, "tensor model.embed_tokens.weight is not what .* lm_head")
    assert_recovers(sampler, trainer, monkeypatch)


def test_a_tensor_that_the_trainer_forgot(
    sampler: Any, trainer: TorchTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing from weights and manifest alike, so that no digest tells."""
    everything = trainer.model.exported_weights
    for name in (NAMES[0], NAMES[2], NAMES[6]):
        kept = [(n, t) for n, t in everything() if n != name]
        monkeypatch.setattr(trainer.model, "exported_weights", lambda kept=kept: iter(kept))
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
    staged.sync(trainer, "state-1")
    assert_drawn_from(trainer, draw(staged))
    assert seen and not any(path.parent.exists() for path in seen)


# -- after the sync -----------------------------------------------------------------------------------------------


def reload_old_weights(sampler: Any, tiny_folder: Path) -> None:
    """What a stray /collective_rpc, or a sleep that dropped weights, does behind the sampler's back."""
    old = TorchBackend(spec_of()).load(tiny_folder)
    weights = [(name, tensor.detach()) for name, tensor in old.model.exported_weights()]
    sampler._host.runtime._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})


def test_weights_reloaded_before_a_call(sampler: Any, trainer: TorchTrainer, tiny_folder: Path) -> None:
    sampler.sync(trainer, "state-1")
    reload_old_weights(sampler, tiny_folder)
    with pytest.raises(SamplerOutOfSync, match="changed in .* since state-1 was loaded"):
        draw(sampler)
    assert sampler.holds is None
    sampler.sync(trainer, "state-1")
    assert_drawn_from(trainer, draw(sampler))


def test_weights_reloaded_during_a_call(sampler: Any, trainer: TorchTrainer, tiny_folder: Path) -> None:
    sampler.sync(trainer, "state-1")
    heard = []

    def reload(place: int, token: int, logprob: float) -> None:
        heard.append(token)
        if len(heard) == 2:
            reload_old_weights(sampler, tiny_folder)

    with pytest.raises(SamplerOutOfSync, match="changed in .* since state-1 was loaded"):
        sampler.sample([PROMPT], [1], PARAMS, reload)
    assert len(heard) == 4
    assert sampler.holds is None


def test_one_tensor_changed_in_place_during_a_call(sampler: Any, trainer: TorchTrainer) -> None:
    sampler.sync(trainer, "state-1")
    runner = sampler._host.runtime._llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def garble(place: int, token: int, logprob: float) -> None:
        runner.get_model().model.norm.weight.data[5] += 0.5

    with pytest.raises(SamplerOutOfSync, match=r"tensor model\.norm\.weight changed"):
        sampler.sample([PROMPT], [1], PARAMS, garble)


def test_another_process_in_the_place_of_the_one_that_loaded(sampler: Any, trainer: TorchTrainer) -> None:
    sampler.sync(trainer, "state-1")
    worker = sampler._host.runtime._llm.llm_engine.model_executor.driver_worker.worker
    worker._ostinato_boot = "another"
    with pytest.raises(SamplerOutOfSync, match="was restarted"):
        draw(sampler)


def test_a_prefix_cache_that_was_not_reset(
    sampler: Any, trainer: TorchTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(sampler)
    monkeypatch.setattr(sampler._host.runtime._llm, "reset_prefix_cache", lambda: False)
    assert_refused(sampler, trainer, "did not reset its prefix cache")
    assert_recovers(sampler, trainer, monkeypatch)


def test_a_prefix_cache_that_only_says_it_was_reset(
    sampler: Any, trainer: TorchTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries are salted with the state, so those of other weights are never found."""
    draw(sampler)
    monkeypatch.setattr(sampler._host.runtime._llm, "reset_prefix_cache", lambda: True)
    sampler.sync(trainer, "state-1")
    assert_drawn_from(trainer, draw(sampler))


# -- what no checksum sees ----------------------------------------------------------------------------------------


def test_the_same_weights_that_compute_something_else(
    sampler: Any, trainer: TorchTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = sampler._host.runtime._llm.llm_engine.model_executor.driver_worker.worker.model_runner
    norm = runner.get_model().model.layers[0].input_layernorm
    monkeypatch.setattr(norm, "variance_epsilon", 1.0)
    assert_refused(sampler, trainer, "logprobs differ from the trainer's by")
    assert_recovers(sampler, trainer, monkeypatch)


# -- sleep --------------------------------------------------------------------------------------------------------


def test_weights_that_outlive_a_sleep_are_checked_and_not_sent_again(
    backend: Any, sampler: Any, trainer: TorchTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler.sync(trainer, "state-1")
    before = draw(sampler)
    backend.make_way()
    assert sampler.holds is None
    monkeypatch.setattr(Extension, "ostinato_load", lambda *_: pytest.fail("they were sent again"))
    sampler.sync(trainer, "state-1")
    assert draw(sampler) == before


def test_weights_dropped_in_a_sleep_are_noticed_and_sent_again(
    backend: Any, sampler: Any, trainer: TorchTrainer, tiny_folder: Path
) -> None:
    sampler.sync(trainer, "state-1")
    backend.make_way()
    reload_old_weights(sampler, tiny_folder)
    sampler.sync(trainer, "state-1")
    assert_drawn_from(trainer, draw(sampler))


# -- adapters -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tiny_folder: Path) -> Any:
    return TorchBackend(spec_of()).load_base(tiny_folder, key="base")


@pytest.fixture
def adapter(base: Any) -> AdapterTrainer:
    adapter = TorchBackend.adapter(base, LoraSpec(rank=4, alpha=6.0), init_seed=1)
    move(adapter)
    return adapter


@pytest.fixture
def adapted(backend: Any, adapter: AdapterTrainer) -> Iterator[Any]:
    sampler = backend.sampler(adapter)
    sampler.sync(adapter, "state-0")
    yield sampler
    sampler.close()


def test_the_adapter_of_another_state(
    adapted: Any, adapter: AdapterTrainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    adapter.export(tmp_path / "old")
    move(adapter, seed=2)
    honest = Extension.ostinato_add_adapter
    monkeypatch.setattr(
        Extension,
        "ostinato_add_adapter",
        lambda self, folder, name, number: honest(self, str(tmp_path / "old"), name, number),
    )
    assert_refused(adapted, adapter, "is not what .* holds in the slot of this adapter")
    assert_recovers(adapted, adapter, monkeypatch)


def test_an_adapter_replaced_after_the_sync(adapted: Any, adapter: AdapterTrainer, tmp_path: Path) -> None:
    runtime = adapted._host.runtime
    request = copy.copy(runtime._adapters[adapted._adapter])
    move(adapter, seed=3)
    adapter.export(tmp_path / "other")
    request.lora_path, request.load_inplace = str(tmp_path / "other"), True
    runtime._llm.collective_rpc("add_lora", args=(request,))
    with pytest.raises(SamplerOutOfSync, match="the live adapter changed"):
        draw(adapted)
    adapted.sync(adapter, "state-1")
    assert_drawn_from(adapter, draw(adapted))


def test_a_base_reloaded_under_an_adapter(adapted: Any, adapter: AdapterTrainer, base: Any) -> None:
    weights = [(name, tensor.detach() * 1.01) for name, tensor in base.model.exported_weights()]
    adapted._host.runtime._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
    with pytest.raises(SamplerOutOfSync, match="vLLM has dropped the adapter"):
        draw(adapted)
    adapted.sync(adapter, "state-1")
    assert_drawn_from(adapter, draw(adapted))


def test_a_base_changed_in_place_under_an_adapter(adapted: Any, adapter: AdapterTrainer) -> None:
    runner = adapted._host.runtime._llm.llm_engine.model_executor.driver_worker.worker.model_runner
    runner.get_model().model.layers[1].input_layernorm.weight.data[0] += 1.0
    with pytest.raises(SamplerOutOfSync, match=r"tensor model\.layers\.1\.input_layernorm\.weight changed"):
        draw(adapted)
    adapted.sync(adapter, "state-1")
    assert_drawn_from(adapter, draw(adapted))


def test_two_policies_on_one_base_keep_their_adapters(backend: Any, adapter: AdapterTrainer, base: Any) -> None:
    """A load of the base drops every adapter: who has lost one says so."""
    other = TorchBackend.adapter(base, LoraSpec(rank=2, alpha=3.0), init_seed=9)
    move(other, seed=8)
    one, two = backend.sampler(adapter), backend.sampler(other)
    one.sync(adapter, "one")
    two.sync(other, "two")
    assert (one.holds, two.holds) == ("one", "two")
    assert_drawn_from(adapter, draw(one))
    assert_drawn_from(other, draw(two))
    two._host.loaded = None  # as after a failure
    two.sync(other, "two")
    assert (one.holds, two.holds) == (None, "two")
    one.close()
    two.close()
