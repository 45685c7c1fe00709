"""OpenAI's `/v1/models`, `/v1/chat/completions` and `/v1/completions`, for the current policy of a run in training.

    client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key=token)
    client.chat.completions.create(model="my-run", messages=[{"role": "user", "content": "What is 2+3?"}])

engine.http.openai.policies describes the names that `model` accepts. A chat is rendered with the registered model's own
template. Every response names its policy (body field `policy`, header `x-ostinato-policy`), so that a rollout that is
collected this way can be traced. Requests read in the epoch of the run's lease and do not change the run.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from engine.errors import EngineError, Fenced, SampleTooLong
from engine.http.openai.models import (
    MOST_ANSWERS,
    ApiError,
    ChatRequest,
    CompletionResponse,
    ModelCard,
    ModelList,
    OpenAIErrorBody,
    TextRequest,
    as_api_error,
)
from engine.http.openai.policies import RECENT_SECONDS, PolicyResolver, ResolvedPolicy
from engine.http.openai.responses import (
    ChatResponseBuilder,
    ClientDisconnected,
    Delta,
    Generation,
    ResponseBuilder,
    TextResponseBuilder,
    cancel_on_disconnect,
    is_scoring,
)
from engine.models.samples import FloatArray, as_token_ids
from engine.protocol import Engine, GenerateRequest, LogprobsRequest, SamplingParams, TokenSequence
from engine.text.answer_builder import AnswerBuilder
from engine.text.forced_calls import ForcedCall, forced_call
from engine.text.stored_models import renderer_of, tokenizer_of
from engine.text.tokenizers import Tokenizer
from engine.workspace import derive_seed
from storage.errors import StorageError
from storage.store.objects import ObjectStore

CHAT_TOKENS = 1024
"""Longest chat answer in tokens when the client sets no limit. The model's context may leave less."""
TEXT_TOKENS = 16
"""Longest text completion in tokens when the client sets no limit. It is OpenAI's default."""
LONGEST_TOKEN = 256
"""Most characters of a token in the usual vocabularies. A text that is far too long for the context is refused before
it is encoded, which could take a minute."""
POLICY_HEADER = "x-ostinato-policy"
CLIENT_DISCONNECTED = 499
"""Status for the log. The client, which has disconnected, does not get it."""


def openai_router(engine: Engine, store: ObjectStore, *, recent_seconds: float = RECENT_SECONDS) -> APIRouter:
    """Returns the routes of a FastAPI app over `engine`. `store` is the engine's store.

    Heads and epochs that are read from the store are used for `recent_seconds`.
    """
    # what all routes share
    policies = PolicyResolver(engine, store, recent_seconds=recent_seconds)
    refusals: dict[int | str, dict[str, Any]] = {status: {"model": OpenAIErrorBody} for status in ("4XX", "5XX")}
    events = {"text/event-stream": {"schema": {"type": "string"}}}
    streamed: dict[int | str, dict[str, Any]] = {200: {"content": events}}
    router = APIRouter(prefix="/v1", tags=["openai"], route_class=OpenAIRoute, responses=refusals)

    # runs and registered models
    @router.get("/models")
    async def models() -> ModelList:
        """Lists every run with a policy and every registered model."""
        return ModelList(data=await policies.listing())

    @router.get("/models/{model:path}")
    async def model(model: str) -> ModelCard:
        """Describes a run or a registered model, with the policy that would answer now."""
        return await policies.card(model)

    # answers
    @router.post("/chat/completions", response_model=CompletionResponse, responses=streamed)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Returns one or more answers to a conversation."""
        return await _answer(engine, store, policies, body, request)

    @router.post("/completions", response_model=CompletionResponse, responses=streamed)
    async def completions(body: TextRequest, request: Request) -> Response:
        """Returns one or more continuations of each prompt."""
        return await _answer(engine, store, policies, body, request)

    return router


class OpenAIRoute(APIRoute):
    """Sends errors in OpenAI's format, independent of the error handlers of the app."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except ClientDisconnected:
                return Response(status_code=CLIENT_DISCONNECTED)
            except HTTPException as error:
                # FastAPI raises status 400 for a body that is not JSON. Other statuses are the app's.
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
    engine: Engine, store: ObjectStore, policies: PolicyResolver, body: ChatRequest | TextRequest, request: Request
) -> Response:
    # Rendering and tokenising a long prompt takes seconds, so it runs in a thread.
    resolved = await policies.resolve(body.model)
    builder, answers, generation = await asyncio.to_thread(_prepare, engine, store, policies, body, resolved)
    headers = {POLICY_HEADER: resolved.policy.uri}
    if isinstance(builder, TextResponseBuilder) and builder.scores_prompts:
        builder.prompt_scores = await cancel_on_disconnect(request, _score_prompts(engine, policies, builder))
    if generation is None:
        return JSONResponse(builder.full_response(answers), headers=headers)
    if not body.stream:
        await cancel_on_disconnect(request, _run_to_end(generation))
        return JSONResponse(builder.full_response(answers), headers=headers)
    deltas = generation.deltas()
    # The stream begins with the first token, so that an error before it can still change the status.
    first = await cancel_on_disconnect(request, anext(deltas, None))
    return _EventStream(generation, events_of(builder, generation.answers, first, deltas), headers)


