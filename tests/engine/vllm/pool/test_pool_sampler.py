"""The sampler over a pool of two real vLLM replicas: LoRA adapters by hot load, the gate, sleep and wake."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.protocol import sync
from engine.backends.replicas.pool import ReplicaPool
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.shared_base import AdapterTrainer
from engine.cluster.connection import Cluster
from engine.protocol import SamplingParams, TokenSequence
from engine.specs.adapters import LoraSpec
from engine.text.tokenizers import load_tokenizer
from tests.contracts.completion_ends import check_stop_strings
from tests.engine.vllm.gating import PARAMS, move, spec_of
from tests.engine.vllm.pools import call, count_requests, process_of, until

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = [[10 + n, 20, 30 + n] for n in range(8)]
SEEDS = list(range(len(PROMPTS)))
SPEC = spec_of(replicas=2, sleep=True, kv_cache_gib=0.125, answer_seconds=60)


@pytest.fixture(scope="module")
def backend(cluster: Cluster) -> Iterator[Any]:
    from engine.backends.vllm.backend import VllmSamplers

    backend = VllmSamplers(SPEC, compute_dtype=torch.float32, device=torch.device("cpu"))
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def base(tiny_folder: Path) -> Any:
    return TorchBackend(SPEC).load_base(tiny_folder, key="base")


@pytest.fixture
def adapter(base: Any) -> AdapterTrainer:
    adapter = TorchBackend.adapter(base, LoraSpec(rank=4, alpha=6.0), init_seed=1)
    move(adapter)
    return adapter


@pytest.fixture
def sampler(backend: Any, adapter: AdapterTrainer, tiny_folder: Path) -> Iterator[Any]:
    """Both replicas up, and synced."""
    sampler = backend.new_sampler(adapter, tokenizer=load_tokenizer(tiny_folder))
    until(lambda: all(replica.phase == "up" for replica in pool_of(sampler).replicas))
    sampler._shared.loaded = None  # who came back without weights gets them too
    sync(sampler, adapter, "state-0")
    yield sampler
    sampler.close()


def pool_of(sampler: Any) -> ReplicaPool:
    pool = sampler._shared.ensure_running()
    assert isinstance(pool, ReplicaPool)
    return pool


def draw(sampler: Any) -> list[Any]:
    return sampler.sample(PROMPTS, SEEDS, PARAMS)


def assert_drawn_from(trainer: Any, drawn: list[Any]) -> None:
    """Up to rounding, at temperature 1 and without the ids that may not end a completion yet."""
    sequences = [
        TokenSequence(prompt + one.token_ids, [0.0] * len(prompt) + [1.0] * len(one.token_ids))
        for prompt, one in zip(PROMPTS, drawn, strict=True)
    ]
    for one, ours in zip(drawn, trainer.logprobs(sequences, temperature=1.0, max_tokens=1024), strict=True):
        assert one.logprobs == pytest.approx(ours, abs=0.05)


def test_an_adapter_goes_to_every_replica_and_follows_the_trainer(
    sampler: Any, adapter: AdapterTrainer, base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_counts = count_requests(monkeypatch)
    first = draw(sampler)
    assert_drawn_from(adapter, first)
    assert sorted(request_counts) == ["replica-0", "replica-1"]
    assert sampler.load_proof.tensors == len(list(base.model.exported_weights())) and sampler.gap is not None
    move(adapter, seed=5, by=0.2)
    loads = sampler._shared.loads
    sync(sampler, adapter, "state-1")
    assert sampler._shared.loads == loads  # the base stayed
    second = draw(sampler)
    assert_drawn_from(adapter, second)
    assert [one.logprobs for one in first] != [one.logprobs for one in second]


def test_a_constrained_completion_fits_its_schema(sampler: Any, tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    schema = {"type": "object", "properties": {"n": {"enum": [1, 22, 333]}}, "required": ["n"]}
    text = json.dumps({**schema, "additionalProperties": False})
    for completion in sampler.sample(PROMPTS, SEEDS, SamplingParams(max_new_tokens=32, json_schema=text)):
        assert json.loads(tokenizer.decode(completion.token_ids))["n"] in (1, 22, 333)
        assert completion.stop_reason == "eos"


def test_a_stop_string_ends_at_the_token_that_completes_it(
    backend: Any, adapter: AdapterTrainer, tiny_folder: Path
) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    sampler = backend.new_sampler(adapter, tokenizer=tokenizer)
    sync(sampler, adapter, "state-0")
    check_stop_strings(sampler, tokenizer)
    sampler.close()


def test_an_adapter_that_was_removed_is_in_no_replica(sampler: Any, adapter: AdapterTrainer) -> None:
    pool, name = pool_of(sampler), sampler._adapter
    sync(sampler, adapter, "state-1")
    for replica in pool.replicas:
        answers = call(pool, replica, "rpc", "ostinato_check_adapter", name)
        assert answers[0]["error"] == f"it holds no adapter {name}"
        assert replica.adapters == {sampler._adapter}


def test_two_adapters_on_one_base_are_drawn_from_apart(
    backend: Any, sampler: Any, adapter: AdapterTrainer, base: Any
) -> None:
    other = TorchBackend.adapter(base, LoraSpec(rank=2, alpha=3.0), init_seed=9)
    move(other, seed=8, by=0.2)
    second = backend.new_sampler(other)
    sync(second, other, "other")
    assert (sampler.loaded_state, second.loaded_state) == ("state-0", "other")
    assert_drawn_from(adapter, draw(sampler))
    assert_drawn_from(other, draw(second))
    second.close()


def test_a_replica_that_ends_gets_base_and_adapter_at_the_next_sync(
    sampler: Any, adapter: AdapterTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pool_of(sampler)
    replica = pool.replicas[0]
    before = replica.starts
    process_of(replica).kill()
    until(lambda: replica.starts > before and replica.phase == "up")
    assert replica.loaded_state == sampler._base and not replica.adapters  # the base was kept; no adapter can be
    request_counts = count_requests(monkeypatch)
    assert_drawn_from(adapter, draw(sampler))  # by the other one
    assert sorted(request_counts) == ["replica-1"]
    sync(sampler, adapter, "state-1")
    assert_drawn_from(adapter, draw(sampler))
    assert sorted(request_counts) == ["replica-0", "replica-1"]


def test_a_sleep_stops_every_replica_and_the_next_sync_brings_all_back(
    backend: Any, sampler: Any, adapter: AdapterTrainer
) -> None:
    """On the CPU vLLM frees nothing in a sleep, but it stops computing, as on a GPU."""
    pool, before = pool_of(sampler), draw(sampler)
    backend.offload_for_training()
    assert sampler.loaded_state is None and [replica.loaded_state for replica in pool.replicas] == [None, None]
    assert [call(pool, replica, "is_sleeping") for replica in pool.replicas] == [True, True]
    replica = pool.replicas[1]
    starts = replica.starts
    process_of(replica).kill()
    until(lambda: replica.starts > starts and replica.phase == "up")
    assert call(pool, replica, "is_sleeping") and replica.loaded_state is None  # it does not take the trainer's memory
    sync(sampler, adapter, "state-0")
    assert [call(pool, replica, "is_sleeping") for replica in pool.replicas] == [False, False]
    after = draw(sampler)
    assert [one.token_ids for one in after] == [one.token_ids for one in before]
    assert_drawn_from(adapter, after)
