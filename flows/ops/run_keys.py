"""The key of a run that was given none: the same over all attempts of one flow run, whoever starts them."""

from __future__ import annotations

import os
from datetime import UTC

from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext

ID_LETTERS = 8
EVALUATION_KEY_PREFIX = "evaluation-"
"""The key of an evaluation that was given none: this, and a digest of what is evaluated."""


def current_run_key(flow_name: str) -> str:
    """The key of the flow that runs here; one of chance where none does."""
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    return f"{flow_name}-{os.urandom(ID_LETTERS // 2).hex()}" if run is None else run_key_of(flow_name, run)


def run_key_of(flow_name: str, run: FlowRun) -> str:
    """`<flow>-<first 8 of the flow run's id>`; of a scheduled run `<flow>-<first 8 of the deployment's id>/<time for
    which it was scheduled, UTC>`. Prefect keeps all of them over retries."""
    if run.auto_scheduled and run.expected_start_time is not None and run.deployment_id is not None:
        at = run.expected_start_time.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
        return f"{flow_name}-{str(run.deployment_id)[:ID_LETTERS]}/{at}"
    return f"{flow_name}-{str(run.id)[:ID_LETTERS]}"
