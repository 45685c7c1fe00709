"""The one home of retry policy: transient errors only, exponential backoff with jitter."""

from __future__ import annotations

from typing import Any

from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task, exponential_backoff

from engine.errors import TransientEngineError
from storage.errors import TransientStorageError

TRANSIENT = (TransientEngineError, TransientStorageError, ConnectionError, TimeoutError)


def is_transient(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    """Whether the same task may succeed later. A permanent error fails the run at once, with its message."""
    result = state.data if isinstance(state.data, BaseException) else None
    return isinstance(result, TRANSIENT)


DURABLE: dict[str, Any] = {
    "retries": 4,
    "retry_delay_seconds": exponential_backoff(1),
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": is_transient,
    # our commit is the only cache: Prefect's would answer from a database that is not the truth
    "cache_policy": NO_CACHE,
    "persist_result": False,
}
"""Options of every task of a run."""
