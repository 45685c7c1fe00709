"""What runs inside the process of one replica: vLLM's AsyncLLM, and what is known of the weights that it holds.

The pool (engine.backends.vllm.serving.pool) calls it through Ray. It draws only for the state that was proven to be in
its workers since the process started: a process that was started again has random weights and refuses to draw. An
instance whose workers are broken refuses every call and says so to the pool, which replaces the process.

vLLM itself is imported inside methods, so that a process without vLLM can name this class.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.backends.vllm import adapter
from engine.backends.vllm.serving.runtime import EngineOptions
from engine.backends.vllm.weight_sync.receipts import broken
from engine.cluster.actors import ActorBase
from engine.errors import SamplerOutOfSync, WorkerDied
from engine.protocol import SamplingParams, StopReason, TokenIds

WATCH_SECONDS = 0.2
"""Between two looks at whether vLLM's engine still runs."""
RESET_SECONDS = 10.0
"""Completions that were given up keep a prefix cache busy for a moment."""
RESET_POLL_SECONDS = 0.05
REPLICA_ENV = "OSTINATO_REPLICA"
"""Environment variable with the replica's name, for the processes that vLLM starts."""

Answer = dict[str, Any]
Chunk = tuple[int, TokenIds, list[float], StopReason | None]
"""(index of the completion, token ids, logprobs, why it ended or None): what was drawn since the chunk before."""


