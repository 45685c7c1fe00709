"""Trying again after a transient failure, with backoff and jitter."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from storage.errors import StorageFull, StorageUnavailable, TransientStorageError

T = TypeVar("T")

_jitter = random.Random()  # its own generator: a retry must not shift a seeded run's global one


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


def with_retries(call: Callable[[], T], what: str, policy: RetryPolicy) -> T:
    """The result of `call`. A full store is not tried again here: seconds do not make room.

    Raises StorageUnavailable, or a subclass of it, after the last attempt; StorageFull and permanent errors at once.
    """
    for attempt in range(policy.attempts):
        try:
            return call()
        except StorageFull:
            raise
        except TransientStorageError as error:
            if attempt + 1 == policy.attempts:
                raise _given_up(error, what, policy) from error
            time.sleep(policy.delay(attempt))
    raise ValueError(f"a retry policy needs at least one attempt, {policy.attempts} given")


async def with_retries_async(call: Callable[[], Awaitable[T]], what: str, policy: RetryPolicy) -> T:
    """Like `with_retries`, on an event loop."""
    for attempt in range(policy.attempts):
        try:
            return await call()
        except StorageFull:
            raise
        except TransientStorageError as error:
            if attempt + 1 == policy.attempts:
                raise _given_up(error, what, policy) from error
            await asyncio.sleep(policy.delay(attempt))
    raise ValueError(f"a retry policy needs at least one attempt, {policy.attempts} given")


def _given_up(error: TransientStorageError, what: str, policy: RetryPolicy) -> StorageUnavailable:
    kind = type(error) if isinstance(error, StorageUnavailable) else StorageUnavailable
    return kind(f"{what} failed {policy.attempts} times: {error}")
