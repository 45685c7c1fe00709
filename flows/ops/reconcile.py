"""What a Prefect server still believes of runs whose processes are gone.

A worker that is killed tells nobody, and a run stays Running for ever; a cancellation that no worker hears of stays
Cancelling. Who has just seen the worker end knows better than a heartbeat that is missed a minute later. And a server
on a busy machine may lose an event, and with it an automation that should have brought a run back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx

from flows.ops.services import RETRY_DELAY_SECONDS, TAG

PAGE = 200
TIMEOUT_SECONDS = 20.0
LEFT = ("RUNNING", "PENDING", "CANCELLING", "CRASHED")
"""States of runs that a dead worker may have left."""
FORGOTTEN = timedelta(seconds=4 * RETRY_DELAY_SECONDS), timedelta(hours=1)
"""A run that has been Crashed so long was forgotten by its automation; for the latter, a person may have left it."""


def reconcile(api_url: str, pool: str, *, worker: str, seen: Collection[str]) -> list[str]:
    """Gives back the runs of a pool whose worker, `worker`, is dead and has left no process: those that ran are due
    again and go on from their last committed step, those that were being cancelled are cancelled. One line for each.

    `seen` are the ids of flow runs whose processes were found and ended. Where other workers serve the pool, too, only
    these are touched: the others may be theirs, and the automations look after those. Raises httpx.HTTPError.
    """
    with httpx.Client(base_url=api_url, timeout=TIMEOUT_SECONDS, trust_env=False) as client:
        alone = not _other_workers(client, pool, worker)
        said = []
        for run in list(_in_states(client, pool, LEFT)):
            ours = run["id"] in seen
            if not ours and (not alone or run["state_type"] == "CRASHED"):
                continue
            to = "CANCELLED" if run["state_type"] == "CANCELLING" else "SCHEDULED"
            _set_state(client, run["id"], to)
            said.append(f"{run['name']}: was {run['state_name']}, is {to.lower()}")
        return said


def reschedule_crashed_runs(api_url: str, pool: str, *, now: datetime | None = None) -> list[str]:
    """Makes runs of the pool due again that crashed and were forgotten; one line for each. What goes on by itself, or
    has failed for good, is left alone. Raises httpx.HTTPError."""
    now = now or datetime.now(UTC)
    with httpx.Client(base_url=api_url, timeout=TIMEOUT_SECONDS, trust_env=False) as client:
        said = []
        for run in list(_in_states(client, pool, ("CRASHED",))):
            age = now - datetime.fromisoformat(run["state"]["timestamp"])
            if TAG in run["tags"] and FORGOTTEN[0] <= age <= FORGOTTEN[1]:
                _set_state(client, run["id"], "SCHEDULED", because="it crashed")
                said.append(f"{run['name']}: had crashed, is scheduled")
        return said


def _other_workers(client: httpx.Client, pool: str, worker: str) -> set[str]:
    body = {"workers": {"status": {"any_": ["ONLINE"]}}}
    answer = client.post(f"/work_pools/{pool}/workers/filter", json=body)
    if answer.status_code == httpx.codes.NOT_FOUND:
        return set()
    answer.raise_for_status()
    return {found["name"] for found in answer.json()} - {worker}


def _in_states(client: httpx.Client, pool: str, states: Sequence[str]) -> Iterator[dict[str, Any]]:
    offset = 0
    while True:
        body = {
            "work_pools": {"name": {"any_": [pool]}},
            "flow_runs": {"state": {"type": {"any_": list(states)}}},
            "sort": "START_TIME_DESC",
            "limit": PAGE,
            "offset": offset,
        }
        answer = client.post("/flow_runs/filter", json=body)
        answer.raise_for_status()
        page = answer.json()
        yield from page
        if len(page) < PAGE:
            return
        offset += PAGE


def _set_state(client: httpx.Client, run: str, to: str, *, because: str = "its worker ended") -> None:
    state: dict[str, Any] = {"type": to, "message": "its worker ended without it"}
    if to == "SCHEDULED":
        state |= {
            "name": "AwaitingRetry",
            "message": f"{because}; it goes on from its last committed step",
            "state_details": {"scheduled_time": datetime.now(UTC).isoformat()},
        }
    client.post(f"/flow_runs/{run}/set_state", json={"state": state, "force": True}).raise_for_status()
