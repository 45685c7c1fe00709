"""Keys of runs whose config gives none. All attempts of one flow run get the same key."""

from __future__ import annotations

import os
from datetime import UTC

from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext

ID_LETTERS = 8
EVALUATION_KEY_PREFIX = "evaluation-"
"""Start of the key of an evaluation. A digest of its inputs follows."""


def current_run_key(flow_name: str) -> str:
    """Returns the key of the current flow run, or a random key outside a flow run."""
    context = FlowRunContext.get()
    flow_run = context.flow_run if context else None
    if flow_run is None:
        # outside Prefect, every call is a new run
        return f"{flow_name}-{os.urandom(ID_LETTERS // 2).hex()}"
    return run_key_of(flow_name, flow_run)


def run_key_of(flow_name: str, flow_run: FlowRun) -> str:
    """Returns the key of a flow run, made of values that Prefect keeps over retries.

    The key is `<flow>-<first 8 letters of the flow run's id>`. For a run that a schedule started it is
    `<flow>-<first 8 letters of the deployment's id>/<scheduled time, UTC>`.
    """
    scheduled_time = flow_run.expected_start_time
    if flow_run.auto_scheduled and scheduled_time is not None and flow_run.deployment_id is not None:
        # a schedule that fires twice for one time gets one run
        time_text = scheduled_time.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
        return f"{flow_name}-{str(flow_run.deployment_id)[:ID_LETTERS]}/{time_text}"
    return f"{flow_name}-{str(flow_run.id)[:ID_LETTERS]}"
