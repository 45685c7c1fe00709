"""`ResponseWriter`: the JSON of chat completions and text completions in OpenAI's API, whole and as stream chunks."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import uuid4

from engine.http.openai.answers import BROKEN, AnswerBuilder, token_text
from engine.http.openai.generation import Delta
from engine.http.openai.models import ChatRequest, CompletionResponse, TextRequest, Usage
from engine.http.openai.policies import ResolvedPolicy

NO_LOGPROB = -9999.0
"""Written for a logprob that is not finite, which JSON cannot represent. OpenAI writes the same number."""


@dataclass(frozen=True)
class ResponseWriter:
    """Writes the answers to one request."""

    request: ChatRequest | TextRequest
    resolved: ResolvedPolicy
    prompts: Sequence[list[int]]
    id: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_chat(self) -> bool:
        return isinstance(self.request, ChatRequest)

    # -- whole responses ---------------------------------------------------------------------------------------

    def full_response(self, answers: Sequence[AnswerBuilder]) -> dict[str, Any]:
        """Returns the response to a request that is not streamed."""
        response = CompletionResponse(
            **self._head("chat.completion" if self.is_chat else "text_completion"),
            choices=[self._choice(index, answer) for index, answer in enumerate(answers)],
            usage=self.usage(answers),
            prompt_token_ids=list(self.prompts) if self.request.return_token_ids else None,
        )
        body = response.model_dump(mode="json")
        if not self.request.return_token_ids:
            del body["prompt_token_ids"]
        return body

    def usage(self, answers: Sequence[AnswerBuilder]) -> Usage:
        prompt_tokens = sum(len(prompt) for prompt in self.prompts)
        completion_tokens = sum(len(answer.tokens) for answer in answers)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
        )

    def _choice(self, index: int, answer: AnswerBuilder) -> dict[str, Any]:
        content: dict[str, Any] = {"text": answer.text}
        if self.is_chat:
            content = {"message": {"role": "assistant", "content": answer.text}}
        details = self._token_details(answer, slice(0, len(answer.tokens)))
        return {"index": index, **content, **details, "finish_reason": answer.finish}

    # -- chunks of a stream ------------------------------------------------------------------------------------

    def first_chunk(self, count: int) -> dict[str, Any] | None:
        """Returns the chunk that a stream of `count` answers begins with: the role of the answers, and the token ids of
        the prompts if they are requested. None: the stream needs no such chunk."""
        if not self.is_chat and not self.request.return_token_ids:
            return None
        content = self._chunk_content({"role": "assistant", "content": ""}, "")
        choices = [{"index": index, **content, "logprobs": None, "finish_reason": None} for index in range(count)]
        chunk = self._chunk(choices)
        if self.request.return_token_ids:
            chunk["prompt_token_ids"] = list(self.prompts)
        return chunk

    def delta_chunk(self, delta: Delta, answer: AnswerBuilder) -> dict[str, Any] | None:
        """Returns the chunk of an addition. None: there is nothing to send."""
        wants_tokens = self.request.wants_logprobs or self.request.return_token_ids
        if not delta.text and not (delta.tokens and wants_tokens):
            return None
        content = self._chunk_content({"content": delta.text}, delta.text)
        details = self._token_details(answer, slice(len(answer.tokens) - delta.tokens, len(answer.tokens)))
        return self._chunk([{"index": delta.index, **content, **details, "finish_reason": None}])

    def last_chunk(self, index: int, answer: AnswerBuilder) -> dict[str, Any]:
        """Returns the chunk that ends the answer `index`, with its finish reason."""
        content = self._chunk_content({}, "")
        return self._chunk([{"index": index, **content, "logprobs": None, "finish_reason": answer.finish}])

    def usage_chunk(self, answers: Sequence[AnswerBuilder]) -> dict[str, Any]:
        """Returns the chunk with the usage, which ends a stream whose request asks for it."""
        return self._chunk([]) | {"usage": self.usage(answers).model_dump()}

    def _chunk_content(self, chat_delta: dict[str, Any], text: str) -> dict[str, Any]:
        return {"delta": chat_delta} if self.is_chat else {"text": text}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        chunk = head | {"choices": choices}
        return chunk | {"usage": None} if self.request.wants_usage else chunk

    # -- parts of both -----------------------------------------------------------------------------------------

    def _head(
        self, object_type: Literal["chat.completion", "chat.completion.chunk", "text_completion"]
    ) -> dict[str, Any]:
        return {
            "id": ("chatcmpl-" if self.is_chat else "cmpl-") + self.id,
            "object": object_type,
            "created": self.created,
            "model": self.resolved.model_id,
            "system_fingerprint": self.resolved.policy.state[:12],
            "policy": self.resolved.policy.model_dump(),
        }

    def _token_details(self, answer: AnswerBuilder, tokens: slice) -> dict[str, Any]:
        """Returns logprobs and token ids of some tokens of an answer, as far as the request asks for them."""
        details: dict[str, Any] = {"logprobs": None}
        if self.request.wants_logprobs:
            details["logprobs"] = _chat_logprobs(answer, tokens) if self.is_chat else _text_logprobs(answer, tokens)
        if self.request.return_token_ids:
            details["token_ids"] = answer.tokens[tokens]
        return details


def _chat_logprobs(answer: AnswerBuilder, tokens: slice) -> dict[str, Any]:
    content = []
    for token, logprob in zip(answer.tokens[tokens], answer.logprobs[tokens], strict=True):
        text = token_text(answer.tokenizer, token)
        utf8_bytes = None if BROKEN in text else list(text.encode("utf-8"))
        content.append({"token": text, "logprob": _finite(logprob), "bytes": utf8_bytes, "top_logprobs": []})
    return {"content": content, "refusal": None}


def _text_logprobs(answer: AnswerBuilder, tokens: slice) -> dict[str, Any]:
    return {
        "tokens": [token_text(answer.tokenizer, token) for token in answer.tokens[tokens]],
        "token_logprobs": [_finite(logprob) for logprob in answer.logprobs[tokens]],
        "top_logprobs": None,
        "text_offset": answer.offsets[tokens],
    }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else NO_LOGPROB
