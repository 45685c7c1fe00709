"""Which way weights take to vLLM, and who meets where when it is a broadcast."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.backends.vllm.backend import VllmSamplers
from engine.backends.vllm.broadcast import kind_of, own_address
from engine.backends.vllm.delivery import hosts_of
from engine.backends.vllm.last_weights import Weights
from engine.errors import BadSpec
from engine.sampler_spec import VllmSpec
from tests.engine.vllm.gating import spec_of

CPU = torch.device("cpu")


def gpu(number: int, version: tuple[int, ...] = (2, 29, 7)) -> dict[str, Any]:
    return {"device": "cuda", "gpu": f"GPU-{number}", "nccl": list(version)}


def test_nccl_wants_a_gpu_for_each_member_alone_and_one_version() -> None:
    assert kind_of([gpu(0), gpu(1), gpu(2)]) == "nccl"
    assert kind_of([gpu(0), gpu(1), gpu(1)]) == "gloo"
    assert kind_of([gpu(0), {"device": "cpu", "gpu": None, "nccl": None}]) == "gloo"
    assert kind_of([gpu(0), gpu(1, (2, 27, 3))]) == "gloo"
    assert kind_of([gpu(0), {**gpu(1), "nccl": None}]) == "gloo"


def test_the_address_is_the_one_by_which_the_servers_are_reached() -> None:
    assert hosts_of(["http://127.0.0.1:8001", "http://[::1]:80"]) == ["127.0.0.1", "::1"]
    assert own_address(["127.0.0.1"]) == "127.0.0.1"


@pytest.mark.parametrize(
    ("given", "way"),
    [
        ({}, "memory"),
        ({"servers": 2}, "shm"),
        ({"urls": ("http://a:1",)}, "nccl"),
        ({"urls": ("http://a:1",), "sync_folder": "/all"}, "checkpoint"),
        ({"servers": 2, "transport": "nccl"}, "nccl"),
        ({"urls": ("http://a:1",), "sync_folder": "/all", "transport": "nccl"}, "nccl"),
    ],
)
def test_auto_takes_the_best_way_there_is(given: dict[str, Any], way: str) -> None:
    assert VllmSpec.model_validate(given).way == way


@pytest.mark.parametrize(
    ("given", "instead"),
    [({"transport": "nccl"}, "use 'auto'"), ({"transport": "ipc", "servers": 1}, "use 'nccl' between GPUs, 'shm' on")],
)
def test_a_way_that_does_not_lead_there_is_refused_and_another_named(given: dict[str, Any], instead: str) -> None:
    with pytest.raises(BadSpec, match=instead):
        VllmSamplers(spec_of(**given), compute_dtype=torch.float32, device=CPU)


def test_a_broadcast_cannot_be_taken_later() -> None:
    weights = Weights((), {}, "state", False)
    assert not weights.still_there and weights.kept() is weights
    assert replace(weights, group="g").source == "g"
