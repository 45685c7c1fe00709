"""Faults planted once weights or an adapter have been synced: reloads behind the sampler's back, processes that are
others, sleeps, adapters of another state. As in test_gate, the workers run in this process.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.backends.protocol import sync
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.shared_base import AdapterTrainer
from engine.backends.torch.trainer import TorchTrainer
from engine.backends.vllm.extension import Extension
from engine.errors import SamplerOutOfSync
from engine.specs.adapters import LoraSpec
from tests.engine.vllm.gating import (
    PARAMS,
    PROMPT,
    assert_drawn_from,
    assert_recovers,
    assert_refused,
    draw,
    move,
    spec_of,
)

pytestmark = pytest.mark.vllm

# -- after the sync -----------------------------------------------------------------------------------------------


def reload_old_weights(sampler: Any, tiny_folder: Path) -> None:
    """What a stray /collective_rpc, or a sleep that dropped weights, does behind the sampler's back."""
    old = TorchBackend(spec_of()).load(tiny_folder)
    weights = [(name, tensor.detach()) for name, tensor in old.model.exported_weights()]
    sampler._shared.ensure_running()._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})


def test_weights_reloaded_before_a_call(sampler: Any, trainer: TorchTrainer, tiny_folder: Path) -> None:
    sync(sampler, trainer, "state-1")
    reload_old_weights(sampler, tiny_folder)
    with pytest.raises(SamplerOutOfSync, match="changed in .* since state-1 was loaded"):
        draw(sampler)
    assert sampler.loaded_state is None
    sync(sampler, trainer, "state-1")
    assert_drawn_from(trainer, draw(sampler))


def test_weights_reloaded_during_a_call(sampler: Any, trainer: TorchTrainer, tiny_folder: Path) -> None:
    sync(sampler, trainer, "state-1")
    heard = []

    def reload(place: int, token: int, logprob: float) -> None:
        heard.append(token)
        if len(heard) == 2:
            reload_old_weights(sampler, tiny_folder)

    with pytest.raises(SamplerOutOfSync, match="changed in .* since state-1 was loaded"):
        sampler.sample([PROMPT], [1], PARAMS, reload)
    assert len(heard) == 4
    assert sampler.loaded_state is None


def test_one_tensor_changed_in_place_during_a_call(sampler: Any, trainer: TorchTrainer) -> None:
    sync(sampler, trainer, "state-1")
    runner = sampler._shared.ensure_running()._llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def garble(place: int, token: int, logprob: float) -> None:
        runner.get_model().model.norm.weight.data[5] += 0.5

    with pytest.raises(SamplerOutOfSync, match=r"tensor model\.norm\.weight changed"):
        sampler.sample([PROMPT], [1], PARAMS, garble)


def test_another_process_in_the_place_of_the_one_that_loaded(sampler: Any, trainer: TorchTrainer) -> None:
    sync(sampler, trainer, "state-1")
    worker = sampler._shared.ensure_running()._llm.llm_engine.model_executor.driver_worker.worker
    worker._ostinato_worker_id = "another"
    with pytest.raises(SamplerOutOfSync, match="was restarted"):
        draw(sampler)


