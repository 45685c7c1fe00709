"""Weights by a broadcast between two GPUs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.backends.replicas.broadcast import (
    BroadcastGroup,
    GroupMember,
    device_info,
    open_store,
    receive,
    select_backend,
    send,
)
from engine.backends.replicas.runtime import manifest_of

pytestmark = pytest.mark.gpu


def test_tensors_arrive_bit_by_bit_over_nccl(cuda: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each member")
    devices = [torch.device("cuda", rank) for rank in range(2)]
    assert select_backend([device_info(device) for device in devices]) == "nccl"
    store, port = open_store("127.0.0.1", 60)
    group = BroadcastGroup("gpus", "127.0.0.1", port, 2, "nccl", 60, bucket_bytes=1000)
    sent = {
        "matrix": torch.randn(300, 70, device=devices[0]),
        "half": torch.randn(33, device=devices[0]).to(torch.bfloat16),
        "host": torch.arange(77),
    }
    manifest = manifest_of(sent.items())
    with ThreadPoolExecutor(2) as threads:
        members = list(threads.map(lambda rank: GroupMember(group, rank, devices[rank]), range(2)))
        receiving = threads.submit(lambda: dict(receive(members[1], manifest)))
        send(members[0], sent.items(), manifest)
        received = receiving.result()
    assert {tensor.device for tensor in received.values()} == {devices[1]}
    assert manifest_of(received.items()) == manifest
    for member in members:
        member.leave()
    del store
