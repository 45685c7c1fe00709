"""Which transport carries weights to vLLM, and how a broadcast selects backend and address."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.backends.replicas.broadcast import select_backend, source_address
from engine.backends.replicas.delivery import LoadRequest
from engine.backends.vllm.backend import VllmSamplers
from engine.errors import BadSpec
from engine.specs.engine import ClusterSpec, VllmSpec
from tests.engine.vllm.gating import spec_of

CPU = torch.device("cpu")


def gpu(number: int, version: tuple[int, ...] = (2, 29, 7)) -> dict[str, Any]:
    return {"device": "cuda", "gpu": f"GPU-{number}", "nccl": list(version)}


def test_nccl_needs_separate_gpus_and_one_version() -> None:
    assert select_backend([gpu(0), gpu(1), gpu(2)]) == "nccl"
    assert select_backend([gpu(0), gpu(1), gpu(1)]) == "gloo"
    assert select_backend([gpu(0), {"device": "cpu", "gpu": None, "nccl": None}]) == "gloo"
    assert select_backend([gpu(0), gpu(1, (2, 27, 3))]) == "gloo"
    assert select_backend([gpu(0), {**gpu(1), "nccl": None}]) == "gloo"


def test_the_source_address_belongs_to_the_route_to_the_host() -> None:
    assert source_address("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize(
    ("config", "transport"),
    [
        ({}, "memory"),
        ({"replicas": 2}, "shm"),
        ({"replicas": 2, "transport": "nccl"}, "nccl"),
        ({"replicas": 2, "sync_folder": "/all", "transport": "checkpoint"}, "checkpoint"),
    ],
)
def test_the_transport_on_this_machine(config: dict[str, Any], transport: str) -> None:
    assert VllmSpec.model_validate(config).resolved_transport(ClusterSpec()) == transport


@pytest.mark.parametrize(
    ("config", "transport"),
    [
        ({}, "memory"),
        ({"replicas": 2}, "nccl"),
        ({"replicas": 2, "sync_folder": "/all"}, "checkpoint"),
        ({"replicas": 2, "sync_folder": "/all", "transport": "nccl"}, "nccl"),
        ({"replicas": 2, "transport": "shm"}, "shm"),
    ],
)
def test_the_transport_on_a_cluster(config: dict[str, Any], transport: str) -> None:
    assert VllmSpec.model_validate(config).resolved_transport(ClusterSpec(address="head:6379")) == transport


@pytest.mark.parametrize(
    ("config", "instead"),
    [({"transport": "nccl"}, "use 'auto'"), ({"transport": "ipc", "replicas": 1}, "use 'nccl' between GPUs, 'shm' on")],
)
def test_an_unsuitable_transport_is_refused_and_the_error_names_another(config: dict[str, Any], instead: str) -> None:
    with pytest.raises(BadSpec, match=instead):
        VllmSamplers(spec_of(**config), compute_dtype=torch.float32, device=CPU)


def test_a_broadcast_cannot_be_loaded_again() -> None:
    request = LoadRequest((), {}, "state", False)
    assert not request.files_exist and request.link_files() is request
    assert replace(request, group="g").source == "g"
