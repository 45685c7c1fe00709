"""Weights straight from GPU to GPU, through vLLM's own weight transfer: "nccl" between GPUs and nodes.

Not run yet: it needs GPUs. `launching` starts servers of transport "nccl" with vLLM's development routes, which `front`
guards, and with its NCCL receiver. CUDA IPC over HTTP is left out: vLLM unpickles what it is sent there.
What arrives this way is not digested on its way in, as files are: the logprob gap is the only proof, until the trainer
can tell the workers what their slices should be. So `VllmSamplers` does not choose it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from torch import Tensor

from engine.errors import SamplerOutOfSync, WorkerDied

Init = dict[str, Any]


class Fan:
    """vLLM's `VLLMWeightSyncClient` over all servers of a pool: each call goes to all at once, and each server's ranks
    come after those of the servers before it in the NCCL group; the trainer is rank 0."""

    def __init__(self, urls: Sequence[str], *, ranks_each: int, token: str, seconds: float) -> None:
        self.urls, self.ranks_each = list(urls), ranks_each
        self._client = httpx.Client(headers={"authorization": f"Bearer {token}"}, timeout=seconds, trust_env=False)

    @property
    def world_size(self) -> int:
        return 1 + len(self.urls) * self.ranks_each

    def init_weight_transfer_engine(self, init_info: Init) -> None:
        def body(number: int) -> Init:
            return {"init_info": {**init_info, "rank_offset": 1 + number * self.ranks_each}}

        self._all("init_weight_transfer_engine", body)

    def shutdown_weight_transfer_engine(self) -> None:
        self._all("shutdown_weight_transfer_engine", lambda number: None)

    def start_weight_update(self) -> None:
        self._all("start_weight_update", lambda number: None)

    def update_weights(self, update_info: Any) -> None:
        self._all("update_weights", lambda number: {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        body = None if weight_version is None else {"weight_version": weight_version}
        self._all("finish_weight_update", lambda number: body)

    def close(self) -> None:
        self._client.close()

    def _all(self, route: str, body: Callable[[int], Init | None]) -> None:
        """At once: every server waits inside the call for the others to join."""

        def one(number: int) -> None:
            url = self.urls[number]
            try:
                response = self._client.post(f"{url}/{route}", json=body(number))
            except httpx.HTTPError as error:
                raise WorkerDied(f"the vLLM server at {url} is gone in {route}: {error}") from error
            if response.status_code != 200:
                raise SamplerOutOfSync(
                    f"the vLLM server at {url} answered {response.status_code} in {route}: {response.text[:500]}"
                )

        with ThreadPoolExecutor(max_workers=len(self.urls)) as threads:
            for asked in [threads.submit(one, number) for number in range(len(self.urls))]:
                asked.result()


def nccl_sender(fan: Fan, weights: Callable[[], Mapping[str, Tensor]], *, address: str, port: int) -> Any:
    """Joins trainer and servers in one NCCL group; `send_weights()` of what it returns is one update.

    Args:
        weights: the trainer's tensors on its GPU, in the sampler's precision, under their Hugging Face names.
        address: of this machine, as the servers reach it; `port` is free here.
    """
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    class Source(WeightSource):
        def metadata(self) -> list[Any]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights().items()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            yield from weights().items()

    info = NCCLTrainerInitInfo(master_address=address, master_port=port, world_size=fan.world_size, rank=0)
    return WeightTransferTrainerFactory.trainer_init(info, client=fan, source=Source())
