"""One vLLM server on a machine of its own, for engines elsewhere that name it in `sampler.urls`."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal, cast

import httpx

from engine.backends.torch_backend import TorchBackend
from engine.backends.vllm.architecture import architecture_of
from engine.backends.vllm.backend import engine_options
from engine.backends.vllm.launching import Plan, own_config, token_of
from engine.backends.vllm.remote import Remote
from engine.backends.vllm.server import Server
from engine.errors import BadSpec, WorkerDied
from engine.sampler_spec import VllmSpec
from engine.spec import LocalEngineSpec
from engine.trainer_spec import TorchTrainerSpec

MIN_TOKEN = 16
"""Characters: a shorter token is guessed."""
GRACE_SECONDS = 20.0


def run_node(
    spec: LocalEngineSpec, model: Path, host: str, port: int, lora_targets: tuple[str, ...], say: Callable[[str], None]
) -> None:
    """Serves until SIGTERM or SIGINT; a server that ends by itself is started again. `say` hears its url once it is up.

    Args:
        spec: the config of the engines that will use it: its sampler and its precision.
        model: a folder with the model's config.json; weights come from the engines.
        lora_targets: layers that adapters may change; empty for servers of whole models.

    Raises:
        BadSpec: the sampler is not vLLM, or there is no token.
        WorkerDied: the server did not come up.
    """
    if not isinstance(spec.sampler, VllmSpec):
        raise BadSpec(f"sampler.kind is {spec.sampler.kind!r}; this serves vLLM: set sampler.kind to 'vllm'")
    token = token_of(spec.sampler)
    if len(token) < MIN_TOKEN:
        raise BadSpec(f"the token in ${spec.sampler.token_env} has {len(token)} characters; give {MIN_TOKEN} or more")
    machine = TorchBackend(spec.model_copy(update={"trainer": TorchTrainerSpec()}))
    options = engine_options(
        spec.sampler,
        architecture_of(model),
        dtype=cast(Literal["float32", "bfloat16"], str(machine.compute_dtype).removeprefix("torch.")),
        device=machine.device,
        ranks=spec.sampler.tensor_parallel,
        lora_targets=lora_targets,
        rows=spec.max_rows,
    )
    with tempfile.TemporaryDirectory(prefix="ostinato-sampler-") as folder:
        plan = Plan(spec.sampler, options, own_config(model, Path(folder)), Path(folder), token)
        asyncio.run(_serve(plan, host, port, say))


async def _serve(plan: Plan, host: str, port: int, say: Callable[[str], None]) -> None:
    launch = plan.launch(0, host=host, port=port)
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)

    async def on_up(server: Server) -> None:
        say(f"listening on http://{host}:{launch.port}")

    async with httpx.AsyncClient(headers={"authorization": f"Bearer {plan.token}"}, trust_env=False) as client:
        remote = Remote(launch.name, launch.url, client, silence=plan.spec.answer_seconds)
        server = Server(remote, launch, on_up, plan.spec.start_seconds)
        keeping = asyncio.create_task(server.keep())
        stopping = asyncio.create_task(ended.wait())
        try:
            while not ended.is_set():
                await asyncio.wait([keeping, stopping], timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                if keeping.done():
                    await keeping
                if server.failures and server.starts == 1:
                    raise WorkerDied(server.error)
        finally:
            await server.close(grace_seconds=GRACE_SECONDS)
            for task in (keeping, stopping):
                task.cancel()
            await asyncio.gather(keeping, stopping, return_exceptions=True)
