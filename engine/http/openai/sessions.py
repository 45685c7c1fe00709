"""`/v1/sessions/ID`: OpenAI's routes for one agent in training, whose calls are recorded as they were sampled.

    client = openai.OpenAI(base_url=session_url, api_key="unused")
    client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "What is 2+3?"}])

A session is one attempt of an agent at one task. The policy, the temperature, top_p and top_k are the run's, whatever
the agent asks for: training accounts for the distribution that was sampled from. The agent may lower max_tokens and add
stop strings. `model`, `seed` and `min_tokens` have no effect.

The calls of a session form a tree. A call whose messages begin with those of an earlier call and its answer continues
the ids of that call, so that what was sampled is never tokenised again. A call that rewrites the earlier conversation
begins another sequence, and so does each further call that continues the same answer.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import JsonValue

from engine.errors import BadSpec, OutOfMemory, SampleTooLong, TextError
from engine.http.guard import MAX_JSON_BYTES
from engine.http.lifecycle import Binding, EngineServer
from engine.http.openai.api import POLICY_HEADER, OpenAIRoute, check_length, events_of
from engine.http.openai.models import (
    MOST_ANSWERS,
    ApiError,
    ChatMessage,
    ChatRequest,
    CompletionResponse,
    ModelCard,
    ModelList,
    TextRequest,
)
from engine.http.openai.policies import ResolvedPolicy
from engine.http.openai.responses import (
    ChatResponseBuilder,
    ClientDisconnected,
    Delta,
    ResponseBuilder,
    TextResponseBuilder,
    cancel_on_disconnect,
)
from engine.protocol import MOST_STOP_STRINGS, Completion, SamplingParams
from engine.text.answer_builder import AnswerBuilder
from engine.text.fragments import ToolCallFragment
from engine.text.rendering import Renderer
from engine.text.threads import StringThread, TokenizedThread, TokenizedTurn
from engine.text.turns import Turn, parse_turns
from storage.chain.records import PolicyRef
from storage.serialization import canonical_json, digest

RETRY_HEADER = "x-stainless-retry-count"
"""Header in which OpenAI's clients say how often they have sent a request before."""
_TEXT = "text"
"""Role of the only turn of a text completion's history, which is its prompt and its answer."""
History = tuple[tuple[str, Any], ...]
"""(role, text) of each message as the client has it."""
SessionLimit = Literal["turns", "tokens"]


class SampledAnswer(NamedTuple):
    """An answer, and the policies that sampled it: several if the weights changed at a token."""

    completion: Completion
    policies: list[PolicyRef]
    policy_tokens: list[int]
    """Number of tokens of each of these policies."""


class CallContent(NamedTuple):
    """What a call asks for."""

    prompt: list[int]
    sampling: SamplingParams

    @property
    def digest(self) -> str:
        return digest(canonical_json([self.prompt, self.sampling.model_dump(mode="json")]))


Answer = Callable[[CallContent, str, int], Awaitable[SampledAnswer]]
"""Returns the answer to a call. The other arguments are the digest of its content, and how many calls of the session
with the same content came before."""


@dataclass(frozen=True)
class SessionLimits:
    """The limits of one session."""

    calls: int
    """Largest number of answers."""
    tokens: int | None
    """Longest prompt and answer together, in tokens; None: no limit."""


@dataclass(frozen=True, eq=False)
class SessionCall:
    """An answered call."""

    content: str
    """Digest of what it asked for."""
    occurrence: int
    """Number of calls with the same content before it."""
    history: History
    """The messages and the answer, as the client has them."""
    tokenized: TokenizedThread
    """The prompt and the answer."""
    earlier: SessionCall | None
    """The call that it continues. None: it begins a conversation."""
    answer: SampledAnswer
    builder: AnswerBuilder
    """The answer as text."""

    @property
    def order(self) -> tuple[int, str, int]:
        """The place among the calls that continue the same answer. It does not depend on which came first, because
        that depends on time where an agent makes calls in parallel."""
        return len(self.history), self.content, self.occurrence


