"""Import it before any module with tasks: their functions then run directly, without a Prefect server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tasks.task_runs


def _plain_task(**_: Any) -> Callable[[Any], Any]:
    return lambda function: function


# Prefect would need a server, also for a task outside of a flow.
tasks.task_runs.task = _plain_task  # type: ignore[assignment]
