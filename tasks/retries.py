"""The retry options of all tasks: transient errors are retried, with exponential backoff and jitter."""

from __future__ import annotations

from typing import Any

from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task, exponential_backoff

from engine.errors import TransientEngineError
from storage.errors import TransientStorageError

TRANSIENT = (TransientEngineError, TransientStorageError, ConnectionError, TimeoutError)


def is_transient(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    """Whether the task failed with an error that a retry may not meet again. Other errors fail the run at once."""
    result = state.data if isinstance(state.data, BaseException) else None
    return isinstance(result, TRANSIENT)


DURABLE: dict[str, Any] = {
    "retries": 4,
    "retry_delay_seconds": exponential_backoff(1),
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": is_transient,
    # A task looks for its committed artifact itself. Prefect's cache could return a ref that the store no longer has.
    "cache_policy": NO_CACHE,
    "persist_result": False,
}
"""Options of every task of a run."""