class SessionSegment(NamedTuple):
    """Calls that form one sequence of tokens. What was sampled by other calls is context."""

    tokenized: TokenizedThread
    calls: list[SessionCall]


class _Prompt(NamedTuple):
    tokenized: TokenizedThread
    history: History
    earlier: SessionCall | None


class Session:
    """One attempt of an agent. Its methods are called in one event loop."""

    def __init__(
        self,
        served: ResolvedPolicy,
        renderer: Renderer,
        sampling: SamplingParams,
        limits: SessionLimits,
        answer: Answer,
        *,
        metadata: dict[str, JsonValue],
    ) -> None:
        """`answer` samples an answer and keeps it. An error that it raises is kept in `failure`, unless the prompt is
        to blame. `metadata` is that of the recorded conversations."""
        self.id = secrets.token_urlsafe(24)
        self.served, self.renderer, self.sampling, self.limits = served, renderer, sampling, limits
        self.reward: JsonValue = None
        """What the agent posted last."""
        self.limit_reached: SessionLimit | None = None
        self.failure: Exception | None = None
        self.ended = False
        self._answer, self._metadata = answer, metadata
        self._calls: dict[tuple[str, int], SessionCall] = {}
        self._asked: Counter[str] = Counter()
        self._unanswered: dict[str, list[int]] = {}
        """Occurrences whose clients disconnected before they had an answer, by content."""
        self._in_flight: Counter[tuple[str, int]] = Counter()
        self._waiting = 0
        self._waiting_since = 0.0
        self._waited = 0.0

    @property
    def calls(self) -> list[SessionCall]:
        return list(self._calls.values())

    @property
    def seconds_waited(self) -> float:
        """Seconds in which at least one call waited for its answer."""
        return self._waited + (time.monotonic() - self._waiting_since if self._waiting else 0.0)

    # -- calls -------------------------------------------------------------------------------------------------

    async def respond(self, body: ChatRequest | TextRequest, request: Request) -> Response:
        """Answers a request. The answers are kept before the response begins, also if it is streamed."""
        _check_options(body)
        is_retry = request.headers.get(RETRY_HEADER, "0") not in ("", "0")
        try:
            check_length(body, self.served)
            with self._waits():
                calls = await cancel_on_disconnect(request, self._answers(body, is_retry))
        except SampleTooLong:
            self.limit_reached = "tokens"
            raise
        except (ApiError, TextError, BadSpec, OutOfMemory, ClientDisconnected):
            raise  # its prompt is to blame
        except Exception as error:
            # The agent cannot help it, and a defect must not look like a failure of the agent.
            self.failure = error
            raise
        # the response
        prompt_ids = [call.tokenized.token_ids[: -len(call.answer.completion.token_ids)] for call in calls]
        builder = self._response_builder(body, prompt_ids[:: body.n or 1])
        answers = [call.builder for call in calls]
        headers = {POLICY_HEADER: self.served.policy.uri}
        if not body.stream:
            return JSONResponse(builder.full_response(answers), headers=headers)
        events = events_of(builder, answers, _delta(0, answers[0]), _deltas(answers))
        headers["Cache-Control"] = "no-store"
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    async def _answers(self, body: ChatRequest | TextRequest, is_retry: bool) -> list[SessionCall]:
        """The answered calls of a request: `n` for each of its prompts."""
        # Rendering and tokenising a long prompt takes seconds, so it runs in a thread.
        prompts = await asyncio.to_thread(self._prompts, body, self.calls)
        count = body.n or 1
        if len(prompts) * count > MOST_ANSWERS:
            problem = f"{len(prompts)} prompts with n={count}: give at most {MOST_ANSWERS} answers"
            raise ApiError(400, problem, param="n")
        # A prompt that is too long is refused before any call counts.
        samplings = [self._sampling(body, len(prompt.tokenized)) for prompt in prompts]
        jobs: list[tuple[_Prompt, CallContent, str, int]] = []
        for prompt, sampling in zip(prompts, samplings, strict=True):
            content = CallContent(prompt.tokenized.token_ids, sampling)
            name = content.digest
            jobs += [(prompt, content, name, occurrence) for occurrence in self._claim(name, count, is_retry)]
        tasks = [asyncio.create_task(self._call(body, *job)) for job in jobs]
        try:
            return await asyncio.gather(*tasks)
        finally:
            # after a failure, no other answer is kept
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _claim(self, content: str, count: int, is_retry: bool) -> list[int]:
        """The occurrences of a content that a request asks for: those whose answer did not reach the client, those of
        the request that it repeats, or new ones. Raises ApiError at the limit."""
        unanswered = self._unanswered.pop(content, [])
        claimed = sorted(unanswered)[:count]
        if unanswered[count:]:
            self._unanswered[content] = sorted(unanswered)[count:]
        if is_retry and not claimed:
            asked = self._asked[content]
            claimed = list(range(max(0, asked - count), asked))
        new = count - len(claimed)
        if sum(self._asked.values()) + new > self.limits.calls:
            self.limit_reached = "turns"
            raise ApiError(
                400, f"the session has had {sum(self._asked.values())} answers of at most {self.limits.calls} "
                "(max_calls); end the episode", code="session_limit",
            )  # fmt: skip
        claimed += range(self._asked[content], self._asked[content] + new)
        self._asked[content] += new
        return claimed

    async def _call(
        self, body: ChatRequest | TextRequest, prompt: _Prompt, content: CallContent, name: str, occurrence: int
    ) -> SessionCall:
        """Answers one occurrence of a call, and keeps it for the session's sequences."""
        known = self._calls.get((name, occurrence))
        if known is not None:
            return known
        self._in_flight[name, occurrence] += 1
        try:
            answer = await self._answer(content, name, occurrence)
        except asyncio.CancelledError:
            # A client that repeats its request may do so before the end of the first one is known here.
            if self._in_flight[name, occurrence] == 1 and (name, occurrence) not in self._calls:
                self._unanswered.setdefault(name, []).append(occurrence)
            raise
        finally:
            self._in_flight[name, occurrence] -= 1
        if self.ended:
            raise ApiError(404, _unknown(self.id), code="session_not_found")
        sampling, completion = content.sampling, answer.completion
        builder = AnswerBuilder(
            self.renderer.tokenizer, stop=sampling.stop, min_tokens=sampling.min_new_tokens,
            with_calls=isinstance(body, ChatRequest) and body.reads_calls,
        )  # fmt: skip
        for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
            builder.feed(token, logprob)
        builder.close(completion.stop_reason)
        tokenized = self.renderer.with_completion(prompt.tokenized, completion.token_ids, completion.logprobs)
        history = self._with_answer(body, prompt, builder)
        call = SessionCall(name, occurrence, history, tokenized, prompt.earlier, answer, builder)
        # a repeated request may have been answered meanwhile, and continued
        return self._calls.setdefault((name, occurrence), call)

    @contextmanager
    def _waits(self) -> Iterator[None]:
        """Counts the time within as time in which the agent waits for the policy."""
        if not self._waiting:
            self._waiting_since = time.monotonic()
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._waited += time.monotonic() - self._waiting_since

    # -- prompts -----------------------------------------------------------------------------------------------

    def _sampling(self, body: ChatRequest | TextRequest, prompt_length: int) -> SamplingParams:
        """The run's sampling, with the agent's limit and stop strings. Raises SampleTooLong, ApiError."""
        limit = min(body.limit or self.sampling.max_new_tokens, self.sampling.max_new_tokens)
        if self.limits.tokens is not None:
            limit = min(limit, self.limits.tokens - prompt_length)
            if limit < 1:
                raise SampleTooLong(
                    f"the prompt has {prompt_length} tokens, and prompt and answer may have {self.limits.tokens} "
                    "(max_tokens, the model's context or max_batch_size); shorten the conversation"
                )
        stop = tuple(dict.fromkeys((*self.sampling.stop, *body.stops)))
        if len(stop) > MOST_STOP_STRINGS:
            raise ApiError(
                400, f"{len(stop)} stop strings with the {len(self.sampling.stop)} of the run; give at most "
                f"{MOST_STOP_STRINGS} in all", param="stop",
            )  # fmt: skip
        least = min(self.sampling.min_new_tokens, limit)
        changes = {"max_new_tokens": limit, "min_new_tokens": least, "stop": stop}
        return SamplingParams.model_validate(dict(self.sampling) | changes)

    def _prompts(self, body: ChatRequest | TextRequest, calls: Sequence[SessionCall]) -> list[_Prompt]:
        # The longest conversation first: it leaves the fewest turns to tokenise.
        known = sorted(calls, key=lambda call: (-len(call.tokenized), call.order))
        if isinstance(body, ChatRequest):
            return [self._chat_prompt(body.thread, known)]
        return [self._text_prompt(prompt, known) for prompt in body.prompts]

    def _chat_prompt(self, thread: StringThread, known: Iterable[SessionCall]) -> _Prompt:
        """Continues the longest earlier conversation with which the thread begins, or begins another one."""
        history = tuple(_without_call_ids(turn) for turn in thread.turns)
        for call in known:
            length = len(call.history)
            if length < len(history) and history[:length] == call.history and call.tokenized.tools == thread.tools:
                extended = self.renderer.extended(call.tokenized, thread.turns[length:])
                if extended is not None:
                    return _Prompt(extended, history, call)
        prompt = self.renderer.prompt(StringThread(thread.turns, self._metadata, tools=thread.tools))
        return _Prompt(prompt, history, None)

    def _text_prompt(self, prompt: str | list[int], known: Iterable[SessionCall]) -> _Prompt:
        """As `_chat_prompt`, for a text without turns or for token ids."""
        tokenizer = self.renderer.tokenizer
        text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
        history: History = ((_TEXT, text),)
        for call in known:
            ids = call.tokenized.token_ids
            if call.history[0][0] != _TEXT:
                continue
            if isinstance(prompt, list):
                rest = prompt[len(ids) :] if prompt[: len(ids)] == ids else []
                rest_text = tokenizer.decode(rest)
            else:
                # The text has neither the token nor the stop string that ended the answer, so such an answer is not
                # continued.
                begins = text.startswith(call.history[0][1]) and call.answer.completion.stop_reason == "length"
                rest_text = text[len(call.history[0][1]) :] if begins else ""
                rest = tokenizer.encode(rest_text)
            if rest:
                return _Prompt(_with_text(call.tokenized, rest, rest_text), history, call)
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            raise ApiError(400, "the prompt is empty; give text or token ids", param="prompt", code="invalid_prompt")
        return _Prompt(_with_text(TokenizedThread((), self._metadata), ids, text), history, None)

    # -- answers -----------------------------------------------------------------------------------------------

    def _response_builder(self, body: ChatRequest | TextRequest, prompts: Sequence[list[int]]) -> ResponseBuilder:
        tokenizer = self.renderer.tokenizer
        if isinstance(body, ChatRequest):
            return ChatResponseBuilder(body, self.served, prompts, tokenizer.tool_format)
        return TextResponseBuilder(body, self.served, prompts, tokenizer)

    def _with_answer(self, body: ChatRequest | TextRequest, prompt: _Prompt, answer: AnswerBuilder) -> History:
        """The history with the answer, as the client sends it back."""
        if isinstance(body, TextRequest):
            return ((_TEXT, prompt.history[0][1] + answer.text),)
        (choice,) = self._response_builder(body, [prompt.tokenized.token_ids]).full_response([answer])["choices"]
        message = {"role": "assistant", "content": choice["message"]["content"]}
        if choice["message"].get("tool_calls"):
            message["tool_calls"] = choice["message"]["tool_calls"]
        (turn,) = parse_turns([ChatMessage.model_validate(message).turn])
        return (*prompt.history, _without_call_ids(turn))

    # -- sequences ---------------------------------------------------------------------------------------------

    def segments(self) -> list[SessionSegment]:
        """The sequences of tokens of all calls: each sampled token is trained in one of them. A call whose answer
        several calls continue is trained in the sequence of the first, and is context in those of the others."""
        children: dict[SessionCall | None, list[SessionCall]] = {}
        for call in sorted(self.calls, key=lambda call: call.order):
            children.setdefault(call.earlier, []).append(call)
        segments = []
        # The beginnings of the sequences. The next one is the last of the list.
        beginnings = children.get(None, [])[::-1]
        while beginnings:
            calls = [beginnings.pop()]
            forks: list[SessionCall] = []
            while following := children.get(calls[-1]):
                calls.append(following[0])
                forks += following[1:]
            beginnings += forks[::-1]
            context = len(calls[0].tokenized.turns) - 1
            segments.append(SessionSegment(calls[-1].tokenized.with_context(context), calls))
        return segments


