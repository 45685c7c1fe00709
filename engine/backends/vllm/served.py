"""vLLM's asynchronous engine as a server of the pool drives it: `front` answers for it over HTTP.

Only server processes import this; vLLM itself is imported inside functions.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

from engine.backends.vllm import adapter
from engine.backends.vllm.runtime import EngineOptions
from engine.errors import WorkerDied
from engine.protocol import SamplingParams, TokenIds

Chunk = list[Any]
"""[index of the completion, token ids, logprobs, stop reason or None]: what was drawn since the chunk before."""

_END = object()


class Served:
    """`client` is vLLM's AsyncLLM. `adapters`: name -> vLLM's request for it."""

    def __init__(self, client: Any, options: EngineOptions) -> None:
        self.client, self.options = client, options
        self.adapters: dict[str, Any] = {}
        self._numbers = itertools.count(1)

    async def rpc(self, method: str, args: list[Any]) -> list[Any]:
        """What every worker answers."""
        return list(await self.client.collective_rpc(method, args=tuple(args)))

    async def load_adapter(self, name: str, path: str, manifest: dict[str, Any]) -> list[Any]:
        """What every worker answers of the adapter that it loaded."""
        number = next(self._numbers)
        answers = await self.rpc("ostinato_load_adapter", [path, name, number, manifest])
        self.adapters[name] = adapter.lora_request(name, number, path)
        return answers

    async def remove_adapter(self, name: str) -> list[Any]:
        self.adapters.pop(name, None)
        return await self.rpc("ostinato_remove_adapter", [name])

    async def generate(self, body: dict[str, Any]) -> AsyncIterator[Chunk]:
        """Chunks of every completion as they are drawn; closing the iterator ends them all.

        Args:
            body: `prompts`; `of`: the prompt of each completion; `seeds`; `params` (our SamplingParams as JSON);
                `every`: tokens per chunk; `state`: salts the prefix cache; `adapter` or None.
        """
        params = SamplingParams.model_validate(body["params"])
        salt, lora = self._salt(body["state"], body["adapter"]), self._lora(body["adapter"])
        chunks: asyncio.Queue[Any] = asyncio.Queue()

        async def draw(index: int, prompt: TokenIds, seed: int) -> None:
            wanted = adapter.vllm_params(params, seed, self.options, stream=True)
            wanted.stream_interval = body["every"]
            given = adapter.token_prompt(prompt, salt=salt)
            async for output in self.client.generate(given, wanted, self._name(), lora_request=lora):
                if output.outputs[0].finish_reason == "abort":
                    raise WorkerDied("vLLM aborted a completion")
                drawn = adapter.sampled(output.outputs[0], params)
                tokens = [token for token, _ in drawn]
                stop = adapter.stop_reason(tokens[-1], self.options.eos_token_ids, params) if output.finished else None
                chunks.put_nowait([index, tokens, [logprob for _, logprob in drawn], stop])

        asked = enumerate(zip(body["of"], body["seeds"], strict=True))
        drawing = asyncio.gather(*(draw(index, body["prompts"][prompt], seed) for index, (prompt, seed) in asked))
        drawing.add_done_callback(lambda done: chunks.put_nowait(_END))
        try:
            while (chunk := await chunks.get()) is not _END:
                yield chunk
            await drawing
        finally:
            drawing.cancel()
            await asyncio.gather(drawing, return_exceptions=True)

    async def score(self, sequences: list[TokenIds], state: str, name: str | None) -> list[list[float]]:
        """Nats of every token but the first."""
        salt, lora = self._salt(state, name), self._lora(name)

        async def one(tokens: TokenIds) -> list[float]:
            prompt, params = adapter.token_prompt(tokens, salt=salt), adapter.scoring_params()
            outputs = [o async for o in self.client.generate(prompt, params, self._name(), lora_request=lora)]
            return adapter.scored(outputs[-1], tokens)

        return list(await asyncio.gather(*(one(tokens) for tokens in sequences)))

    def _name(self) -> str:
        return f"ostinato-{next(self._numbers)}"

    def _salt(self, state: str, name: str | None) -> str:
        return f"{state} {name}"

    def _lora(self, name: str | None) -> Any:
        if name is None:
            return None
        if name not in self.adapters:
            raise ValueError(f"adapter {name!r} was not loaded here")
        return self.adapters[name]

    async def do(self, what: str) -> Any:
        """One of the engine's own calls. Raises ValueError for one that is not known."""
        calls: dict[str, Callable[[], Any]] = {
            "reset_prefix_cache": self.client.reset_prefix_cache,
            "sleep": lambda: self.client.sleep(2),
            "wake": self.client.wake_up,
            "is_sleeping": self.client.is_sleeping,
        }
        if what not in calls:
            raise ValueError(f"no call {what!r}; there are {', '.join(sorted(calls))}")
        return await calls[what]()