def test_a_prefix_cache_that_was_not_reset(
    sampler: Any, trainer: TorchTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(sampler)
    monkeypatch.setattr(sampler._shared.ensure_running()._llm, "reset_prefix_cache", lambda: False)
    assert_refused(sampler, trainer, "did not reset its prefix cache")
    assert_recovers(sampler, trainer, monkeypatch)


def test_a_prefix_cache_that_only_says_it_was_reset(
    sampler: Any, trainer: TorchTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries are salted with the state, so those of other weights are never found."""
    draw(sampler)
    monkeypatch.setattr(sampler._shared.ensure_running()._llm, "reset_prefix_cache", lambda: True)
    sync(sampler, trainer, "state-1")
    assert_drawn_from(trainer, draw(sampler))


# -- sleep --------------------------------------------------------------------------------------------------------


def test_weights_that_outlive_a_sleep_are_checked_and_not_sent_again(
    backend: Any, sampler: Any, trainer: TorchTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync(sampler, trainer, "state-1")
    before = draw(sampler)
    backend.offload_for_training()
    assert sampler.loaded_state is None
    monkeypatch.setattr(Extension, "ostinato_load", lambda *_: pytest.fail("they were sent again"))
    sync(sampler, trainer, "state-1")
    assert draw(sampler) == before


def test_weights_dropped_in_a_sleep_are_noticed_and_sent_again(
    backend: Any, sampler: Any, trainer: TorchTrainer, tiny_folder: Path
) -> None:
    sync(sampler, trainer, "state-1")
    backend.offload_for_training()
    reload_old_weights(sampler, tiny_folder)
    sync(sampler, trainer, "state-1")
    assert_drawn_from(trainer, draw(sampler))


def test_other_bytes_of_the_same_state_after_a_sleep_are_sent(
    backend: Any, sampler: Any, trainer: TorchTrainer
) -> None:
    """A policy that was redone under other numerics keeps its state, and may differ by less than any gap tells."""
    sync(sampler, trainer, "state-1")
    backend.offload_for_training()
    move(trainer, by=1e-6)
    sync(sampler, trainer, "state-1")
    runner = sampler._shared.ensure_running()._llm.llm_engine.model_executor.driver_worker.worker.model_runner
    live, ours = runner.get_model().model.norm.weight, dict(trainer.model.exported_weights())["model.norm.weight"]
    assert live.equal(ours)


def test_a_state_is_held_only_with_the_bytes_it_was_synced_with(
    backend: Any, sampler: Any, trainer: TorchTrainer, tiny_folder: Path
) -> None:
    sync(sampler, trainer, "state-1")
    same = backend.new_sampler(trainer)
    sync(same, trainer, "state-1")
    assert (sampler.loaded_state, same.loaded_state) == ("state-1", "state-1")
    redone = TorchBackend(spec_of()).load(tiny_folder)
    move(redone, by=1e-6)
    other = backend.new_sampler(redone)
    sync(other, redone, "state-1")
    assert (sampler.loaded_state, same.loaded_state, other.loaded_state) == (None, None, "state-1")
    same.close()
    other.close()


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
    sampler = backend.new_sampler(adapter)
    sync(sampler, adapter, "state-0")
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
    runtime = adapted._shared.ensure_running()
    request = copy.copy(runtime._adapters[adapted._adapter])
    move(adapter, seed=3)
    adapter.export(tmp_path / "other")
    request.lora_path, request.load_inplace = str(tmp_path / "other"), True
    runtime._llm.collective_rpc("add_lora", args=(request,))
    with pytest.raises(SamplerOutOfSync, match="the live adapter changed"):
        draw(adapted)
    sync(adapted, adapter, "state-1")
    assert_drawn_from(adapter, draw(adapted))


def test_a_base_reloaded_under_an_adapter(adapted: Any, adapter: AdapterTrainer, base: Any) -> None:
    weights = [(name, tensor.detach() * 1.01) for name, tensor in base.model.exported_weights()]
    adapted._shared.ensure_running()._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
    with pytest.raises(SamplerOutOfSync, match="vLLM has dropped the adapter"):
        draw(adapted)
    sync(adapted, adapter, "state-1")
    assert_drawn_from(adapter, draw(adapted))


def test_a_base_changed_in_place_under_an_adapter(adapted: Any, adapter: AdapterTrainer) -> None:
    runner = adapted._shared.ensure_running()._llm.llm_engine.model_executor.driver_worker.worker.model_runner
    runner.get_model().model.layers[1].input_layernorm.weight.data[0] += 1.0
    with pytest.raises(SamplerOutOfSync, match=r"tensor model\.layers\.1\.input_layernorm\.weight changed"):
        draw(adapted)
    sync(adapted, adapter, "state-1")
    assert_drawn_from(adapter, draw(adapted))


def test_two_policies_on_one_base_keep_their_adapters(backend: Any, adapter: AdapterTrainer, base: Any) -> None:
    """A load of the base drops every adapter: who has lost one says so."""
    other = TorchBackend.adapter(base, LoraSpec(rank=2, alpha=3.0), init_seed=9)
    move(other, seed=8)
    first, second = backend.new_sampler(adapter), backend.new_sampler(other)
    sync(first, adapter, "one")
    sync(second, other, "two")
    assert (first.loaded_state, second.loaded_state) == ("one", "two")
    assert_drawn_from(adapter, draw(first))
    assert_drawn_from(other, draw(second))
    second._shared.loaded = None  # as after a failure
    sync(second, other, "two")
    assert (first.loaded_state, second.loaded_state) == (None, "two")
    first.close()
    second.close()