def _check_options(body: ChatRequest | TextRequest) -> None:
    """Raises ApiError for a forced call, whose tokens would not be samples of the policy alone, and for options of
    prompts."""
    if isinstance(body, ChatRequest):
        if body.forced_tools:
            raise ApiError(400, "a session samples without constraints: give tool_choice 'auto'", param="tool_choice")
        return
    for name, value, advice in (
        ("echo", body.echo, "leave it out"), ("logprobs", body.logprobs, "give 0"),
        ("max_tokens", body.limit == 0, "give at least 1"),
    ):  # fmt: skip
        if value:
            raise ApiError(400, f"a session scores no prompts, which {name} is for: {advice}", param=name)


def _without_call_ids(turn: Turn) -> Turn:
    """The turn as it is compared: a client may send a call back with another id."""
    if isinstance(turn.content, str):
        return turn
    parts = []
    for part in turn.content:
        parts.append(part.model_copy(update={"id": ""}) if isinstance(part, ToolCallFragment) else part)
    return Turn(turn.role, tuple(parts))


def _with_text(before: TokenizedThread, ids: Sequence[int], text: str) -> TokenizedThread:
    """Returns the thread with a text as a user's turn without a template, and an open turn."""
    turn = TokenizedTurn("user", tuple(ids), (0.0,) * len(ids), content=text)
    return replace(before, turns=(*before.turns, turn, TokenizedTurn("assistant", (), (), logprobs=())))


