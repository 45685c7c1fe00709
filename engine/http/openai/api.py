"""OpenAI's `/v1/models`, `/v1/chat/completions` and `/v1/completions` for the current policy of a run in training.

    client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key=token)
    client.chat.completions.create(model="my-run", messages=[{"role": "user", "content": "What is 2+3?"}])

`model` is read as engine.http.openai.policies says. Chat is rendered by the registered model's own template; every
answer names the policy it came from (body field `policy`, header `x-ostinato-policy`), so that a rollout collected
this way can be traced. Readers act in the epoch of the run's lease and change nothing of the run.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from engine.errors import EngineError, SampleTooLong
from engine.http.openai.answers import Answer, stop_token_ids
from engine.http.openai.calls import Call, ClientGone, Delta, unless_gone
from engine.http.openai.models import (
    MOST_ANSWERS,
    ApiError,
    ChatRequest,
    Completed,
    ModelCard,
    ModelList,
    OpenAIErrorBody,
    TextRequest,
    as_api_error,
)
from engine.http.openai.policies import RECENT_SECONDS, Found, Policies
from engine.http.openai.shapes import Form
from engine.protocol import Engine, GenerateRequest, SamplingParams
from engine.text.stored_models import renderer_of, tokenizer_of
from engine.text.threads import StringThread
from engine.text.tokenizers import Tokenizer
from engine.workspace import derive_seed
from storage.errors import StorageError
from storage.store.objects import ObjectStore

CHAT_TOKENS = 1024
"""Longest chat answer when the client sets no limit (or what the model's context leaves, if that is less)."""
TEXT_TOKENS = 16
"""The same for text completions; OpenAI's own default."""
LONGEST_TOKEN = 256
"""Characters: no usual vocabulary has a longer token. Encoding a text that is far too long would take a minute."""
POLICY_HEADER = "x-ostinato-policy"
CLIENT_GONE = 499


def openai_router(engine: Engine, store: ObjectStore, *, recent_seconds: float = RECENT_SECONDS) -> APIRouter:
    """The routes, for a FastAPI app that is served over `engine`. `store` is the one the engine works on.

    Heads and epochs read from the store are believed for `recent_seconds`.
    """
    policies = Policies(engine, store, recent_seconds=recent_seconds)
    refusals: dict[int | str, dict[str, Any]] = {status: {"model": OpenAIErrorBody} for status in ("4XX", "5XX")}
    events = {"text/event-stream": {"schema": {"type": "string"}}}
    streamed: dict[int | str, dict[str, Any]] = {200: {"content": events}}
    router = APIRouter(prefix="/v1", tags=["openai"], route_class=_Route, responses=refusals)

    @router.get("/models")
    async def models() -> ModelList:
        """Every run with a policy and every registered model."""
        return ModelList(data=await policies.listing())

    @router.get("/models/{model:path}")
    async def model(model: str) -> ModelCard:
        """One of them, with the policy that answers now."""
        return await policies.card(model)

    @router.post("/chat/completions", response_model=Completed, responses=streamed)
    async def chat_completions(given: ChatRequest, request: Request) -> Response:
        """One or more answers to a conversation."""
        return await _answer(engine, store, policies, given, request)

    @router.post("/completions", response_model=Completed, responses=streamed)
    async def completions(given: TextRequest, request: Request) -> Response:
        """One or more continuations of each prompt."""
        return await _answer(engine, store, policies, given, request)

    return router


class _Route(APIRoute):
    """Gives errors in OpenAI's shape, whatever the app around it does with its own."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except ClientGone:
                return Response(status_code=CLIENT_GONE)
            except HTTPException as error:
                if error.status_code != 400:
                    raise
                return ApiError(400, str(error.detail), code="invalid_body").response()
            except (ApiError, RequestValidationError, EngineError, StorageError) as error:
                refusal = as_api_error(error)
                if refusal is None:
                    raise
                return refusal.response()

        return handled


async def _answer(
    engine: Engine, store: ObjectStore, policies: Policies, given: ChatRequest | TextRequest, request: Request
) -> Response:
    found = await policies.find(given.model)
    form, call = await asyncio.to_thread(_prepare, engine, store, policies, given, found)
    headers = {POLICY_HEADER: found.policy.uri}
    if not given.stream:
        await unless_gone(request, _finished(call))
        return JSONResponse(form.whole(call.answers), headers=headers)
    deltas = call.deltas()
    # what is refused is refused by status, so the stream begins with the first token
    first = await unless_gone(request, anext(deltas, None))
    return _EventStream(call, _events(form, call, first, deltas), headers)


def _prepare(
    engine: Engine, store: ObjectStore, policies: Policies, given: ChatRequest | TextRequest, found: Found
) -> tuple[Form, Call]:
    """Renders and tokenises; the first request of a model also downloads its tokenizer."""
    _check_length(given, found)
    if isinstance(given, ChatRequest):
        renderer = renderer_of(store, found.base)
        tokenizer, default = renderer.tokenizer, CHAT_TOKENS
        prompts = [renderer.prompt_ids(StringThread(turns=[message.turn for message in given.messages]))]
    else:
        tokenizer, default = tokenizer_of(store, found.base), TEXT_TOKENS
        prompts = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in given.prompts]
    count = given.n or 1
    if len(prompts) * count > MOST_ANSWERS:
        raise ApiError(400, f"{len(prompts)} prompts with n={count}: give at most {MOST_ANSWERS} answers", param="n")
    sampling = _sampling(given, tokenizer, _limit(given, found, max(map(len, prompts)), default))
    seed = secrets.randbits(62) if given.seed is None else given.seed
    body = GenerateRequest(
        found.policy,
        [prompt for prompt in prompts for _ in range(count)],
        [derive_seed(seed, at, number) for at in range(len(prompts)) for number in range(count)],
        sampling,
    )
    answers = [Answer(tokenizer, stop=given.stops, min_tokens=sampling.min_new_tokens) for _ in body.prompts]
    listens = bool(given.stream) or len(set(given.stops)) > len(sampling.stop_token_ids)
    call = Call(engine, body, answers, lambda ask: policies.epoch(found.policy.run, ask=ask), listens=listens)
    return Form(given, found, prompts), call


def _check_length(given: ChatRequest | TextRequest, found: Found) -> None:
    """Raises SampleTooLong for a text that no tokenizer fits into the model's context."""
    if isinstance(given, ChatRequest):
        longest = sum(len(message.turn[1]) for message in given.messages)
    else:
        longest = max(map(len, given.prompts))
    if found.context is not None and longest > LONGEST_TOKEN * found.context:
        raise SampleTooLong(
            f"the prompt has {longest} characters or ids, far more than the context of {found.context} tokens can "
            "hold; truncate it"
        )


def _limit(given: ChatRequest | TextRequest, found: Found, longest_prompt: int, default: int) -> int:
    if given.limit is not None:
        return given.limit
    wanted = max(default, given.min_tokens or 0)
    return wanted if found.context is None else max(1, min(wanted, found.context - longest_prompt))


def _sampling(given: ChatRequest | TextRequest, tokenizer: Tokenizer, limit: int) -> SamplingParams:
    if (given.min_tokens or 0) > limit:
        given_is = f"min_tokens={given.min_tokens} is more than the limit of {limit} tokens"
        raise ApiError(400, f"{given_is}; lower it or raise max_tokens", param="min_tokens")
    return SamplingParams(
        temperature=1.0 if given.temperature is None else given.temperature,
        top_p=1.0 if given.top_p is None else given.top_p,
        top_k=given.top_k or 0,
        max_new_tokens=limit,
        min_new_tokens=given.min_tokens or 0,
        stop_token_ids=stop_token_ids(tokenizer, given.stops),
    )


async def _finished(call: Call) -> None:
    async with aclosing(call.deltas()) as deltas:
        async for _ in deltas:
            pass


class _EventStream(StreamingResponse):
    """Ends the engine's call with the response, however that ends."""

    def __init__(self, call: Call, events: AsyncIterator[str], headers: dict[str, str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store", **headers})
        self.call = call

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.call.stop()


async def _events(
    form: Form, call: Call, first: Delta | None, deltas: AsyncIterator[Delta]
) -> AsyncIterator[str]:
    """Server-sent events of one answer. An error after the first token can only be said in the stream."""
    answers = call.answers
    if opening := form.opening(len(answers)):
        yield _event(opening)
    delta = first
    try:
        while delta is not None:
            if piece := form.piece(delta, answers[delta.index]):
                yield _event(piece)
            delta = await anext(deltas, None)
    except (EngineError, StorageError) as error:
        refusal = as_api_error(error)
        assert refusal is not None  # both kinds have a meaning
        yield _event(refusal.body())
        return
    for index, answer in enumerate(answers):
        yield _event(form.ending(index, answer))
    if form.request.wants_usage:
        yield _event(form.totals(answers))
    yield "data: [DONE]\n\n"


def _event(body: Any) -> str:
    # in ASCII: some clients split lines at every character that Unicode calls a line end
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"
