"""A reward server: grades by HTTP, from whatever lives behind it.

One request per thread:

    POST url   {"messages": [{"role": …, "content": …}, …], "completion": "…", "metadata": {…}}
    200        {"score": 0.5, "reasoning": "…"}          reasoning may be left out
               {"ignore": true, "reasoning": "…"}        no opinion: the thread is left unscored
"""

from __future__ import annotations

import asyncio
import math
import os
import random
from typing import Any

import httpx

from engine.text.threads import StringThread
from tasks.graders.base import BaseGrader, Grade, GraderError, IgnoreGradeException

RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
LONGEST_PAUSE_SECONDS = 30.0


class RewardServerUnavailable(Exception):
    """The server gave no usable answer in all attempts. The grade is masked, never a reward."""

    transient = True


class RewardServerGrader(BaseGrader):
    """The score that a server gives.

    timeout_seconds: of one attempt. retries: further attempts after a lost connection, a timeout, 429 or a 5xx, the
        k-th after up to retry_delay_seconds * 2**(k-1), jittered, or after the server's Retry-After; at most 30 s.
    concurrency: requests in flight at once, from this grader in this process.
    token_variable: the environment variable that holds a bearer token; a token never stands in a config.

    Keep (retries + 1) * timeout_seconds below the run's own timeout of a grade (grader.timeout_seconds).
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
        if httpx.URL(url).scheme not in ("http", "https") or not httpx.URL(url).host:
            raise ValueError(f"given url={url!r}; expected http://host/path or https://host/path")
        if not timeout_seconds > 0 or retries < 0 or not retry_delay_seconds >= 0 or concurrency < 1:
            raise ValueError(
                f"given timeout_seconds={timeout_seconds}, retries={retries}, concurrency={concurrency}, "
                f"retry_delay_seconds={retry_delay_seconds}; expected above 0, 0 or more, 1 or more, 0 or more"
            )
        self.url, self.timeout_seconds, self.retries = url, timeout_seconds, retries
        self.retry_delay_seconds, self.token_variable = retry_delay_seconds, token_variable
        self._turn = asyncio.Semaphore(concurrency)
        self._client: httpx.AsyncClient | None = None

    async def setup(self) -> None:
        """Opens the connection pool. Raises GraderError when the token's variable is not set."""
        self._client = self._client or self._open()

    async def teardown(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def grade(self, thread: StringThread) -> Grade:
        body = {"messages": thread.messages(), "completion": thread.last_content(), "metadata": thread.metadata}
        async with self._turn:
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
        self._client = self._client or self._open()
        problem, asked_to_wait = "", None
        for attempt in range(self.retries + 1):
            if attempt:
                self.add_log({"retries": 1.0})
                await asyncio.sleep(self._pause(attempt, asked_to_wait))
            try:
                # httpx limits each read and write; the whole attempt is limited here
                response = await asyncio.wait_for(self._client.post(self.url, json=body), self.timeout_seconds)
            except (httpx.TransportError, TimeoutError) as error:
                problem, asked_to_wait = f"{type(error).__name__} {error}".strip(), None
                continue
            if response.status_code in RETRIED:
                problem, asked_to_wait = f"HTTP {response.status_code}", response.headers.get("Retry-After")
                continue
            if response.status_code != 200:
                raise GraderError(f"{self.url} answered HTTP {response.status_code}: {response.text[:200]}")
            try:
                return response.json()
            except ValueError as error:
                raise GraderError(f"{self.url} answered what is not JSON: {response.text[:200]!r}") from error
        raise RewardServerUnavailable(f"{self.url}: no answer in {self.retries + 1} attempts, at last {problem}")

    def _pause(self, attempt: int, asked_to_wait: str | None) -> float:
        if asked_to_wait is not None and asked_to_wait.isascii() and asked_to_wait.isdigit():
            return min(float(asked_to_wait), LONGEST_PAUSE_SECONDS)
        longest = min(self.retry_delay_seconds * 2 ** (attempt - 1), LONGEST_PAUSE_SECONDS)
        return longest * random.uniform(0.5, 1.0)

    def _grade_of(self, answer: Any) -> Grade:
        if not isinstance(answer, dict):
            raise GraderError(f'{self.url} answered {answer!r:.80}; expected an object {{"score": number}}')
        reasoning = answer.get("reasoning")
        if answer.get("ignore") is True:
            raise IgnoreGradeException(str(reasoning or f"{self.url} has no opinion"))
        score = answer.get("score")
        if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
            raise GraderError(f"{self.url} answered score={score!r:.80}; expected a finite number")
        return Grade(value=float(score), grader_key=self.grader_key, reasoning=str(reasoning) if reasoning else None)