def _delta(index: int, answer: AnswerBuilder) -> Delta:
    return Delta(index, len(answer.tokens), answer.text)


async def _deltas(answers: Sequence[AnswerBuilder]) -> AsyncIterator[Delta]:
    """The additions after the first one: each answer comes whole."""
    for index in range(1, len(answers)):
        yield _delta(index, answers[index])


def reward_of(value: Any) -> float | list[float] | None:
    """The reward in a JSON value: a number, a list of numbers, or an object with one of them as `reward`. None if the
    value is none of these."""
    if isinstance(value, dict) and "reward" in value:
        value = value["reward"]
    parts = value if isinstance(value, list) else [value]
    for part in parts:
        if not isinstance(part, int | float) or isinstance(part, bool):
            return None
    return value if parts else None  # type: ignore[no-any-return]


def _unknown(id: str) -> str:
    return f"there is no session {id[:60]!r}: it never began, or it has ended"


# -- the server ----------------------------------------------------------------------------------------------


class _LimitedRequest(Request):
    """A request whose body may not be larger than MAX_JSON_BYTES."""

    async def stream(self) -> AsyncIterator[bytes]:  # type: ignore[override]
        size = 0
        async for chunk in super().stream():
            size += len(chunk)
            if size > MAX_JSON_BYTES:
                message = f"the body exceeds {MAX_JSON_BYTES} bytes; send less at once"
                raise ApiError(413, message, code="body_too_large")
            yield chunk


