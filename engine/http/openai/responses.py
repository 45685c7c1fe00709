"""Builds the JSON of chat completions and text completions in OpenAI's API, whole and as stream chunks.

The engine samples in a thread of its own and passes each token to the event loop of the request (`Generation`). When
the client has disconnected, or every answer has met a stop string, the next token ends the call. A call that need not
be streamed runs in the engine as a whole; if its client disconnects, it is cancelled only while it waits.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeGuard, TypeVar
from uuid import uuid4

from starlette.requests import Request

from engine.errors import Fenced
from engine.http.openai.models import ChatRequest, CompletionResponse, TextRequest, Usage
from engine.http.openai.policies import ResolvedPolicy
from engine.models.samples import FloatArray
from engine.protocol import Completion, Engine, GenerateRequest, LogprobsRequest, OnToken
from engine.text.answer_builder import AnswerBuilder, token_text
from engine.text.tokenizers import BROKEN, Tokenizer
from engine.text.tool_calls import ToolFormat

NO_LOGPROB = -9999.0
"""Written for a logprob that is not finite, which JSON cannot represent. OpenAI writes the same number."""

ObjectType = Literal["chat.completion", "chat.completion.chunk", "text_completion"]

T = TypeVar("T")


class ResponseBuilder:
    """Builds the JSON of the answers to one request. The subclasses add what differs between chats and texts."""

    id_prefix: ClassVar[str]
    whole_type: ClassVar[ObjectType]
    """The `object` of a whole response."""
    chunk_type: ClassVar[ObjectType]
    """The `object` of a chunk of a stream."""
    begins_with_role: ClassVar[bool] = False
    """Whether a stream begins with a chunk that names the role of its answers."""

    def __init__(
        self, request: ChatRequest | TextRequest, served_policy: ResolvedPolicy, prompts: Sequence[list[int]]
    ) -> None:
        self.request, self.served_policy, self.prompts = request, served_policy, prompts
        # All chunks of one stream have the same id and the same time.
        self._id, self._created = uuid4().hex, int(time.time())

    def _whole_content(self, index: int, answer: AnswerBuilder) -> dict[str, Any]:
        """Returns the fields of a choice that hold a whole answer, and its finish reason."""
        raise NotImplementedError

    def _chunk_content(self, text: str) -> dict[str, Any]:
        """Returns the fields of a choice that hold an addition to an answer."""
        raise NotImplementedError

    def _first_content(self) -> dict[str, Any]:
        """Returns the fields of a choice in the first chunk of a stream."""
        return self._chunk_content("")

    def _finish_content(self) -> dict[str, Any]:
        """Returns the fields of a choice in the last chunk of an answer, which adds no text."""
        return self._chunk_content("")

    def _logprobs(self, answer: AnswerBuilder, span: slice) -> dict[str, Any]:
        """Returns the `logprobs` of some tokens of an answer."""
        raise NotImplementedError

    # -- whole responses ---------------------------------------------------------------------------------------

    def full_response(self, answers: Sequence[AnswerBuilder]) -> dict[str, Any]:
        """Returns the response to a request that is not streamed."""
        choices = []
        for index, answer in enumerate(answers):
            content = self._whole_content(index, answer)
            details = self._token_details(answer, slice(0, len(answer.tokens)))
            choices.append({"index": index, **content, **details})
        common_fields = self._common_fields(self.whole_type)
        response = CompletionResponse(**common_fields, choices=choices, usage=self.usage(answers))
        body = response.model_dump(mode="json", exclude={"prompt_token_ids"})
        if self.request.return_token_ids:
            body["prompt_token_ids"] = list(self.prompts)
        return body

    def usage(self, answers: Sequence[AnswerBuilder]) -> Usage:
        prompt_tokens = sum(len(prompt) for prompt in self.prompts)
        completion_tokens = sum(len(answer.tokens) for answer in answers)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
        )

    # -- chunks of a stream ------------------------------------------------------------------------------------

    def first_chunk(self, count: int) -> dict[str, Any] | None:
        """Returns the chunk that a stream of `count` answers begins with. None: the stream needs no such chunk.

        It holds the role of the answers, and the token ids of the prompts if the request asks for them."""
        if not self.begins_with_role and not self.request.return_token_ids:
            return None
        content = self._first_content()
        chunk = self._chunk([self._open_choice(index, content) for index in range(count)])
        if self.request.return_token_ids:
            chunk["prompt_token_ids"] = list(self.prompts)
        return chunk

    def delta_chunk(self, delta: Delta, answer: AnswerBuilder) -> dict[str, Any] | None:
        """Returns the chunk for the new tokens of an answer, which `answer` contains already. None: nothing to send."""
        # A token may release no text yet. It is sent all the same if the client asked for tokens.
        wants_tokens = self.request.wants_logprobs or self.request.return_token_ids
        text = self._released(delta, answer)
        if not text and not (delta.token_count and wants_tokens):
            return None
        details = self._token_details(answer, slice(len(answer.tokens) - delta.token_count, len(answer.tokens)))
        choice = {"index": delta.index, **self._chunk_content(text), **details, "finish_reason": None}
        return self._chunk([choice])

    def finish_chunks(self, index: int, answer: AnswerBuilder) -> list[dict[str, Any]]:
        """Returns the chunks that end the answer `index`. The last one has its finish reason."""
        choice = self._open_choice(index, self._finish_content())
        return [self._chunk([choice | {"finish_reason": answer.finish}])]

    def usage_chunk(self, answers: Sequence[AnswerBuilder]) -> dict[str, Any]:
        """Returns the chunk with the usage, which ends a stream whose request asks for it."""
        return self._chunk([]) | {"usage": self.usage(answers).model_dump()}

    def _released(self, delta: Delta, answer: AnswerBuilder) -> str:
        """Returns the text to send for an addition to an answer."""
        return delta.text

    @staticmethod
    def _open_choice(index: int, content: dict[str, Any]) -> dict[str, Any]:
        """Returns a choice of a chunk, without tokens and without an end."""
        return {"index": index, **content, "logprobs": None, "finish_reason": None}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._common_fields(self.chunk_type) | {"choices": choices}
        # OpenAI sends `usage: null` in every chunk of a stream that ends with the usage.
        if self.request.wants_usage:
            chunk["usage"] = None
        return chunk

    # -- parts of both -----------------------------------------------------------------------------------------

    def _common_fields(self, object_type: ObjectType) -> dict[str, Any]:
        return {
            "id": self.id_prefix + self._id,
            "object": object_type,
            "created": self._created,
            "model": self.served_policy.model_id,
            "system_fingerprint": self.served_policy.policy.state[:12],
            "policy": self.served_policy.policy.model_dump(),
        }

    def _token_details(self, answer: AnswerBuilder, span: slice) -> dict[str, Any]:
        """Returns logprobs and token ids of some tokens of an answer, as far as the request asks for them."""
        details: dict[str, Any] = {"logprobs": None}
        if self.request.wants_logprobs:
            details["logprobs"] = self._logprobs(answer, span)
        if self.request.return_token_ids:
            details["token_ids"] = answer.tokens[span]
        return details


class ChatResponseBuilder(ResponseBuilder):
    """Builds the JSON of `/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    whole_type = "chat.completion"
    chunk_type = "chat.completion.chunk"
    begins_with_role = True

    def __init__(
        self,
        request: ChatRequest,
        served_policy: ResolvedPolicy,
        prompts: Sequence[list[int]],
        tool_format: ToolFormat,
        forced_prefix: str = "",
    ) -> None:
        """`forced_prefix` is the beginning of the call that the prompts end with."""
        super().__init__(request, served_policy, prompts)
        self._chat, self._tools = request, request.descriptions
        self._tool_format = tool_format if request.reads_calls else None
        self._forced_prefix = forced_prefix
        self._sent: dict[int, str] = {}
        """Text of each answer that a stream has sent, where calls are read."""

    def _whole_content(self, index: int, answer: AnswerBuilder) -> dict[str, Any]:
        text, calls = self._read_calls(index, answer)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        return {"message": message, "finish_reason": _finish_reason(answer, calls)}

    def _read_calls(self, index: int, answer: AnswerBuilder) -> tuple[str, list[dict[str, Any]]]:
        """Returns the text of an answer and its calls. A malformed call stays text."""
        if self._tool_format is None:
            return answer.text, []
        parsed = self._tool_format.parse_answer(self._forced_prefix + answer.text, self._tools)
        text = "\n".join(part for part in (parsed.text, *[call.text for call in parsed.calls if call.problem]) if part)
        valid = [call for call in parsed.calls if not call.problem]
        if self._chat.parallel_tool_calls is False:
            del valid[1:]
        calls = []
        for number, call in enumerate(valid):
            function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
            call_id = call.id or self._call_id(answer, index, number)
            calls.append({"id": call_id, "type": "function", "function": function})
        return text, calls

    def _call_id(self, answer: AnswerBuilder, index: int, number: int) -> str:
        """Returns an id that is the same each time the prompt gets this answer, so that a repeated request changes no
        conversation."""
        origin = json.dumps([self.prompts, answer.tokens, index, number])
        return f"call_{hashlib.sha256(origin.encode()).hexdigest()[:24]}"

    def _released(self, delta: Delta, answer: AnswerBuilder) -> str:
        if self._tool_format is None:
            return delta.text
        sent = self._sent.get(delta.index, "")
        self._sent[delta.index] = self._tool_format.released(self._forced_prefix + answer.text)
        return self._sent[delta.index][len(sent) :]

    def finish_chunks(self, index: int, answer: AnswerBuilder) -> list[dict[str, Any]]:
        """Returns the text that was held back, the calls, and the finish reason."""
        if self._tool_format is None:
            return super().finish_chunks(index, answer)
        text, calls = self._read_calls(index, answer)
        contents = []
        held_back = text.removeprefix(self._sent.get(index, ""))
        if held_back:
            contents.append(self._chunk_content(held_back))
        if calls:
            numbered = [{"index": number} | call for number, call in enumerate(calls)]
            contents.append({"delta": {"tool_calls": numbered}})
        chunks = [self._chunk([self._open_choice(index, content)]) for content in contents]
        end = self._open_choice(index, self._finish_content()) | {"finish_reason": _finish_reason(answer, calls)}
        return [*chunks, self._chunk([end])]

    def _chunk_content(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def _first_content(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}}

    def _finish_content(self) -> dict[str, Any]:
        return {"delta": {}}

    def _logprobs(self, answer: AnswerBuilder, span: slice) -> dict[str, Any]:
        content = []
        for token, logprob in zip(answer.tokens[span], answer.logprobs[span], strict=True):
            text = token_text(answer.tokenizer, token)
            # A token can be a part of a character, whose bytes the decoder does not give.
            utf8_bytes = None if BROKEN in text else list(text.encode("utf-8"))
            content.append({"token": text, "logprob": _json_logprob(logprob), "bytes": utf8_bytes, "top_logprobs": []})
        return {"content": content, "refusal": None}


class TextResponseBuilder(ResponseBuilder):
    """Builds the JSON of `/v1/completions`."""

    id_prefix = "cmpl-"
    whole_type = "text_completion"
    chunk_type = "text_completion"
    request: TextRequest

    def __init__(
        self,
        request: TextRequest,
        served_policy: ResolvedPolicy,
        prompts: Sequence[list[int]],
        tokenizer: Tokenizer,
    ) -> None:
        super().__init__(request, served_policy, prompts)
        self._tokenizer = tokenizer
        self.prompt_scores: list[FloatArray] = []
        """Of each prompt, if `scores_prompts`, (tokens - 1, 1 + 2 logprobs): for each token but the first, its logprob,
        those of the most probable tokens in its place, and the ids of these."""

    @property
    def scores_prompts(self) -> bool:
        """Whether the response has logprobs of the prompts' tokens."""
        return bool(self.request.echo) and self.request.wants_logprobs

    def full_response(self, answers: Sequence[AnswerBuilder]) -> dict[str, Any]:
        body = super().full_response(answers)
        if self.request.echo:
            count = self.request.n or 1
            for choice in body["choices"]:
                self._prepend_prompt(choice, choice["index"] // count)
        return body

    def _prepend_prompt(self, choice: dict[str, Any], index: int) -> None:
        """Puts the prompt before the text of an answer, and its tokens before the answer's logprobs. The first token
        of the prompt has no logprob."""
        prompt, requested = self.prompts[index], self.request.prompts[index]
        echoed = AnswerBuilder(self._tokenizer)
        for token in prompt:
            echoed.feed(token, 0.0)
        echoed.close("length")
        text = requested if isinstance(requested, str) else echoed.text
        choice["text"] = text + choice["text"]
        if not self.scores_prompts:
            return
        logprobs = choice["logprobs"]
        scores = self.prompt_scores[index]
        sampled = len(logprobs["tokens"])
        logprobs["tokens"] = [token_text(self._tokenizer, token) for token in prompt] + logprobs["tokens"]
        of_prompt = [_json_logprob(logprob) for logprob in scores[:, 0].tolist()]
        logprobs["token_logprobs"] = [None, *of_prompt] + logprobs["token_logprobs"]
        logprobs["text_offset"] = echoed.offsets + [len(text) + offset for offset in logprobs["text_offset"]]
        if self.request.logprobs:
            tops = [self._top(row, token) for row, token in zip(scores, prompt[1:], strict=True)]
            # those of the sampled tokens are not known
            logprobs["top_logprobs"] = [None, *tops] + [None] * sampled

    def _top(self, row: FloatArray, token: int) -> dict[str, float]:
        """The logprobs of the most probable tokens in the place of a token, and of the token itself, by their texts. Of
        several tokens with the same text, such as parts of characters, the second one is token_id:ID."""
        count = self.request.logprobs or 0
        tokens, logprobs = [int(other) for other in row[1 + count :]], row[1 : 1 + count].tolist()
        if token not in tokens:
            tokens, logprobs = [*tokens, token], [*logprobs, float(row[0])]
        top: dict[str, float] = {}
        for other, logprob in zip(tokens, logprobs, strict=True):
            text = token_text(self._tokenizer, other)
            top[f"token_id:{other}" if text in top else text] = _json_logprob(logprob)
        return top

    def _whole_content(self, index: int, answer: AnswerBuilder) -> dict[str, Any]:
        return {"text": answer.text, "finish_reason": answer.finish}

    def _chunk_content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, answer: AnswerBuilder, span: slice) -> dict[str, Any]:
        return {
            "tokens": [token_text(answer.tokenizer, token) for token in answer.tokens[span]],
            "token_logprobs": [_json_logprob(logprob) for logprob in answer.logprobs[span]],
            "top_logprobs": None,
            "text_offset": answer.offsets[span],
        }


def _finish_reason(answer: AnswerBuilder, calls: Sequence[Any]) -> str | None:
    # An answer that was cut may lack a call, so its reason stays "length".
    return "tool_calls" if calls and answer.finish == "stop" else answer.finish


def _json_logprob(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else NO_LOGPROB


class StreamingEngine(Protocol):
    """An engine that calls `on_token` with each token as it is sampled."""

    async def generate(
        self, request: GenerateRequest, *, epoch: int = 0, on_token: OnToken | None = None
    ) -> list[Completion]: ...


def is_streaming(engine: Engine) -> TypeGuard[StreamingEngine]:
    return "on_token" in inspect.signature(engine.generate).parameters


class ScoringEngine(Protocol):
    """An engine that gives the most probable tokens in the place of other ones."""

    async def logprobs(self, request: LogprobsRequest, *, epoch: int = 0) -> list[list[float]]: ...

    async def top_logprobs(self, request: LogprobsRequest, *, top: int, epoch: int = 0) -> list[FloatArray]: ...


def is_scoring(engine: object) -> TypeGuard[ScoringEngine]:
    return hasattr(engine, "top_logprobs")


class GenerationAbandoned(Exception):
    """Raised in the engine's thread to end a call whose tokens are not needed any more."""


class ClientDisconnected(Exception):
    """The client closed the connection before the response was complete."""


@dataclass(frozen=True, slots=True)
class Delta:
    """An addition to the answer `index`."""

    index: int
    token_count: int
    """Number of added tokens."""
    text: str
    """Text that they released."""


class Generation:
    """Runs one request and feeds its tokens to `answers`; `answers[i]` belongs to `request.prompts[i]`.

    `epoch(refresh)` returns the fencing epoch to read in. A fenced call is tried once more with a refreshed epoch,
    since a lease may have been acquired a moment ago.

    Without `stream_tokens` all tokens come at the end, and the engine may sample them in one batch with other requests.
    """

    def __init__(
        self,
        engine: Engine,
        request: GenerateRequest,
        answers: list[AnswerBuilder],
        epoch: Callable[[bool], Awaitable[int]],
        *,
        stream_tokens: bool = True,
    ) -> None:
        self.engine, self.request, self.answers, self.epoch = engine, request, answers, epoch
        self._stream_tokens = stream_tokens
        self._abandoned = False
        self._task: asyncio.Task[list[Completion]] | None = None

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yields additions in the order of sampling until every answer has ended, then the text that was held back.

        Raises the errors of `generate`.
        """
        loop = asyncio.get_running_loop()
        tokens: asyncio.Queue[tuple[int, int, float] | None] = asyncio.Queue()

        # The engine calls this in its own thread, so the token is passed to the event loop of the request.
        def on_token(index: int, token: int, logprob: float) -> None:
            if self._abandoned:
                raise GenerationAbandoned
            loop.call_soon_threadsafe(tokens.put_nowait, (index, token, logprob))

        self._task = asyncio.create_task(self._generate(on_token))
        self._task.add_done_callback(lambda task: tokens.put_nowait(None))
        try:
            # Yield the tokens until the call ends (None) or no answer needs more of them.
            while (sampled := await tokens.get()) is not None:
                index, token, logprob = sampled
                answer = self.answers[index]
                if answer.finish is None:
                    yield Delta(index, 1, answer.feed(token, logprob))
                if all(answer.finish for answer in self.answers):
                    return
            # Yield the tokens of an engine that does not stream, and the text that was held back.
            for delta in self._finish(await self._task):
                yield delta
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends the call, since its tokens are not needed any more. It may be called several times."""
        self._abandoned = True
        if self._task is not None and not self._task.done():
            self._task.cancel()

    async def _generate(self, on_token: OnToken) -> list[Completion]:
        try:
            return await self._generate_in(await self.epoch(False), on_token)
        except Fenced:
            # The known epoch may be up to a second old. Read it again before the client sees an error.
            return await self._generate_in(await self.epoch(True), on_token)

    async def _generate_in(self, epoch: int, on_token: OnToken) -> list[Completion]:
        if self._stream_tokens and is_streaming(self.engine):
            return await self.engine.generate(self.request, epoch=epoch, on_token=on_token)
        return await self.engine.generate(self.request, epoch=epoch)

    def _finish(self, completions: list[Completion]) -> list[Delta]:
        """Returns the tokens that did not arrive one by one (all, if the engine does not stream) and the text that is
        still held back."""
        deltas = []
        for index, (answer, completion) in enumerate(zip(self.answers, completions, strict=True)):
            # The answer already has the tokens that arrived one by one.
            before = len(answer.tokens)
            new_ids, new_logprobs = completion.token_ids[before:], completion.logprobs[before:]
            text = ""
            for token, logprob in zip(new_ids, new_logprobs, strict=True):
                text += answer.feed(token, logprob)
            text += answer.close(completion.stop_reason)
            deltas.append(Delta(index, len(answer.tokens) - before, text))
        return deltas


async def cancel_on_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Returns the result of `work`. If the client disconnects first, it cancels `work` and raises
    ClientDisconnected."""
    task = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        # Cancelling a finished task has no effect, so this also covers a caller that is cancelled itself.
        disconnected.cancel()
        task.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