def _prepare(
    engine: Engine,
    store: ObjectStore,
    policies: PolicyResolver,
    body: ChatRequest | TextRequest,
    resolved: ResolvedPolicy,
) -> tuple[ResponseBuilder, list[AnswerBuilder], Generation | None]:
    """Renders and tokenises the prompts. The first request for a model also downloads its tokenizer. The generation
    is None if nothing is to be sampled."""
    # the prompts
    check_length(body, resolved)
    forced = ForcedCall("", None)
    builder: ResponseBuilder
    if isinstance(body, ChatRequest):
        renderer = renderer_of(store, resolved.base)
        tokenizer, default = renderer.tokenizer, CHAT_TOKENS
        forced = _forced_call(body, tokenizer)
        prompts = [renderer.prompt_ids(body.thread) + tokenizer.encode(forced.prefix)]
        builder = ChatResponseBuilder(body, resolved, prompts, tokenizer.tool_format, forced.prefix)
    else:
        _check_echo(body)
        tokenizer, default = tokenizer_of(store, resolved.base), TEXT_TOKENS
        prompts = _text_prompt_ids(body, tokenizer)
        if body.echo and not all(prompts):
            raise ApiError(400, "echo=true needs prompts of at least one token", param="prompt")
        builder = TextResponseBuilder(body, resolved, prompts, tokenizer)

    # the sampling options
    count = body.n or 1
    if len(prompts) * count > MOST_ANSWERS:
        raise ApiError(400, f"{len(prompts)} prompts with n={count}: give at most {MOST_ANSWERS} answers", param="n")
    if body.limit == 0:
        return builder, [_ended(AnswerBuilder(tokenizer)) for _ in range(len(prompts) * count)], None
    longest_prompt = max(len(prompt) for prompt in prompts)
    sampling = _sampling(body, _limit(body, resolved, longest_prompt, default), forced.json_schema)

    # each prompt once per answer, with a seed of its own
    seed = secrets.randbits(62) if body.seed is None else body.seed
    repeated_prompts: list[list[int]] = []
    seeds: list[int] = []
    for index, prompt in enumerate(prompts):
        repeated_prompts += [prompt] * count
        seeds += [derive_seed(seed, index, number) for number in range(count)]
    request = GenerateRequest(resolved.policy, repeated_prompts, seeds, sampling)

    reads_calls = isinstance(body, ChatRequest) and body.reads_calls
    answers = [
        AnswerBuilder(tokenizer, stop=body.stops, min_tokens=sampling.min_new_tokens, with_calls=reads_calls)
        for _ in repeated_prompts
    ]
    generation = Generation(
        engine,
        request,
        answers,
        lambda refresh: policies.epoch(resolved.policy.run, refresh=refresh),
        stream_tokens=bool(body.stream),
    )
    return builder, answers, generation


def _ended(answer: AnswerBuilder) -> AnswerBuilder:
    """The answer of which no token is sampled."""
    answer.close("length")
    return answer


def _check_echo(body: TextRequest) -> None:
    """Raises ApiError for options that need `echo`, or that it does not go with."""
    if body.echo and body.stream:
        raise ApiError(400, "echo=true is not available in a stream: give stream=false", param="echo")
    if not body.echo and body.logprobs:
        problem = f"logprobs={body.logprobs}: without echo, only the logprobs of the sampled tokens are available"
        raise ApiError(400, f"{problem}; give logprobs=0, or echo=true", param="logprobs")
    if body.max_tokens == 0 and not (body.echo and body.wants_logprobs):
        problem = "max_tokens=0 samples nothing"
        raise ApiError(400, f"{problem}: give at least 1, or echo=true and logprobs", param="max_tokens")


