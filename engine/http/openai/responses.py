"""Builds the JSON of chat completions and text completions in OpenAI's API, whole and as stream chunks."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, ClassVar, Literal
from uuid import uuid4

from engine.http.openai.generation import Delta
from engine.http.openai.models import ChatRequest, CompletionResponse, TextRequest, Usage
from engine.http.openai.policies import ResolvedPolicy
from engine.text.answer_builder import AnswerBuilder, token_text
from engine.text.tokenizers import BROKEN

NO_LOGPROB = -9999.0
"""Written for a logprob that is not finite, which JSON cannot represent. OpenAI writes the same number."""

ObjectType = Literal["chat.completion", "chat.completion.chunk", "text_completion"]


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

    def _whole_content(self, text: str) -> dict[str, Any]:
        """Returns the fields of a choice that hold a whole answer."""
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
            content = self._whole_content(answer.text)
            details = self._token_details(answer, slice(0, len(answer.tokens)))
            choices.append({"index": index, **content, **details, "finish_reason": answer.finish})
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
        if not delta.text and not (delta.token_count and wants_tokens):
            return None
        details = self._token_details(answer, slice(len(answer.tokens) - delta.token_count, len(answer.tokens)))
        choice = {"index": delta.index, **self._chunk_content(delta.text), **details, "finish_reason": None}
        return self._chunk([choice])

    def finish_chunk(self, index: int, answer: AnswerBuilder) -> dict[str, Any]:
        """Returns the chunk that ends the answer `index`, with its finish reason."""
        choice = self._open_choice(index, self._finish_content())
        return self._chunk([choice | {"finish_reason": answer.finish}])

    def usage_chunk(self, answers: Sequence[AnswerBuilder]) -> dict[str, Any]:
        """Returns the chunk with the usage, which ends a stream whose request asks for it."""
        return self._chunk([]) | {"usage": self.usage(answers).model_dump()}

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

    def _whole_content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

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

    def _whole_content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _chunk_content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, answer: AnswerBuilder, span: slice) -> dict[str, Any]:
        return {
            "tokens": [token_text(answer.tokenizer, token) for token in answer.tokens[span]],
            "token_logprobs": [_json_logprob(logprob) for logprob in answer.logprobs[span]],
            "top_logprobs": None,
            "text_offset": answer.offsets[span],
        }


def _json_logprob(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else NO_LOGPROB
