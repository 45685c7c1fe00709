"""Corrects flow runs on the Prefect server whose processes are gone.

The server does not notice when a worker is killed: its flow runs stay Running, and a cancellation that no worker
handles stays Cancelling. The supervisor sees the end of the worker at once, a minute before the automation for missing
heartbeats. A server on a busy machine may also lose an event, and with it the automation that should have rescheduled a
run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx

from flows.ops.services import RETRY_DELAY_SECONDS, TAG

PAGE_SIZE = 200
TIMEOUT_SECONDS = 20.0
UNFINISHED_STATES = ("RUNNING", "PENDING", "CANCELLING", "CRASHED")
"""States in which a dead worker may have left its flow runs."""
MIN_CRASH_AGE = timedelta(seconds=4 * RETRY_DELAY_SECONDS)
"""A flow run that has been Crashed for longer was not rescheduled by its automation."""
MAX_CRASH_AGE = timedelta(hours=1)
"""A flow run that has been Crashed for longer may have been left so on purpose."""

MAX_ERRORS_BEFORE_THE_FLOW = 2
"""A process that has ended with an error this often before its flow began will do so again."""
EXIT_WITH_ERROR = re.compile(r"status code:? 1\b")
"""How a worker reports the end of a process by an exception. A killed process has the number of the signal."""


def reconcile(api_url: str, pool: str, *, worker: str, seen: Collection[str]) -> list[str]:
    """Reschedules or cancels the flow runs that a dead worker has left in a work pool; returns one line for each.

    Runs that were being cancelled become Cancelled. The others become Scheduled, and continue after their last
    committed step. `seen` holds the ids of flow runs whose processes were found and ended. If other workers serve the
    pool, only these are changed, because the others may belong to those workers. Raises httpx.HTTPError.
    """
    with httpx.Client(base_url=api_url, timeout=TIMEOUT_SECONDS, trust_env=False) as client:
        is_only_worker = not _other_workers(client, pool, worker)
        lines = []
        # the list is read completely first, because the changes would shift its pages
        for run in list(_runs_in_states(client, pool, UNFINISHED_STATES)):
            is_ours = run["id"] in seen
            # runs of other workers, and crashed runs, which their automation reschedules
            if not is_ours and (not is_only_worker or run["state_type"] == "CRASHED"):
                continue
            # a cancellation that no worker handled is completed; other runs continue
            new_state = "CANCELLED" if run["state_type"] == "CANCELLING" else "SCHEDULED"
            if _set_state(client, run, new_state):
                lines.append(f"{run['name']}: was {run['state_name']}, is {new_state.lower()}")
        return lines


def reschedule_crashed_runs(api_url: str, pool: str, *, now: datetime | None = None) -> list[str]:
    """Reschedules crashed flow runs of the pool that their automation has missed; returns one line for each.

    Runs that crashed a short time ago and failed runs are left unchanged. Raises httpx.HTTPError.
    """
    now = now or datetime.now(UTC)
    with httpx.Client(base_url=api_url, timeout=TIMEOUT_SECONDS, trust_env=False) as client:
        lines = []
        for run in list(_runs_in_states(client, pool, ("CRASHED",))):
            age = now - datetime.fromisoformat(run["state"]["timestamp"])
            is_missed = TAG in run["tags"] and MIN_CRASH_AGE <= age <= MAX_CRASH_AGE
            if is_missed and _set_state(client, run, "SCHEDULED", reason="it crashed"):
                lines.append(f"{run['name']}: had crashed, is scheduled")
        return lines


def fail_runs_that_never_began(api_url: str, pool: str) -> list[str]:
    """Fails the flow runs whose process has ended with an error, again and again, before the flow began; returns one
    line for each. The next start of the services would start such a process once more.

    Killed processes and flows that did begin do not count, so interrupted runs continue. Raises httpx.HTTPError.
    """
    with httpx.Client(base_url=api_url, timeout=TIMEOUT_SECONDS, trust_env=False) as client:
        lines = []
        for run in list(_runs_in_states(client, pool, ("SCHEDULED", "PENDING", "CRASHED"))):
            is_new = run["state_name"] == "Scheduled"
            if TAG not in run["tags"] or run["run_count"] > 0 or is_new:
                continue
            errors = _errors_before_the_flow(client, run["id"])
            if errors < MAX_ERRORS_BEFORE_THE_FLOW:
                continue
            if _set_state(client, run, "FAILED", reason=f"its process ended {errors} times with an error"):
                lines.append(f"{run['name']}: its process never reached the flow, is failed")
        return lines


def _errors_before_the_flow(client: httpx.Client, run: str) -> int:
    """The number of times that the process of a flow run which never began has ended with an error."""
    response = client.get("/flow_run_states/", params={"flow_run_id": run})
    response.raise_for_status()
    crashes = [state for state in response.json() if state["type"] == "CRASHED"]
    return sum(EXIT_WITH_ERROR.search(state["message"] or "") is not None for state in crashes)


def _other_workers(client: httpx.Client, pool: str, worker: str) -> set[str]:
    """Names of the other workers of the pool that are online."""
    body = {"workers": {"status": {"any_": ["ONLINE"]}}}
    response = client.post(f"/work_pools/{pool}/workers/filter", json=body)
    # a server without the pool has no workers of it
    if response.status_code == httpx.codes.NOT_FOUND:
        return set()
    response.raise_for_status()
    return {entry["name"] for entry in response.json()} - {worker}


def _runs_in_states(client: httpx.Client, pool: str, states: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields all flow runs of the pool in these states, page by page."""
    offset = 0
    # the server returns at most PAGE_SIZE runs per request
    while True:
        body = {
            "work_pools": {"name": {"any_": [pool]}},
            "flow_runs": {"state": {"type": {"any_": list(states)}}},
            "sort": "START_TIME_DESC",
            "limit": PAGE_SIZE,
            "offset": offset,
        }
        response = client.post("/flow_runs/filter", json=body)
        response.raise_for_status()
        page = response.json()
        yield from page
        if len(page) < PAGE_SIZE:
            return
        offset += PAGE_SIZE


def _set_state(client: httpx.Client, run: dict[str, Any], new_state: str, *, reason: str = "its worker ended") -> bool:
    """Sets the state of a listed flow run. Returns False if its state has changed since it was listed: a person who
    pressed Retry or Cancel meanwhile, or another process, has decided what the run does."""
    current = client.get(f"/flow_runs/{run['id']}")
    current.raise_for_status()
    if current.json()["state_id"] != run["state_id"]:
        return False
    state: dict[str, Any] = {"type": new_state, "message": "its worker ended before the flow run did"}
    if new_state == "FAILED":
        state |= {
            "name": "Failed",
            "message": f"{reason} before the flow began; the log of the run says why. When the cause is fixed, press "
            "Retry",
        }
    # a scheduled state needs a time, and the name that Prefect uses for retries
    if new_state == "SCHEDULED":
        state |= {
            "name": "AwaitingRetry",
            "message": f"{reason}; it continues after its last committed step",
            "state_details": {"scheduled_time": datetime.now(UTC).isoformat()},
        }
    response = client.post(f"/flow_runs/{run['id']}/set_state", json={"state": state, "force": True})
    response.raise_for_status()
    return True
