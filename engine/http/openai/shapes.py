"""The two forms of an answer in OpenAI's API: chat completions and text completions, whole and in chunks."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import uuid4

from engine.http.openai.answers import BROKEN, Answer, token_text
from engine.http.openai.calls import Delta
from engine.http.openai.models import ChatRequest, Completed, TextRequest, Usage
from engine.http.openai.policies import Found

NO_LOGPROB = -9999.0
"""Stands for what JSON has no number for, as it does at OpenAI."""


@dataclass(frozen=True)
class Form:
    """How the answers to one request are written."""

    request: ChatRequest | TextRequest
    found: Found
    prompts: Sequence[list[int]]
    id: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_chat(self) -> bool:
        return isinstance(self.request, ChatRequest)

    # -- whole -------------------------------------------------------------------------------------------------

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        completed = Completed(
            **self._head("chat.completion" if self.is_chat else "text_completion"),
            choices=[self._choice(index, answer) for index, answer in enumerate(answers)],
            usage=self.usage(answers),
            prompt_token_ids=list(self.prompts) if self.request.return_token_ids else None,
        )
        body = completed.model_dump(mode="json")
        return body if self.request.return_token_ids else {k: v for k, v in body.items() if k != "prompt_token_ids"}

    def usage(self, answers: Sequence[Answer]) -> Usage:
        asked, given = sum(map(len, self.prompts)), sum(len(answer.tokens) for answer in answers)
        return Usage(prompt_tokens=asked, completion_tokens=given, total_tokens=asked + given)

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": answer.text}} if self.is_chat else {"text": answer.text}
        tokens = slice(0, len(answer.tokens))
        return {"index": index, **said, **self._about(answer, tokens), "finish_reason": answer.finish}

    # -- chunks ------------------------------------------------------------------------------------------------

    def opening(self, count: int) -> dict[str, Any] | None:
        """What a stream begins with: who speaks."""
        if not self.is_chat and not self.request.return_token_ids:
            return None
        opened = {"role": "assistant", "content": ""}
        said: dict[str, Any] = {"delta": opened} if self.is_chat else {"text": ""}
        choices = [{"index": index, **said, "logprobs": None, "finish_reason": None} for index in range(count)]
        chunk = self._chunk(choices)
        return chunk | {"prompt_token_ids": list(self.prompts)} if self.request.return_token_ids else chunk

    def piece(self, delta: Delta, answer: Answer) -> dict[str, Any] | None:
        """What a delta says; None when that is nothing."""
        if not delta.text and not (delta.tokens and (self.request.wants_logprobs or self.request.return_token_ids)):
            return None
        said: dict[str, Any] = {"delta": {"content": delta.text}} if self.is_chat else {"text": delta.text}
        tokens = slice(len(answer.tokens) - delta.tokens, len(answer.tokens))
        return self._chunk([{"index": delta.index, **said, **self._about(answer, tokens), "finish_reason": None}])

    def ending(self, index: int, answer: Answer) -> dict[str, Any]:
        said: dict[str, Any] = {"delta": {}} if self.is_chat else {"text": ""}
        return self._chunk([{"index": index, **said, "logprobs": None, "finish_reason": answer.finish}])

    def totals(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return self._chunk([]) | {"usage": self.usage(answers).model_dump()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        chunk = head | {"choices": choices}
        return chunk | {"usage": None} if self.request.wants_usage else chunk

    # -- parts -------------------------------------------------------------------------------------------------

    def _head(self, kind: Literal["chat.completion", "chat.completion.chunk", "text_completion"]) -> dict[str, Any]:
        return {
            "id": ("chatcmpl-" if self.is_chat else "cmpl-") + self.id,
            "object": kind,
            "created": self.created,
            "model": self.found.model_id,
            "system_fingerprint": self.found.policy.state[:12],
            "policy": self.found.policy.model_dump(),
        }

    def _about(self, answer: Answer, tokens: slice) -> dict[str, Any]:
        logprobs = None
        if self.request.wants_logprobs:
            logprobs = _chat_logprobs(answer, tokens) if self.is_chat else _text_logprobs(answer, tokens)
        ids = {"token_ids": answer.tokens[tokens]} if self.request.return_token_ids else {}
        return {"logprobs": logprobs, **ids}


def _chat_logprobs(answer: Answer, tokens: slice) -> dict[str, Any]:
    content = []
    for token, logprob in zip(answer.tokens[tokens], answer.logprobs[tokens], strict=True):
        text = token_text(answer.tokenizer, token)
        octets = None if BROKEN in text else list(text.encode("utf-8"))
        content.append({"token": text, "logprob": _finite(logprob), "bytes": octets, "top_logprobs": []})
    return {"content": content, "refusal": None}


def _text_logprobs(answer: Answer, tokens: slice) -> dict[str, Any]:
    return {
        "tokens": [token_text(answer.tokenizer, token) for token in answer.tokens[tokens]],
        "token_logprobs": [_finite(logprob) for logprob in answer.logprobs[tokens]],
        "top_logprobs": None,
        "text_offset": answer.offsets[tokens],
    }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else NO_LOGPROB
