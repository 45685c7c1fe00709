"""Tests, on a real server, of schedules whose runs can only fail: they are paused, and the deployment says why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from flows.configs.overrides import ConfigError
from flows.ops.schedules import check_schedules_of_file, pause_bad_schedules

SFT = {"model": {"key": "m"}, "data": {"train": {"kind": "file", "path": "a.jsonl"}}}
DESCRIPTION = "Supervised fine-tuning."


@pytest.fixture
def deployment(api: httpx.Client) -> Iterator[str]:
    """The id of a deployment of `sft` without a schedule."""
    flow = api.post("/flows/", json={"name": "paused"}).json()["id"]
    body = {
        "name": "paused", "flow_id": flow, "entrypoint": "flows.sft.sft", "tags": ["ostinato"],
        "description": DESCRIPTION, "enforce_parameter_schema": False,
    }  # fmt: skip
    id = api.post("/deployments/", json=body).raise_for_status().json()["id"]
    yield id
    api.delete(f"/deployments/{id}")


def add_schedule(api: httpx.Client, deployment: str, parameters: dict[str, Any]) -> str:
    # once a year, so that the server starts no run of it meanwhile
    body = [{"schedule": {"cron": "0 3 1 1 *"}, "active": True, "slug": "yearly", "parameters": parameters}]
    added = api.post(f"/deployments/{deployment}/schedules", json=body).raise_for_status()
    return str(added.json()[0]["id"])


def is_active(api: httpx.Client, deployment: str) -> bool:
    return bool(api.get(f"/deployments/{deployment}").json()["schedules"][0]["active"])


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({}, "the parameters of this run are none, and the flow takes config"),
        ({"config": {"model": {"key": "m"}}}, "the config does not fit: data: missing; give it"),
        ({"config": {"__prefect_kind": "json", "value": "{,}"}}, "config: '{,}' is not JSON"),
        ({"config": SFT}, None),
        ({"config": {"__prefect_kind": "json", "value": json.dumps(SFT)}}, None),
    ],
    ids=["none", "incomplete", "no JSON", "valid", "valid as text"],
)
def test_a_schedule_without_a_valid_config_is_paused(
    api: httpx.Client, deployment: str, parameters: dict[str, Any], reason: str | None
) -> None:
    add_schedule(api, deployment, parameters)
    lines = pause_bad_schedules(api)
    shown = api.get(f"/deployments/{deployment}").json()["description"]
    assert is_active(api, deployment) == (reason is None)
    if reason is None:
        assert lines == [] and shown == DESCRIPTION
        return
    (line,) = lines
    assert line.startswith(f"the schedule 'yearly' of the deployment 'paused' is paused: {reason}")
    assert shown.startswith(f"**Paused schedule: {line}") and shown.endswith(f"\n{DESCRIPTION}")
    # it stays paused, and is paused again if it is activated as it is; mended, it runs, and the notice goes
    assert pause_bad_schedules(api) == []
    schedule = api.get(f"/deployments/{deployment}").json()["schedules"][0]
    assert schedule["parameters"] == parameters
    path = f"/deployments/{deployment}/schedules/{schedule['id']}"
    api.patch(path, json={"active": True, "parameters": parameters}).raise_for_status()
    assert pause_bad_schedules(api) == lines
    api.patch(path, json={"active": True, "parameters": {"config": SFT}}).raise_for_status()
    assert pause_bad_schedules(api) == [] and is_active(api, deployment)
    assert api.get(f"/deployments/{deployment}").json()["description"] == DESCRIPTION


def runs_of(*outcomes: tuple[str, str]) -> list[dict[str, Any]]:
    """Flow runs of the schedule "s" as the server lists them: newest first."""
    runs = []
    for kind, message in outcomes:
        runs.append({"state_type": kind, "state": {"message": message}, "created_by": {"id": "s"}})
    return runs


DISK = ("FAILED", "run sft-1a2b3c4d/20260101T030000Z: the disk is full after 17 steps")
AGAIN = ("FAILED", "run sft-1a2b3c4d/20270101T030000Z: the disk is full after 3 steps")
OTHER = ("FAILED", "no file at 'a.jsonl'")
DONE = ("COMPLETED", "")


@pytest.mark.parametrize(
    ("runs", "is_paused"),
    [
        (runs_of(DISK, AGAIN, DISK, DONE), True),
        (runs_of(DISK, AGAIN), False),
        (runs_of(DISK, OTHER, DISK), False),
        (runs_of(DONE, DISK, DISK, DISK), False),
        ([*runs_of(DISK, DISK), *({**run, "created_by": None} for run in runs_of(DISK))], False),
    ],
    ids=["three equal", "two", "two kinds", "a success since", "one by hand"],
)
def test_three_equal_failures_pause_a_schedule(runs: list[dict[str, Any]], is_paused: bool) -> None:
    schedule = {
        "id": "s", "active": True, "slug": None, "schedule": {"cron": "0 3 * * *"}, "updated": "2026-01-01T00:00:00Z",
        "parameters": {"config": SFT},
    }  # fmt: skip
    deployment = {
        "id": "d", "name": "sft", "entrypoint": "flows.sft.sft", "parameters": {}, "description": None,
        "schedules": [schedule],
    }  # fmt: skip
    calls: list[tuple[str, str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content)
        calls.append((request.method, path, body))
        if path == "/api/flow_runs/filter":
            # only runs since the schedule was changed count, so that it can be activated again
            assert body["flow_runs"]["expected_start_time"] == {"after_": "2026-01-01T00:00:00Z"}
        answers: dict[str, Any] = {"/api/deployments/filter": [deployment], "/api/flow_runs/filter": runs}
        return httpx.Response(200, json=answers.get(path))

    client = httpx.Client(base_url="http://server/api", transport=httpx.MockTransport(answer))
    lines = pause_bad_schedules(client)
    changes = [(path, body) for method, path, body in calls if method == "PATCH" or path == "/api/events"]
    if not is_paused:
        assert lines == [] and changes == []
        return
    reason = f"its last 3 runs failed in the same way: {DISK[1]}"
    assert lines == [f"the schedule '0 3 * * *' of the deployment 'sft' is paused: {reason}"]
    assert [path for path, _ in changes] == ["/api/deployments/d/schedules/s", "/api/events", "/api/deployments/d"]
    (event,) = changes[1][1]
    assert event["event"] == "ostinato.schedule.paused" and event["payload"]["reason"] == reason


def test_a_notice_stays_while_its_schedule_is_paused() -> None:
    good = {"id": "g", "active": True, "slug": "good", "schedule": {"cron": "0 3 * * *"}, "updated": "2026-01-01"}
    bad = {"id": "b", "active": True, "slug": "bad", "schedule": {"cron": "0 4 * * *"}, "updated": "2026-01-01"}
    good, bad = good | {"parameters": {"config": SFT}}, bad | {"parameters": {}}
    deployment: dict[str, Any] = {
        "id": "d", "name": "sft", "entrypoint": "flows.sft.sft", "parameters": {}, "description": DESCRIPTION,
        "schedules": [good, bad],
    }  # fmt: skip

    def answer(request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content)
        if request.method == "PATCH":
            changed = bad if path.endswith("/schedules/b") else deployment
            changed.update(body)
        return httpx.Response(200, json=[deployment] if path == "/api/deployments/filter" else [])

    client = httpx.Client(base_url="http://server/api", transport=httpx.MockTransport(answer))
    (line,) = pause_bad_schedules(client)
    noticed = deployment["description"]
    assert not bad["active"] and noticed.startswith(f"**Paused schedule: {line}")
    assert pause_bad_schedules(client) == [] and deployment["description"] == noticed
    bad.update(active=True, parameters={"config": SFT})
    assert pause_bad_schedules(client) == [] and deployment["description"] == DESCRIPTION


def test_a_file_with_a_schedule_that_cannot_run_is_refused() -> None:
    entry = {"name": "sft", "entrypoint": "flows.sft.sft", "schedules": [{"cron": "0 3 * * 1", "slug": "weekly"}]}
    with pytest.raises(ConfigError, match=r"the schedule 'weekly' of 'sft': the parameters of this run are none"):
        check_schedules_of_file([entry])
    check_schedules_of_file([entry | {"schedules": [{"cron": "0 3 * * 1", "active": False}]}])
    check_schedules_of_file([entry | {"parameters": {"config": SFT}}])
    # the flow of somebody else
    check_schedules_of_file([entry | {"entrypoint": "mine.py:mine", "parameters": {"size": 3}}])
