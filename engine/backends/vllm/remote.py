"""The calls of a pool to one of its servers, over HTTP; `front` answers them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from engine.errors import BadSpec, NotAuthenticated, SamplerOutOfSync, WorkerDied

CONNECT_SECONDS = 10.0
RESET_SECONDS = 10.0
"""Completions that were given up keep a prefix cache busy for a moment."""
POLL_SECONDS = 0.05


class Remote:
    """One server. Every call raises WorkerDied when it does not answer, or is silent for `silence` seconds."""

    def __init__(self, name: str, url: str, client: httpx.AsyncClient, *, silence: float) -> None:
        self.name, self.url, self._client = name, url, client
        self._timeout = httpx.Timeout(silence, connect=CONNECT_SECONDS, pool=None)

    async def healthy(self) -> bool:
        """Whether /health answers 200 within seconds."""
        try:
            return (await self._client.get(f"{self.url}/health", timeout=CONNECT_SECONDS)).status_code == 200
        except httpx.HTTPError:
            return False

    async def hello(self) -> dict[str, Any]:
        """{"boot", "state", "options"}: see `front`."""
        return await self._answer("GET", "hello", None)

    async def rpc(self, method: str, *args: Any) -> tuple[list[dict[str, Any]], str]:
        """(What each worker answers, the server's boot): a method of the extension."""
        answer = await self.post("rpc", method=method, args=list(args))
        return answer["answers"], answer["boot"]

    async def post(self, route: str, **body: Any) -> dict[str, Any]:
        return await self._answer("POST", route, body)

    async def reset_prefix_cache(self) -> None:
        """Raises SamplerOutOfSync when it could not be reset."""
        for _ in range(int(RESET_SECONDS / POLL_SECONDS)):
            if (await self.post("do", what="reset_prefix_cache"))["answer"]:
                return
            await asyncio.sleep(POLL_SECONDS)
        raise SamplerOutOfSync(
            f"vLLM server {self.name} did not reset its prefix cache: keys and values of older weights would be read"
        )

    async def _answer(self, method: str, route: str, body: dict[str, Any] | None) -> dict[str, Any]:
        try:
            url = f"{self.url}/ostinato/{route}"
            response = await self._client.request(method, url, json=body, timeout=self._timeout)
        except httpx.HTTPError as error:
            raise self._died(error, route) from error
        self._refuse(response, response.text)
        answer: dict[str, Any] = response.json()
        return answer

    async def chunks(self, body: dict[str, Any]) -> AsyncIterator[list[Any]]:
        """[completion, token ids, logprobs, stop reason or None] as they come; ends when all completions have ended."""
        try:
            url = f"{self.url}/ostinato/generate"
            async with self._client.stream("POST", url, json=body, timeout=self._timeout) as response:
                if response.status_code != 200:
                    self._refuse(response, (await response.aread()).decode(errors="replace"))
                async for line in response.aiter_lines():
                    chunk = json.loads(line)
                    if isinstance(chunk, list):
                        yield chunk
                    elif "error" in chunk:
                        raise BadSpec(chunk["error"]) if chunk.get("bad") else WorkerDied(
                            f"vLLM server {self.name} ended a generate: {chunk['error']}"
                        )
                    elif chunk["done"] == len(body["seeds"]):
                        return
        except httpx.HTTPError as error:
            raise self._died(error, "generate") from error
        raise WorkerDied(f"vLLM server {self.name} ended its answer before all completions had ended")

    def _refuse(self, response: httpx.Response, text: str) -> None:
        if response.status_code == 200:
            return
        if response.status_code == 401:
            raise NotAuthenticated(f"vLLM server {self.name} at {self.url} wants another token than it was given")
        if response.status_code == 409:
            raise SamplerOutOfSync(f"vLLM server {self.name}: {text[:500]}")
        raise WorkerDied(f"vLLM server {self.name} answered {response.status_code}: {text[:500]}")

    def _died(self, error: httpx.HTTPError, route: str) -> WorkerDied:
        if isinstance(error, httpx.ReadTimeout):
            return WorkerDied(
                f"vLLM server {self.name} was silent for {self._timeout.read:.0f} s in {route} "
                "(sampler.answer_seconds)"
            )
        return WorkerDied(f"vLLM server {self.name} is gone in {route}: {type(error).__name__}: {error}")
