"""From a spec to a running pool of vLLM servers."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import torch

from engine.backends.vllm.delivery import BY_FILES, ByBroadcast, hosts_of
from engine.backends.vllm.launching import Plan, own_config, token_of
from engine.backends.vllm.pool import OnUp, VllmPool
from engine.backends.vllm.remote import Remote
from engine.backends.vllm.runtime import EngineOptions
from engine.backends.vllm.server import Launch, Server
from engine.errors import BadSpec
from engine.sampler_spec import VllmSpec

MUST_EQUAL = ("dtype", "vocab_size", "eos_token_ids", "max_lora_rank", "lora_targets")
"""Options in which a server elsewhere must be what the engine would have started itself."""


def open_pool(
    spec: VllmSpec, config_folder: Path, options: EngineOptions, device: torch.device = torch.device("cpu")
) -> VllmPool:
    """Starts the servers of `spec` on this machine, or finds those at its `urls`, and waits until they are up.
    `device`: the trainer's.

    Raises:
        WorkerDied: one of them did not come up.
        BadSpec: no token for `urls`, or a server there was built for something else.
    """
    folder = Path(tempfile.mkdtemp(prefix="ostinato-vllm-"))
    here = Plan(spec, options, own_config(config_folder, folder), folder, secrets.token_hex(32))
    return pool_of(here, device)


def pool_of(here: Plan, device: torch.device = torch.device("cpu")) -> VllmPool:
    """A pool by this plan; it removes the plan's folder when it closes."""
    spec = here.spec
    token = token_of(spec) if spec.urls else here.token
    found: list[tuple[str, str, Launch | None]] = [(url, url, None) for url in spec.urls]
    for index in range(0 if spec.urls else max(1, spec.servers)):
        launch = here.launch(index)
        found.append((launch.name, launch.url, launch))
    clients: list[httpx.AsyncClient] = []

    def make(bring_up: OnUp) -> list[Server]:
        async def on_up(server: Server) -> None:
            if server.launch is None:
                must_fit(server.name, (await server.remote.hello())["options"], here.options)
            await bring_up(server)

        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        client = httpx.AsyncClient(headers={"authorization": f"Bearer {token}"}, limits=limits, trust_env=False)
        clients.append(client)
        return [
            Server(Remote(name, url, client, silence=spec.answer_seconds), launch, on_up, spec.start_seconds)
            for name, url, launch in found
        ]

    async def on_close() -> None:
        for client in clients:
            await client.aclose()
        shutil.rmtree(here.folder, ignore_errors=True)

    hosts = hosts_of([url for _, url, _ in found])
    delivery = ByBroadcast(hosts, device, seconds=spec.sync_seconds) if spec.way == "nccl" else BY_FILES
    # adapters come anew at every step, their base only once
    return VllmPool(make, on_close, keep=here.options.max_lora_rank is not None, delivery=delivery)


def must_fit(name: str, found: Mapping[str, Any], wanted: EngineOptions) -> None:
    """Raises BadSpec for a server that was built for another model or precision than is asked of it."""
    for option, value in asdict(wanted).items():
        theirs = tuple(found[option]) if isinstance(found[option], list) else found[option]
        if (option in MUST_EQUAL and theirs != value) or (option == "max_context" and theirs < value):
            raise BadSpec(
                f"the vLLM server at {name} has {option}={theirs!r}, the engine wants {value!r}; start it with the "
                "same config and model: ostinato engine sampler --config FILE --model FOLDER"
            )
