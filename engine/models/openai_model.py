"""`OpenAIModel`: a model behind an OpenAI-compatible endpoint. It only generates, for example as a judge.

    Model("openai://gpt-5-mini")                          OPENAI_BASE_URL, or api.openai.com; OPENAI_API_KEY
    Model("openai://my-run@http://127.0.0.1:8000/v1")     this endpoint; OPENAI_API_KEY, if it is set

Its answers come from the endpoint, so they are not reproducible, even with a seed. It belongs to no chain.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Self, TypeVar, overload

import httpx
from pydantic import BaseModel

from engine.errors import BadSpec, EngineBusy, EngineError, EngineUnreachable, NotAuthenticated, UnsupportedFragment
from engine.models.inference_model import changed_sampling
from engine.protocol import SamplingParams
from engine.text.answers import MalformedAnswer, answer_once, answer_repaired
from engine.text.fragments import ImageFragment
from engine.text.threads import StringThread
from storage.secrets import refuse_secrets

SCHEME = "openai://"
DEFAULT_URL = "https://api.openai.com/v1"
TRIES = 4
TIMEOUT_SECONDS = 120.0
"""Timeout of one request. A long answer takes minutes."""
LONGEST_WAIT_SECONDS = 30.0
"""Longest wait between two tries."""

Answer = TypeVar("Answer", bound=BaseModel)

MAX_REPLY_BYTES = 8 * 2**20
"""Largest reply that is read. An answer of 100,000 tokens has about 0.5 MB."""


@dataclass(frozen=True)
class OpenAIModel:
    """Generates with an OpenAI-compatible endpoint. Sampling views are copies, as those of other models.

    `min_gen_len` and `top_k` raise BadSpec, because the API does not have them."""

    name: str
    model: str
    url: str
    sampling: SamplingParams
    seed_value: int | None = None
    first_wait_seconds: float = field(default=0.5, repr=False)

    @classmethod
    def of(cls, key: str, name: str, sampling: SamplingParams) -> Self:
        """Parses a key such as `openai://NAME@URL`. Raises BadSpec for an invalid one, SecretInURL for a password in
        it."""
        refuse_secrets(key)
        model, _, url = key.removeprefix(SCHEME).partition("@")
        url = url or os.environ.get("OPENAI_BASE_URL", "") or DEFAULT_URL
        refuse_secrets(url, "OPENAI_BASE_URL")
        if not model or not url.startswith(("http://", "https://")):
            raise BadSpec(f"{key!r} was given; expected openai://NAME, or openai://NAME@http(s)://host/v1")
        return cls(name, model, url.rstrip("/"), sampling)

    # -- sampling views ----------------------------------------------------------------------------------------

    def temperature(self, value: float) -> Self:
        return self._view(temperature=value)

    def top_p(self, value: float) -> Self:
        return self._view(top_p=value)

    def max_gen_len(self, tokens: int) -> Self:
        return self._view(max_new_tokens=tokens)

    def top_k(self, value: int) -> Self:
        raise BadSpec(f"top_k({value}): {self.name!r} is behind an OpenAI endpoint, whose API has none; use top_p")

    def min_gen_len(self, tokens: int) -> Self:
        raise BadSpec(f"min_gen_len({tokens}): {self.name!r} is behind an OpenAI endpoint, whose API has none")

    def stop(self, *strings: str) -> Self:
        return self._view(stop=strings)

    def seed(self, value: int) -> Self:
        """Returns a view that sends this seed. The endpoint may ignore it."""
        return self._with(seed_value=value % 2**31)

    def _view(self, **changes: Any) -> Self:
        return self._with(sampling=changed_sampling(self.sampling, changes))

    def _with(self, **changes: Any) -> Self:
        view = copy(self)
        for name, value in changes.items():
            object.__setattr__(view, name, value)
        return view

    # -- answers -----------------------------------------------------------------------------------------------

    @overload
    async def generate(self, thread: StringThread) -> StringThread: ...

    @overload
    async def generate(self, thread: StringThread, schema: type[Answer]) -> Answer: ...

    async def generate(self, thread: StringThread, schema: type[Answer] | None = None) -> StringThread | Answer:
        """Returns the thread with the answer appended.

        With a pydantic class as `schema`, returns the answer as an instance of it. The endpoint is asked for JSON of
        its schema, and asked once more if the answer does not fit.

        Raises MalformedAnswer, EngineUnreachable, EngineBusy, NotAuthenticated or BadSpec."""
        if schema is None:
            return await self._reply(thread, None)
        return await answer_repaired(lambda question: self._reply(question, schema), thread, schema)

    async def answer(self, thread: StringThread, schema: type[Answer]) -> Answer:
        """`generate(thread, schema)` without the second try."""
        return await answer_once(lambda question: self._reply(question, schema), thread, schema)

    async def _reply(self, thread: StringThread, schema: type[BaseModel] | None) -> StringThread:
        """The thread with the endpoint's answer appended."""
        # Only text can be sent.
        for index, turn in enumerate(thread.turns):
            if not isinstance(turn.content, str) and any(isinstance(part, ImageFragment) for part in turn.content):
                raise UnsupportedFragment(f"turn {index} holds an image; only text is sent to {self.url}: remove it")

        # Build the request.
        body: dict[str, Any] = {
            "model": self.model,
            "messages": thread.messages(),
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "max_tokens": self.sampling.max_new_tokens,
        }
        if thread.tools:
            body["tools"] = list(thread.tools)
        if self.sampling.stop:
            body["stop"] = list(self.sampling.stop)
        if self.seed_value is not None:
            body["seed"] = self.seed_value

        # Send it and read the answer.
        if schema is None:
            response = await self._post(body)
        else:
            response = await self._post_with_schema(body, schema)
        try:
            answer = response["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError) as error:
            raise BadSpec(f"{self.url} answered {str(response)[:200]}; expected an OpenAI chat completion") from error
        if answer is not None and not isinstance(answer, str):
            raise BadSpec(f"{self.url} answered with a {type(answer).__name__} as content; expected text")
        return thread.assistant(answer or "")

    async def _post_with_schema(self, body: dict[str, Any], schema: type[BaseModel]) -> Any:
        """Asks for JSON of the schema, and without a schema if the endpoint does not support that."""
        named = {"name": schema.__name__, "schema": schema.model_json_schema()}
        try:
            return await self._post(body | {"response_format": {"type": "json_schema", "json_schema": named}})
        except BadSpec:
            # Many endpoints do not support JSON schemas. Any other error of the request occurs again.
            return await self._post(body)

    async def _post(self, body: dict[str, Any]) -> Any:
        """Posts the request, with retries and growing waits while the endpoint is unreachable or busy."""
        wait, error = self.first_wait_seconds, None
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(min(wait, LONGEST_WAIT_SECONDS))
                wait *= 2
            try:
                return await self._post_once(body)
            except (EngineUnreachable, EngineBusy) as failed:
                error = failed
                wait = max(wait, getattr(failed, "retry_after", 0.0))
        assert error is not None
        raise error

    async def _post_once(self, body: dict[str, Any]) -> Any:
        # Read for each request, so that the key is never part of a handle, which may be serialised.
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            async with httpx.AsyncClient(timeout=TIMEOUT_SECONDS) as client:
                reply = await post_json(client, f"{self.url}/chat/completions", body, headers)
        except UnusableReply as error:
            raise MalformedAnswer("", f"{self.url} {error}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EngineUnreachable(f"{self.url} gave no answer ({type(error).__name__}: {error})") from error
        if reply.status != HTTPStatus.OK:
            raise _refusal(self.url, reply)
        try:
            return reply.json()
        except UnusableReply as error:
            raise EngineUnreachable(f"{self.url} {error}") from error


def _refusal(url: str, reply: Reply) -> EngineError:
    """The error for a reply that is not 200."""
    status, text = reply.status, reply.text
    if status in (401, 403):
        return NotAuthenticated(f"{url} answered {status}: set OPENAI_API_KEY to a key that it takes. {text}")
    if status in (408, 409, 429) or status >= 500:
        # The header may also be a date, which is not used.
        busy = EngineBusy(f"{url} answered {status}: {text}")
        retry_after = reply.headers.get("retry-after", "")
        busy.retry_after = float(retry_after) if retry_after.isdecimal() else 0.0  # type: ignore[attr-defined]
        return busy
    return BadSpec(f"{url} refused the request with {status}: {text}")


class UnusableReply(ValueError):
    """Raised for a reply that is too large, compressed or not JSON. The message does not name the server."""


@dataclass(frozen=True)
class Reply:
    """A reply that was read whole."""

    status: int
    headers: httpx.Headers
    body: bytes

    @property
    def text(self) -> str:
        """The first characters of the body, for messages. The server's charset is not used: it may name any codec."""
        return self.body[:1200].decode("utf-8", "replace")[:300]

    def json(self) -> Any:
        """The parsed body. Raises UnusableReply."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise UnusableReply(f"did not answer with JSON: {self.text[:200]!r}") from error


async def post_json(
    client: httpx.AsyncClient, url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Reply:
    """Posts `body` as JSON. Raises UnusableReply for a reply that is too large, and the errors of httpx."""
    # a compressed reply could be any number of times larger than what is transferred
    asked = {"Accept-Encoding": "identity", **(headers or {})}
    async with client.stream("POST", url, json=dict(body), headers=asked) as response:
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise UnusableReply(f"answered in the encoding {encoding[:20]!r}, which was not asked for")
        received = bytearray()
        async for block in response.aiter_bytes():
            received += block
            if len(received) > MAX_REPLY_BYTES:
                raise UnusableReply(f"answered with more than {MAX_REPLY_BYTES >> 20} MiB; expected a short answer")
        return Reply(response.status_code, response.headers, bytes(received))
