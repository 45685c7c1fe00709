"""Tests of the reconciliation of a dead worker's runs. A transport replaces the Prefect server."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from flows.ops import reconcile as module
from flows.ops.reconcile import reconcile, reschedule_crashed_runs


def a_run(number: int, state: str) -> dict[str, Any]:
    return {
        "id": f"id-{number}", "name": f"run {number}", "state_id": f"state-{number}", "state_type": state,
        "state_name": state.title(),
    }  # fmt: skip


class Server:
    def __init__(self, runs: list[dict[str, Any]], workers: list[str]) -> None:
        self.runs, self.workers = runs, workers
        self.states: dict[str, Any] = {}
        self.forced: set[bool] = set()
        self.changed: set[str] = set()
        """Runs whose state a person changes after they were listed."""

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if request.method == "GET":
            run = path.split("/")[3]
            state = "a later state" if run in self.changed else run.replace("id", "state")
            return httpx.Response(200, json={"id": run, "state_id": state})
        body = json.loads(request.content)
        if path.endswith("/workers/filter"):
            assert path == "/api/work_pools/pool/workers/filter"
            return httpx.Response(200, json=[{"name": name} for name in self.workers])
        if path == "/api/flow_runs/filter":
            assert body["work_pools"] == {"name": {"any_": ["pool"]}}
            state_types = body["flow_runs"]["state"]["type"]["any_"]
            matching = [run for run in self.runs if run["state_type"] in state_types]
            return httpx.Response(200, json=matching[body["offset"] : body["offset"] + body["limit"]])
        self.forced.add(body["force"])
        self.states[path.split("/")[3]] = body["state"]
        return httpx.Response(201, json={})


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Any:
    real = httpx.Client

    def play(server: Server) -> None:
        monkeypatch.setattr(
            module.httpx, "Client", lambda **options: real(transport=httpx.MockTransport(server), **options)
        )

    return play


RUNS = [
    a_run(0, "RUNNING"),
    a_run(1, "PENDING"),
    a_run(2, "CANCELLING"),
    a_run(3, "CRASHED"),
    a_run(4, "CRASHED"),
    a_run(5, "COMPLETED"),
    a_run(6, "PAUSED"),
]


def told(server: Server) -> dict[str, str]:
    return {run: state["type"] for run, state in server.states.items()}


def test_the_only_workers_runs_are_due_again_or_cancelled(played: Any) -> None:
    server = Server(RUNS, ["mine"])
    played(server)
    lines = reconcile("http://server/api", "pool", worker="mine", seen={"id-3"})
    assert told(server) == {"id-0": "SCHEDULED", "id-1": "SCHEDULED", "id-2": "CANCELLED", "id-3": "SCHEDULED"}
    assert server.states["id-0"]["name"] == "AwaitingRetry"
    assert server.states["id-0"]["state_details"]["scheduled_time"]
    assert server.forced == {True}
    assert lines[0] == "run 0: was Running, is scheduled"


def test_where_others_serve_the_pool_only_runs_whose_processes_were_seen_are_touched(played: Any) -> None:
    server = Server(RUNS, ["mine", "theirs"])
    played(server)
    reconcile("http://server/api", "pool", worker="mine", seen={"id-0", "id-2"})
    assert told(server) == {"id-0": "SCHEDULED", "id-2": "CANCELLED"}


def test_a_state_that_a_person_has_set_since_the_list_was_read_is_kept(played: Any) -> None:
    server = Server(RUNS, ["mine"])
    server.changed = {"id-0", "id-2"}
    played(server)
    lines = reconcile("http://server/api", "pool", worker="mine", seen=set())
    assert told(server) == {"id-1": "SCHEDULED"}
    assert lines == ["run 1: was Pending, is scheduled"]


def test_every_page_is_read(played: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE_SIZE", 2)
    server = Server([a_run(number, "RUNNING") for number in range(5)], [])
    played(server)
    assert len(reconcile("http://server/api", "pool", worker="mine", seen=set())) == 5


def test_a_server_that_refuses_is_an_error_to_try_again(played: Any) -> None:
    played(lambda request: httpx.Response(503))
    with pytest.raises(httpx.HTTPStatusError):
        reconcile("http://server/api", "pool", worker="mine", seen=set())


@pytest.mark.parametrize(
    ("seconds", "tag", "state", "back"),
    [
        (119, "ostinato", "CRASHED", False),  # its automation waits for 30 s of silence first
        (121, "ostinato", "CRASHED", True),
        (3601, "ostinato", "CRASHED", False),
        (121, "other", "CRASHED", False),
        (121, "ostinato", "FAILED", False),
    ],
)
def test_a_crash_that_no_automation_answered(played: Any, seconds: int, tag: str, state: str, back: bool) -> None:
    now = datetime(2026, 11, 21, tzinfo=UTC)
    run = a_run(7, state) | {"tags": [tag], "state": {"timestamp": (now - timedelta(seconds=seconds)).isoformat()}}
    server = Server([run], [])
    played(server)
    lines = reschedule_crashed_runs("http://server/api", "pool", now=now)
    assert lines == (["run 7: had crashed, is scheduled"] if back else [])
    assert {run: state["name"] for run, state in server.states.items()} == ({"id-7": "AwaitingRetry"} if back else {})