async def _score_prompts(
    engine: Engine, policies: PolicyResolver, builder: TextResponseBuilder
) -> list[FloatArray]:
    """TextResponseBuilder.prompt_scores."""
    if not is_scoring(engine):
        raise ApiError(400, "this engine gives no logprobs of prompts: leave echo or logprobs out", param="echo")
    policy, top = builder.served_policy.policy, builder.request.logprobs or 0
    prompts = [as_token_ids(prompt, "a prompt") for prompt in builder.prompts]
    sequences = [TokenSequence(prompt, np.arange(len(prompt)) > 0) for prompt in prompts]
    request = LogprobsRequest(policy, [sequence for sequence in sequences if sequence.trained])

    async def score(*, refresh: bool) -> list[FloatArray]:
        epoch = await policies.epoch(policy.run, refresh=refresh)
        scores = [np.array(row)[:, None] for row in await engine.logprobs(request, epoch=epoch)]
        if not top:
            return scores
        highest = await engine.top_logprobs(request, top=top, epoch=epoch)
        pairs = zip(scores, highest, strict=True)
        return [np.hstack([score_n1, top_nK2[..., 1], top_nK2[..., 0]]) for score_n1, top_nK2 in pairs]

    try:
        rows = await score(refresh=False) if request.sequences else []
    except Fenced:  # the known epoch may be up to a second old
        rows = await score(refresh=True)
    following = iter(rows)
    return [next(following) if sequence.trained else np.zeros((0, 1 + 2 * top)) for sequence in sequences]


def _forced_call(body: ChatRequest, tokenizer: Tokenizer) -> ForcedCall:
    if not body.forced_tools:
        return ForcedCall("", None)
    try:
        return forced_call(tokenizer.tool_format, body.forced_tools)
    except ValueError as error:
        raise ApiError(400, f"tool_choice: {error}", param="tool_choice", code="invalid_value") from error


def _text_prompt_ids(body: TextRequest, tokenizer: Tokenizer) -> list[list[int]]:
    """Returns the token ids of each prompt. A prompt of token ids is used as it is."""
    prompts: list[list[int]] = []
    for prompt in body.prompts:
        prompts.append(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
    return prompts


def check_length(body: ChatRequest | TextRequest, resolved: ResolvedPolicy) -> None:
    """Raises SampleTooLong for a text that is too long for the model's context with any tokenizer."""
    if isinstance(body, ChatRequest):
        longest = sum(message.length for message in body.messages)
        longest += sum(len(tool.model_dump_json()) for tool in body.tools or ())
    else:
        longest = max(len(prompt) for prompt in body.prompts)
    if resolved.context is not None and longest > LONGEST_TOKEN * resolved.context:
        raise SampleTooLong(
            f"the prompt has {longest} characters or ids, far more than the context of {resolved.context} tokens can "
            "hold; truncate it"
        )


def _limit(body: ChatRequest | TextRequest, resolved: ResolvedPolicy, longest_prompt: int, default: int) -> int:
    """Returns the largest number of sampled tokens: the client's limit, or as much as the context leaves."""
    if body.limit is not None:
        return body.limit
    limit = max(default, body.min_tokens or 0)
    if resolved.context is None:
        return limit
    # A prompt that fills the context leaves nothing. The engine then raises SampleTooLong, which names the lengths.
    return max(1, min(limit, resolved.context - longest_prompt))


def _sampling(body: ChatRequest | TextRequest, limit: int, json_schema: str | None) -> SamplingParams:
    if (body.min_tokens or 0) > limit:
        problem = f"min_tokens={body.min_tokens} is more than the limit of {limit} tokens"
        raise ApiError(400, f"{problem}; lower it or raise max_tokens", param="min_tokens")
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or 0,
        max_new_tokens=limit,
        min_new_tokens=body.min_tokens or 0,
        stop=tuple(body.stops),
        json_schema=json_schema,
    )


async def _run_to_end(generation: Generation) -> None:
    async with aclosing(generation.deltas()) as deltas:
        async for _ in deltas:
            pass


class _EventStream(StreamingResponse):
    """A response of server-sent events that stops the generation when the response ends for any reason."""

    def __init__(self, generation: Generation, events: AsyncIterator[str], headers: dict[str, str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store", **headers})
        self.generation = generation

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # A client that disconnects must not keep the engine busy with tokens that it does not get.
            self.generation.stop()


async def events_of(
    builder: ResponseBuilder, answers: Sequence[AnswerBuilder], first: Delta | None, deltas: AsyncIterator[Delta]
) -> AsyncIterator[str]:
    """Yields the server-sent events of one response. An error after the first token becomes an event."""
    # the role of the answers
    first_chunk = builder.first_chunk(len(answers))
    if first_chunk:
        yield _event(first_chunk)

    # their text
    delta = first
    try:
        while delta is not None:
            chunk = builder.delta_chunk(delta, answers[delta.index])
            if chunk:
                yield _event(chunk)
            delta = await anext(deltas, None)
    except (EngineError, StorageError) as error:
        refusal = as_api_error(error)
        assert refusal is not None  # as_api_error knows both classes
        yield _event(refusal.body())
        return

    # their ends
    for index, answer in enumerate(answers):
        for chunk in builder.finish_chunks(index, answer):
            yield _event(chunk)
    if builder.request.wants_usage:
        yield _event(builder.usage_chunk(answers))
    yield "data: [DONE]\n\n"


def _event(body: Any) -> str:
    # ASCII only, since some clients split lines at every character that is a line end in Unicode
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"
