"""The Ray actor of one replica: it runs vLLM's AsyncLLM, and records which weights its workers were proven to hold.

The pool (engine.backends.replicas.pool) calls it through Ray. It samples only from the weights that were proven
since the process started: a process that was started again has random weights and refuses to sample. An instance whose
workers are broken refuses every call and reports this to the pool, which replaces the process.

vLLM is imported inside methods, so that a process without vLLM can import this class.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from engine.backends.replicas.broadcast import Parts
from engine.backends.replicas.partial_completions import Chunk
from engine.backends.replicas.runtime import any_broken
from engine.backends.vllm import vllm_api
from engine.backends.vllm.architecture import EngineOptions
from engine.cluster.actors import ActorBase
from engine.errors import SamplerOutOfSync, WorkerDied
from engine.protocol import SamplingParams, TokenIds
from engine.text.stops import CompletionEnd, StopStrings

HEALTH_INTERVAL = 0.2
"""Seconds between two checks whether vLLM's engine still runs."""
RESET_TIMEOUT = 10.0
"""Seconds that a reset of the prefix cache may take. Aborted completions keep the cache busy for a moment."""
RESET_INTERVAL = 0.05
"""Seconds between two attempts to reset the prefix cache."""
REPLICA_ENV = "OSTINATO_REPLICA"
"""Environment variable with the replica's name, for the processes that vLLM starts."""

Reply = dict[str, Any]
"""Reply of one vLLM worker to a method of the extension."""


