"""A grader that asks a reward server over HTTP, with one request per thread:

    POST url   {"messages": [{"role": …, "content": …}, …], "completion": "…", "metadata": {…}}
    200        {"score": 0.5, "reasoning": "…"}          reasoning may be left out
               {"ignore": true, "reasoning": "…"}        the thread is left unscored
"""

from __future__ import annotations

import asyncio
import math
import os
import random
from http import HTTPStatus
from typing import Any

import httpx

from engine.models.openai_model import UnusableReply, post_json
from engine.text.threads import StringThread
from storage.secrets import refuse_secrets
from tasks.graders.base import BaseGrader, Grade, GraderError, IgnoreGradeException

RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP status codes after which a request is repeated."""
MAX_DELAY_SECONDS = 30.0
"""Longest time between two attempts."""


class RewardServerUnavailable(Exception):
    """All attempts to reach the server failed. The grade is masked and never becomes a reward."""

    transient = True


class RewardServerGrader(BaseGrader):
    """The score that a reward server returns.

    timeout_seconds: time limit of one attempt.
    retries: number of further attempts after a lost connection, a timeout, or a status in RETRIED. Retry k, counted
        from 1, follows after retry_delay_seconds * 2**(k-1), reduced by up to a half at random, or after the server's
        Retry-After; at most after 30 s.
    concurrency: number of requests in flight at the same time for one grader in one process.
    token_variable: environment variable that holds a bearer token. A config must not contain the token itself.

    Keep (retries + 1) * timeout_seconds below the time limit of a grade (grader.timeout_seconds).
    """

    def __init__(
        self,
        grader_key: str,
        url: str,
        *,
        timeout_seconds: float = 10.0,
        retries: int = 3,
        retry_delay_seconds: float = 0.25,
        concurrency: int = 16,
        token_variable: str | None = None,
    ) -> None:
        super().__init__(grader_key)
        refuse_secrets(url)
        if httpx.URL(url).scheme not in ("http", "https") or not httpx.URL(url).host:
            raise ValueError(f"given url={url!r}; expected http://host/path or https://host/path")
        if not timeout_seconds > 0 or retries < 0 or not retry_delay_seconds >= 0 or concurrency < 1:
            raise ValueError(
                f"given timeout_seconds={timeout_seconds}, retries={retries}, concurrency={concurrency}, "
                f"retry_delay_seconds={retry_delay_seconds}; expected timeout_seconds > 0, retries >= 0, "
                "concurrency >= 1, retry_delay_seconds >= 0"
            )
        self.url, self.timeout_seconds, self.retries = url, timeout_seconds, retries
        self.retry_delay_seconds, self.token_variable = retry_delay_seconds, token_variable
        self._free_requests = asyncio.Semaphore(concurrency)
        self._client: httpx.AsyncClient | None = None

    async def setup(self) -> None:
        """Open the connection pool. Raises GraderError if the token's environment variable is not set."""
        self._client = self._client or self._open()

    async def teardown(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def grade(self, thread: StringThread) -> Grade:
        body = {"messages": thread.messages(), "completion": thread.last_content(), "metadata": thread.metadata}
        async with self._free_requests:
            answer = await self._post(body)
        return self._grade_of(answer)

    def _open(self) -> httpx.AsyncClient:
        headers = {}
        if self.token_variable is not None:
            token = os.environ.get(self.token_variable)
            if not token:
                raise GraderError(f"{self.grader_key!r} expects a token in ${self.token_variable}, which is not set")
            headers["Authorization"] = f"Bearer {token}"
        return httpx.AsyncClient(timeout=self.timeout_seconds, headers=headers)

    async def _post(self, body: dict[str, Any]) -> Any:
        """Post the request, with retries, and return the parsed answer."""
        self._client = self._client or self._open()
        problem, retry_after = "", None
        for attempt in range(self.retries + 1):
            if attempt:
                self.add_log({"retries": 1.0})
                await asyncio.sleep(self._delay(attempt, retry_after))

            # One attempt. httpx limits each read and write; wait_for limits the whole attempt.
            try:
                reply = await asyncio.wait_for(post_json(self._client, self.url, body), self.timeout_seconds)
            except UnusableReply as error:
                raise GraderError(f"{self.url} {error}") from error
            except (httpx.TransportError, TimeoutError) as error:
                problem, retry_after = f"{type(error).__name__} {error}".strip(), None
                continue

            # Repeat it after a transient status, and raise after any other error.
            if reply.status in RETRIED:
                problem, retry_after = f"HTTP {reply.status}", reply.headers.get("Retry-After")
                continue
            if reply.status != HTTPStatus.OK:
                raise GraderError(f"{self.url} answered HTTP {reply.status}: {reply.text[:200]}")
            try:
                return reply.json()
            except UnusableReply as error:
                raise GraderError(f"{self.url} {error}") from error
        raise RewardServerUnavailable(f"{self.url}: no answer in {self.retries + 1} attempts, the last: {problem}")

    def _delay(self, attempt: int, retry_after: str | None) -> float:
        """Seconds before this attempt. A Retry-After header counts if it is a number of seconds."""
        # The header may also hold a date, which is ignored.
        if retry_after is not None and retry_after.isascii() and retry_after.isdigit():
            return min(float(retry_after), MAX_DELAY_SECONDS)
        # The random factor spreads the retries of many requests that failed at the same moment.
        max_delay = min(self.retry_delay_seconds * 2 ** (attempt - 1), MAX_DELAY_SECONDS)
        return max_delay * random.uniform(0.5, 1.0)

    def _grade_of(self, answer: Any) -> Grade:
        if not isinstance(answer, dict):
            raise GraderError(f'{self.url} answered {answer!r:.80}; expected an object {{"score": number}}')
        reasoning = answer.get("reasoning")
        if answer.get("ignore") is True:
            raise IgnoreGradeException(str(reasoning or f"{self.url} has no opinion"))
        # A server that answers with another type is broken: a guess at its meaning could be a wrong reward.
        score = answer.get("score")
        if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
            raise GraderError(f"{self.url} answered score={score!r:.80}; expected a finite number")
        return Grade(value=float(score), grader_key=self.grader_key, reasoning=str(reasoning) if reasoning else None)
