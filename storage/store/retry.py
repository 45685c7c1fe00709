"""Repeats a call after a transient failure, with exponential backoff and jitter."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from storage.errors import StorageFull, StorageUnavailable, TransientStorageError

T = TypeVar("T")

_jitter = random.Random()  # a separate generator: a retry must not advance the global one of a seeded run


@dataclass(frozen=True)
class RetryPolicy:
    """Delays are first_seconds · factor^k, at most longest_seconds, each times a random factor in [0.5, 1]."""

    attempts: int = 5
    first_seconds: float = 0.1
    factor: float = 3.0
    longest_seconds: float = 5.0

    def delay(self, attempt: int) -> float:
        """Seconds to wait after the failed 0-based `attempt`."""
        return min(self.first_seconds * self.factor**attempt, self.longest_seconds) * _jitter.uniform(0.5, 1.0)


def with_retries(call: Callable[[], T], description: str, policy: RetryPolicy) -> T:
    """Returns the result of `call`, which is repeated after transient errors. `description` is for the error text.

    StorageFull is not retried, since waiting a few seconds frees no space. Raises StorageUnavailable, or a subclass of
    it, after the last attempt; StorageFull and permanent errors at once.
    """
    for attempt in range(policy.attempts):
        try:
            return call()
        except StorageFull:
            raise
        except TransientStorageError as error:
            if attempt + 1 == policy.attempts:
                raise _final_error(error, description, policy) from error
            time.sleep(policy.delay(attempt))
    raise ValueError(f"a retry policy needs at least one attempt, {policy.attempts} given")


async def with_retries_async(call: Callable[[], Awaitable[T]], description: str, policy: RetryPolicy) -> T:
    """Like `with_retries`, for a coroutine function."""
    for attempt in range(policy.attempts):
        try:
            return await call()
        except StorageFull:
            raise
        except TransientStorageError as error:
            if attempt + 1 == policy.attempts:
                raise _final_error(error, description, policy) from error
            await asyncio.sleep(policy.delay(attempt))
    raise ValueError(f"a retry policy needs at least one attempt, {policy.attempts} given")


def _final_error(error: TransientStorageError, description: str, policy: RetryPolicy) -> StorageUnavailable:
    kind = type(error) if isinstance(error, StorageUnavailable) else StorageUnavailable
    return kind(f"{description} failed {policy.attempts} times: {error}")