class ReplicaActor(ActorBase):
    """One vLLM engine with its workers, in a process of its own."""

    def __init__(self, name: str, options: EngineOptions, executor: str | None = None) -> None:
        """`executor`: vLLM's distributed executor if several workers share the model."""
        self.name, self.options, self.executor = name, options, executor
        self.state: str | None = None
        self.broken = False
        self._client: Any = None
        self._adapters: dict[str, Any] = {}
        self._numbers = itertools.count(1)

    async def start(self, config: Mapping[str, str]) -> None:
        """Starts vLLM with random weights. `config`: the model's JSON files, by name."""
        # vLLM reads the environment at import and in its own processes, so set it before the engine is built.
        replica_environment = {REPLICA_ENV: self.name, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "HF_HUB_OFFLINE": "1"}
        os.environ.update(vllm_api.ENVIRONMENT | replica_environment)
        with tempfile.TemporaryDirectory(prefix="ostinato-config-") as folder:
            for name, text in config.items():
                Path(folder, name).write_text(text)
            self._client = vllm_api.async_engine(Path(folder), self.options, self.executor)

    async def wait_for_failure(self) -> str:
        while self._client is None or not (self.broken or self._client.errored):
            await asyncio.sleep(HEALTH_INTERVAL)
        return "its workers are broken" if self.broken else "vLLM's engine ended"

    async def check_health(self) -> None:
        """Raises WorkerDied if the process must be replaced."""
        if self.broken or self._client is None or self._client.errored:
            raise WorkerDied(f"vLLM {self.name}: its workers are broken or have ended")

    # -- weights ----------------------------------------------------------------------------------------------

    async def rpc(self, method: str, *args: Any) -> list[Reply]:
        """Calls a method of the extension on every worker and returns their replies."""
        await self.check_health()
        replies = list(await self._client.collective_rpc(method, args=args))
        self.broken = self.broken or any_broken(replies)
        return replies

    async def load(
        self,
        source: Sequence[str] | str,
        manifest: Mapping[str, Any],
        state: str,
        full: bool,
        parts: Parts | None = None,
    ) -> list[Reply]:
        """Loads weights into every worker and returns their replies. If none has an error, the replica holds `state`.

        Raises:
            SamplerOutOfSync: the prefix cache could not be reset.
        """
        self.state = None
        replies = await self.rpc("ostinato_load", source, manifest, state, full, parts)
        if not any(reply.get("error") for reply in replies):
            await self.reset_prefix_cache()
            self.state = state
        return replies

    async def load_adapter(self, name: str, files: Mapping[str, bytes], manifest: Mapping[str, Any]) -> list[Reply]:
        """Loads a LoRA adapter into every worker and returns their replies. `files`: the files of a peft folder."""
        number = next(self._numbers)
        with tempfile.TemporaryDirectory(prefix="ostinato-adapter-") as folder:
            for file, content in files.items():
                Path(folder, file).write_bytes(content)
            replies = await self.rpc("ostinato_load_adapter", folder, name, number, manifest)
        self._adapters[name] = vllm_api.lora_request(name, number, folder)
        return replies

    async def remove_adapter(self, name: str) -> list[Reply]:
        self._adapters.pop(name, None)
        return await self.rpc("ostinato_remove_adapter", name)

    async def reset_prefix_cache(self) -> None:
        """Raises SamplerOutOfSync if the cache could not be reset."""
        # vLLM refuses while a request uses the cache, and aborted requests end a moment later.
        for _ in range(int(RESET_TIMEOUT / RESET_INTERVAL)):
            if await self._client.reset_prefix_cache():
                return
            await asyncio.sleep(RESET_INTERVAL)
        raise SamplerOutOfSync(
            f"vLLM {self.name} did not reset its prefix cache: it would use keys and values of older weights"
        )

    async def sleep(self) -> None:
        """Frees device memory. The replica holds no weights afterwards."""
        self.state = None
        await self._client.sleep(2)

    async def wake(self) -> None:
        self.state = None
        await self._client.wake_up()

    async def is_sleeping(self) -> bool:
        return bool(await self._client.is_sleeping())

    # -- tokens -----------------------------------------------------------------------------------------------

    async def generate(  # noqa: PLR0913 - one argument per part of the request
        self,
        state: str,
        prompts: Sequence[TokenIds],
        prompt_indices: Sequence[int],
        seeds: Sequence[int],
        params: Mapping[str, Any],
        chunk_tokens: int,
        adapter_name: str | None,
        stops: StopStrings | None = None,
        sampled: Sequence[TokenIds] | None = None,
    ) -> AsyncIterator[list[Chunk]]:
        """Yields the chunks of all completions as they are sampled. Closing the iterator ends the completions.

        All chunks of one step of vLLM are one item, because each item costs a message.

        Args:
            prompt_indices: for each completion, the index of its prompt in `prompts`.
            params: SamplingParams as JSON.
            chunk_tokens: tokens per chunk, at least, unless the completion ends.
            stops: the strings of `params.stop`, for the tokens of the model's tokenizer.
            sampled: the tokens that each completion has already. None: all of them begin.
        """
        await self._require_state(state)
        sampling_params = SamplingParams.model_validate(params)
        salt, lora = f"{state} {adapter_name}", self._lora_request(adapter_name)
        chunks, has_news = list[Chunk](), asyncio.Event()

        async def sample(index: int) -> None:
            earlier = sampled[index] if sampled else []
            end = CompletionEnd(sampling_params, self.options.eos_token_ids, stops, earlier)
            rest = vllm_api.params_after(sampling_params, len(earlier))
            request = vllm_api.vllm_params(rest, seeds[index], self.options, stream=True)
            # vLLM ends a completion at its stop tokens and its length. For strings, each token must be seen here.
            request.stream_interval = chunk_tokens if stops is None else 1
            prompt = vllm_api.token_prompt([*prompts[prompt_indices[index]], *earlier], salt=salt)
            # After a cut, completions that have begun get their places back before others begin.
            outputs = self._request(prompt, request, lora, priority=0 if earlier else 1)
            async with aclosing(outputs):  # closing them before the last one makes vLLM abort the request
                async for chunk in self._chunks(index, outputs, sampling_params, end, chunk_tokens):
                    chunks.append(chunk)
                    has_news.set()

        # One task per completion collects its chunks. This generator yields what all tasks have collected meanwhile.
        tasks = [asyncio.create_task(sample(index)) for index in range(len(seeds))]
        all_done = asyncio.gather(*tasks)
        all_done.add_done_callback(lambda _: has_news.set())
        try:
            while chunks or not all_done.done():
                await has_news.wait()
                has_news.clear()
                if chunks:
                    item, chunks = chunks, []
                    yield item
            await all_done
        finally:
            # The caller closed the generator, or a task failed: vLLM aborts the requests of cancelled tasks.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, all_done, return_exceptions=True)

    @staticmethod
    async def _chunks(
        index: int, outputs: AsyncIterator[Any], params: SamplingParams, end: CompletionEnd, chunk_tokens: int
    ) -> AsyncIterator[Chunk]:
        """Yields the chunks of one completion until its end."""
        tokens: TokenIds = []
        logprobs: list[float] = []
        async for output in outputs:
            if output.outputs[0].finish_reason == "abort":
                raise WorkerDied("vLLM aborted a completion")
            new_tokens, new_logprobs, stop = vllm_api.until_end(vllm_api.output_tokens(output.outputs[0], params), end)
            tokens += new_tokens
            logprobs += new_logprobs
            if stop is not None or len(tokens) >= chunk_tokens:
                yield index, tokens, logprobs, stop
                tokens, logprobs = [], []
            if stop is not None:
                return

    async def score(self, state: str, sequences: Sequence[TokenIds], adapter_name: str | None) -> list[list[float]]:
        """Logprobs in nats of every token but the first, per sequence."""
        await self._require_state(state)
        salt, lora = f"{state} {adapter_name}", self._lora_request(adapter_name)

        async def score_one(tokens: TokenIds) -> list[float]:
            prompt, params = vllm_api.token_prompt(tokens, salt=salt), vllm_api.scoring_params()
            outputs = [output async for output in self._request(prompt, params, lora)]
            return vllm_api.scored(outputs[-1], tokens)

        return list(await asyncio.gather(*(score_one(tokens) for tokens in sequences)))

    async def _require_state(self, state: str) -> None:
        """Raises SamplerOutOfSync unless the workers were proven to hold `state`."""
        await self.check_health()
        if self.state is None or self.state != state:
            raise SamplerOutOfSync(f"vLLM {self.name} holds {self.state}, and {state} was requested")

    def _request(self, prompt: Any, params: Any, lora: Any, *, priority: int = 0) -> Any:
        """vLLM's outputs for one prompt, as they come. Requests of a smaller `priority` get a place first."""
        name = f"ostinato-{next(self._numbers)}"
        return self._client.generate(prompt, params, name, lora_request=lora, priority=priority)

    def _lora_request(self, name: str | None) -> Any:
        if name is None:
            return None
        if name not in self._adapters:
            raise SamplerOutOfSync(f"vLLM {self.name} holds no adapter {name}")
        return self._adapters[name]
