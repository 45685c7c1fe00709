"""Which way weights take to vLLM, and who meets where when it is a broadcast."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.backends.vllm.backend import VllmSamplers
from engine.backends.vllm.weight_sync.broadcast import select_backend, source_address
from engine.backends.vllm.weight_sync.load_request import LoadRequest
from engine.errors import BadSpec
from engine.specs.cluster import ClusterSpec
from engine.specs.sampler import VllmSpec
from tests.engine.vllm.gating import spec_of

CPU = torch.device("cpu")


def gpu(number: int, version: tuple[int, ...] = (2, 29, 7)) -> dict[str, Any]:
    return {"device": "cuda", "gpu": f"GPU-{number}", "nccl": list(version)}


def test_nccl_wants_a_gpu_for_each_member_alone_and_one_version() -> None:
    assert select_backend([gpu(0), gpu(1), gpu(2)]) == "nccl"
    assert select_backend([gpu(0), gpu(1), gpu(1)]) == "gloo"
    assert select_backend([gpu(0), {"device": "cpu", "gpu": None, "nccl": None}]) == "gloo"
    assert select_backend([gpu(0), gpu(1, (2, 27, 3))]) == "gloo"
    assert select_backend([gpu(0), {**gpu(1), "nccl": None}]) == "gloo"


def test_the_address_is_the_one_by_which_another_host_is_reached() -> None:
    assert source_address("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize(
    ("given", "way"),
    [
        ({}, "memory"),
        ({"replicas": 2}, "shm"),
        ({"replicas": 2, "transport": "nccl"}, "nccl"),
        ({"replicas": 2, "sync_folder": "/all", "transport": "checkpoint"}, "checkpoint"),
    ],
)
def test_the_transport_on_this_machine(given: dict[str, Any], way: str) -> None:
    assert VllmSpec.model_validate(given).resolved_transport(ClusterSpec()) == way


@pytest.mark.parametrize(
    ("given", "way"),
    [
        ({}, "memory"),
        ({"replicas": 2}, "nccl"),
        ({"replicas": 2, "sync_folder": "/all"}, "checkpoint"),
        ({"replicas": 2, "sync_folder": "/all", "transport": "nccl"}, "nccl"),
        ({"replicas": 2, "transport": "shm"}, "shm"),
    ],
)
def test_the_transport_on_a_cluster(given: dict[str, Any], way: str) -> None:
    assert VllmSpec.model_validate(given).resolved_transport(ClusterSpec(address="head:6379")) == way


@pytest.mark.parametrize(
    ("given", "instead"),
    [({"transport": "nccl"}, "use 'auto'"), ({"transport": "ipc", "replicas": 1}, "use 'nccl' between GPUs, 'shm' on")],
)
def test_a_way_that_does_not_lead_there_is_refused_and_another_named(given: dict[str, Any], instead: str) -> None:
    with pytest.raises(BadSpec, match=instead):
        VllmSamplers(spec_of(**given), compute_dtype=torch.float32, device=CPU)


def test_a_broadcast_cannot_be_taken_later() -> None:
    weights = LoadRequest((), {}, "state", False)
    assert not weights.files_exist and weights.with_linked_files() is weights
    assert replace(weights, group="g").source == "g"