class _SessionRoute(OpenAIRoute):
    """Reads the whole body within its bound before it is parsed."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            limited = _LimitedRequest(request.scope, request.receive)
            try:
                await limited.body()
            except ApiError as error:
                return error.response()
            return await handle(limited)

        return handled


class SessionServer:
    """Serves the sessions of one task at a port of this machine."""

    def __init__(self) -> None:
        self.address = ""
        """http://host:port"""
        self._sessions: dict[str, Session] = {}

    @contextmanager
    def opened(self, session: Session) -> Iterator[str]:
        """Serves the session within the block. Returns the base URL for its agent."""
        self._sessions[session.id] = session
        try:
            yield f"{self.address}/v1/sessions/{session.id}"
        finally:
            session.ended = True
            del self._sessions[session.id]

    def find(self, id: str) -> Session:
        """Raises ApiError for an unknown session and for one that has ended."""
        if id not in self._sessions:
            raise ApiError(404, _unknown(id), code="session_not_found")
        return self._sessions[id]


def session_router(server: SessionServer) -> APIRouter:
    """Returns the routes of the sessions of a server."""
    router = APIRouter(prefix="/v1/sessions/{session}", tags=["sessions"], route_class=_SessionRoute)

    @router.get("/models")
    async def models(session: str) -> ModelList:
        """Lists the policy of the session."""
        policy = server.find(session).served.policy
        return ModelList(data=[ModelCard(id=policy.full_name, created=0, owned_by="run", policy=policy)])

    @router.post("/chat/completions", response_model=CompletionResponse)
    async def chat_completions(session: str, body: ChatRequest, request: Request) -> Response:
        """Returns one or more answers to a conversation."""
        return await server.find(session).respond(body, request)

    @router.post("/completions", response_model=CompletionResponse)
    async def completions(session: str, body: TextRequest, request: Request) -> Response:
        """Returns one or more continuations of each prompt."""
        return await server.find(session).respond(body, request)

    @router.post("/reward")
    async def reward(session: str, request: Request) -> dict[str, bool]:
        """Sets the reward of the episode. A later one replaces it."""
        try:
            value = reward_of(await request.json())
        except (ValueError, RecursionError):  # not JSON, or nested too deeply
            value = None
        if value is None:
            problem = 'the reward is no number; send a number, a list of numbers, or {"reward": a number}'
            raise ApiError(400, problem, code="invalid_value")
        parts = value if isinstance(value, list) else [value]
        if not all(abs(part) <= sys.float_info.max for part in parts):  # also false for NaN
            problem = "the reward is NaN, infinite or too large for a float; send a finite number"
            raise ApiError(400, problem, code="invalid_value")
        server.find(session).reward = value  # type: ignore[assignment]  # a list of numbers is a JSON value
        return {"accepted": True}

    return router


@asynccontextmanager
async def serving_sessions() -> AsyncIterator[SessionServer]:
    """Serves sessions at a free port of this machine, in this event loop."""
    sessions = SessionServer()
    app = FastAPI(title="Ostinato's sessions", openapi_url=None)
    app.include_router(session_router(sessions))
    listener = Binding(port=0).open()
    host, port = listener.getsockname()[:2]
    sessions.address = f"http://{host}:{port}"
    server = EngineServer(app)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        while not server.started:
            if serving.done():
                raise RuntimeError(f"no server of sessions could start at {sessions.address}") from serving.exception()
            await asyncio.sleep(0.01)
        yield sessions
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
