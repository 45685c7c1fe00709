"""Tests, on a real server, of the runs that the end of `ostinato up` leaves due."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from flows.ops.reconcile import fail_runs_that_never_began

POOL = "never-began"
ERROR = "Process exited with status code: 1. Process exited with a general error."
OLD_ERROR = "Flow run process exited with non-zero status code 1."
KILLED = "Process exited with status code: -9. Process was killed."


def run_with(api: httpx.Client, *history: tuple[str, str], tag: str = "ostinato") -> str:
    """A flow run of the pool that was in these states (type, message), one after the other."""
    api.post("/work_pools/", json={"name": POOL, "type": "process"})
    flow = api.post("/flows/", json={"name": "never-began"}).json()["id"]
    body = {"name": "never-began", "flow_id": flow, "work_pool_name": POOL}
    deployment = api.post("/deployments/", json=body).raise_for_status().json()["id"]
    path = f"/deployments/{deployment}/create_flow_run"
    run = api.post(path, json={"tags": [tag]}).raise_for_status().json()["id"]
    for kind, message in history:
        state: dict[str, Any] = {"type": kind, "message": message}
        if kind == "SCHEDULED":
            state["name"] = "AwaitingRetry"
        api.post(f"/flow_runs/{run}/set_state", json={"state": state, "force": True}).raise_for_status()
    return str(run)


AGAIN = ("SCHEDULED", "it crashed")


@pytest.mark.parametrize(
    ("history", "ends_as"),
    [
        ([("CRASHED", ERROR), AGAIN, ("PENDING", ""), ("CRASHED", ERROR), AGAIN], "FAILED"),
        ([("CRASHED", OLD_ERROR), AGAIN, ("PENDING", ""), ("CRASHED", OLD_ERROR)], "FAILED"),
        ([], "SCHEDULED"),
        ([("CRASHED", ERROR), AGAIN], "SCHEDULED"),
        ([("CRASHED", KILLED), AGAIN, ("CRASHED", KILLED), AGAIN], "SCHEDULED"),
        ([("RUNNING", ""), ("CRASHED", ERROR), AGAIN, ("RUNNING", ""), ("CRASHED", ERROR), AGAIN], "SCHEDULED"),
    ],
    ids=["two errors", "crashed twice", "new", "one error", "killed twice", "an interrupted training"],
)
def test_only_a_process_that_never_reaches_its_flow_is_given_up(
    api: httpx.Client, prefect_server: str, history: list[tuple[str, str]], ends_as: str
) -> None:
    run = run_with(api, *history)
    name = api.get(f"/flow_runs/{run}").json()["name"]
    expected = [f"{name}: its process never reached the flow, is failed"] if ends_as == "FAILED" else []
    assert fail_runs_that_never_began(prefect_server, POOL) == expected
    assert fail_runs_that_never_began(prefect_server, POOL) == []
    state = api.get(f"/flow_runs/{run}").json()["state"]
    assert state["type"] == ends_as
    if expected:
        assert state["message"].startswith("its process ended 2 times with an error before the flow began; the log")
    api.delete(f"/flow_runs/{run}")


def test_runs_of_others_are_left_alone(api: httpx.Client, prefect_server: str) -> None:
    run = run_with(api, ("CRASHED", ERROR), AGAIN, ("CRASHED", ERROR), AGAIN, tag="theirs")
    assert fail_runs_that_never_began(prefect_server, POOL) == []
    assert api.get(f"/flow_runs/{run}").json()["state"]["type"] == "SCHEDULED"
    api.delete(f"/flow_runs/{run}")