class ReplicaActor(ActorBase):
    """`executor`: vLLM's distributed executor, where several workers share the model."""

    def __init__(self, name: str, options: EngineOptions, executor: str | None = None) -> None:
        self.name, self.options, self.executor = name, options, executor
        self.state: str | None = None
        self.broken = False
        self._client: Any = None
        self._adapters: dict[str, Any] = {}
        self._numbers = itertools.count(1)

    async def start(self, config: Mapping[str, str]) -> None:
        """Starts vLLM with random weights. `config`: the model's JSON files, by name."""
        own = {REPLICA_ENV: self.name, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "HF_HUB_OFFLINE": "1"}
        os.environ.update(adapter.ENVIRONMENT | own)
        with tempfile.TemporaryDirectory(prefix="ostinato-config-") as folder:
            for name, text in config.items():
                Path(folder, name).write_text(text)
            self._client = adapter.async_engine(Path(folder), self.options, self.executor)

    async def wait_for_failure(self) -> str:
        while self._client is None or not (self.broken or self._client.errored):
            await asyncio.sleep(WATCH_SECONDS)
        return "its workers are broken" if self.broken else "vLLM's engine ended"

    async def check_health(self) -> None:
        """Raises WorkerDied when the process must be replaced."""
        if self.broken or self._client is None or self._client.errored:
            raise WorkerDied(f"vLLM {self.name}: its workers are broken or have ended")

    # -- weights ----------------------------------------------------------------------------------------------

    async def rpc(self, method: str, *args: Any) -> list[Answer]:
        """What every worker answers to a method of the extension that leaves the weights as they are."""
        await self.check_health()
        answers = list(await self._client.collective_rpc(method, args=args))
        self.broken = self.broken or broken(answers)
        return answers

    async def load(
        self, source: Sequence[str] | str, manifest: Mapping[str, Any], state: str, full: bool
    ) -> list[Answer]:
        """What every worker answers of the weights that it took. If none refuses, the replica holds `state`.

        Raises:
            SamplerOutOfSync: the prefix cache could not be reset.
        """
        self.state = None
        answers = await self.rpc("ostinato_load", source, manifest, state, full)
        if not any(answer.get("wrong") for answer in answers):
            await self.reset_prefix_cache()
            self.state = state
        return answers

    async def load_adapter(self, name: str, files: Mapping[str, bytes], manifest: Mapping[str, Any]) -> list[Answer]:
        """What every worker answers of the adapter that it loaded. `files`: of a peft folder, by name."""
        number = next(self._numbers)
        with tempfile.TemporaryDirectory(prefix="ostinato-adapter-") as folder:
            for file, content in files.items():
                Path(folder, file).write_bytes(content)
            answers = await self.rpc("ostinato_load_adapter", folder, name, number, manifest)
        self._adapters[name] = adapter.lora_request(name, number, folder)
        return answers

    async def remove_adapter(self, name: str) -> list[Answer]:
        self._adapters.pop(name, None)
        return await self.rpc("ostinato_remove_adapter", name)

    async def reset_prefix_cache(self) -> None:
        """Raises SamplerOutOfSync when it could not be reset."""
        for _ in range(int(RESET_SECONDS / RESET_POLL_SECONDS)):
            if await self._client.reset_prefix_cache():
                return
            await asyncio.sleep(RESET_POLL_SECONDS)
        raise SamplerOutOfSync(
            f"vLLM {self.name} did not reset its prefix cache: keys and values of older weights would be read"
        )

    async def sleep(self) -> None:
        """Gives device memory back. The replica holds no state afterwards."""
        self.state = None
        await self._client.sleep(2)

    async def wake(self) -> None:
        self.state = None
        await self._client.wake_up()

    async def is_sleeping(self) -> bool:
        return bool(await self._client.is_sleeping())

    # -- tokens -----------------------------------------------------------------------------------------------

    async def generate(
        self,
        state: str,
        prompts: Sequence[TokenIds],
        prompt_of: Sequence[int],
        seeds: Sequence[int],
        params: Mapping[str, Any],
        every: int,
        adapter_name: str | None,
    ) -> AsyncIterator[list[Chunk]]:
        """Chunks of all completions as they are drawn. What one step of vLLM gives is one item, as each item costs a
        message. Closing the iterator ends the completions.

        Args:
            prompt_of: the index in `prompts` of each completion's prompt.
            params: SamplingParams as JSON.
            every: tokens per chunk.
        """
        await self._must_hold(state)
        ours = SamplingParams.model_validate(params)
        salt, lora = f"{state} {adapter_name}", self._lora(adapter_name)
        chunks: list[Chunk] = []
        ready = asyncio.Event()

        async def draw(index: int) -> None:
            wanted = adapter.vllm_params(ours, seeds[index], self.options, stream=True)
            wanted.stream_interval = every
            prompt = adapter.token_prompt(prompts[prompt_of[index]], salt=salt)
            async for output in self._client.generate(prompt, wanted, self._request_name(), lora_request=lora):
                chunks.append(self._chunk(index, output, ours))
                ready.set()

        drawing = [asyncio.create_task(draw(index)) for index in range(len(seeds))]
        drawn = asyncio.gather(*drawing)
        drawn.add_done_callback(lambda _: ready.set())
        try:
            while chunks or not drawn.done():
                await ready.wait()
                ready.clear()
                if chunks:
                    item, chunks = chunks, []
                    yield item
            await drawn
        finally:
            for task in drawing:
                task.cancel()
            await asyncio.gather(*drawing, drawn, return_exceptions=True)

    def _chunk(self, index: int, output: Any, params: SamplingParams) -> Chunk:
        if output.outputs[0].finish_reason == "abort":
            raise WorkerDied("vLLM aborted a completion")
        drawn = adapter.sampled(output.outputs[0], params)
        tokens = [token for token, _ in drawn]
        stop = adapter.stop_reason(tokens[-1], self.options.eos_token_ids, params) if output.finished else None
        return index, tokens, [logprob for _, logprob in drawn], stop

    async def score(self, state: str, sequences: Sequence[TokenIds], adapter_name: str | None) -> list[list[float]]:
        """Nats of every token but the first."""
        await self._must_hold(state)
        salt, lora = f"{state} {adapter_name}", self._lora(adapter_name)

        async def score_one(tokens: TokenIds) -> list[float]:
            prompt, params = adapter.token_prompt(tokens, salt=salt), adapter.scoring_params()
            outputs = [o async for o in self._client.generate(prompt, params, self._request_name(), lora_request=lora)]
            return adapter.scored(outputs[-1], tokens)

        return list(await asyncio.gather(*(score_one(tokens) for tokens in sequences)))

    async def _must_hold(self, state: str) -> None:
        """Raises SamplerOutOfSync unless the workers were proven to hold `state`."""
        await self.check_health()
        if self.state is None or self.state != state:
            raise SamplerOutOfSync(f"vLLM {self.name} holds {self.state}, and {state} was asked for")

    def _request_name(self) -> str:
        return f"ostinato-{next(self._numbers)}"

    def _lora(self, name: str | None) -> Any:
        if name is None:
            return None
        if name not in self._adapters:
            raise SamplerOutOfSync(f"vLLM {self.name} holds no adapter {name}")
        return self._adapters[name]
