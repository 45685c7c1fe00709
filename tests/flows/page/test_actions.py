"""Cancel, retry, fork and verify on a run's page: with two windows, and with what is not allowed."""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.states import Failed, Running
from starlette.testclient import TestClient

from flows.page import run_actions
from flows.page.run_actions import RunActions
from flows.page.run_data import RunReader
from storage.chain.listing import list_runs
from storage.store.objects import open_store
from tests.fixtures.waiting import wait_until
from tests.flows.page.conftest import page_client


@pytest.fixture
def page(prefect_server: str, tmp_path: Path) -> TestClient:
    return page_client(tmp_path / "store", prefect_server)


def flow_run_in(state: Any) -> FlowRun:
    """A flow run of a deployment in a state."""
    with get_client(sync_client=True) as client:
        flow = client.create_flow_from_name("grpo")
        deployment = client.create_deployment(flow, name="grpo")
        made = client.create_flow_run_from_deployment(deployment, parameters={"config": {"run": "mine"}})
        client.set_flow_run_state(made.id, state, force=True)
        return client.read_flow_run(made.id)


def states(flow_run: UUID) -> list[StateType]:
    with get_client(sync_client=True) as client:
        return [state.type for state in client.read_flow_run_states(flow_run)]


def press(page: TestClient, action: str, flow_run: FlowRun, seen: UUID | None = None) -> tuple[int, str]:
    assert flow_run.state is not None
    sent = {"seen": str(seen or flow_run.state.id)}
    answer = page.post(f"/run-actions/{action}/{flow_run.id}", data=sent)
    return answer.status_code, answer.text


def test_of_two_windows_that_cancel_at_once_one_cancels(page: TestClient) -> None:
    flow_run = flow_run_in(Running())
    assert "Cancel</button>" in page.get(f"/runs/{flow_run.id}").text
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: press(page, "cancel", flow_run), range(2)))
    assert sorted(status for status, _ in answers) == [303, 409]
    assert "has changed since this page was shown" in next(text for status, text in answers if status == 409)
    assert len([kind for kind in states(flow_run.id) if kind in (StateType.CANCELLING, StateType.CANCELLED)]) == 1


def test_of_two_windows_that_retry_at_once_one_retries(page: TestClient) -> None:
    flow_run = flow_run_in(Failed(message="no more disk"))
    text = page.get(f"/runs/{flow_run.id}").text
    assert "Retry</button>" in text and "no more disk" in text
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: press(page, "retry", flow_run), range(2)))
    assert sorted(status for status, _ in answers) == [303, 409]
    assert states(flow_run.id)[-1] == StateType.SCHEDULED and states(flow_run.id).count(StateType.SCHEDULED) == 2


def test_an_old_window_does_not_cancel_what_another_one_has_retried(page: TestClient) -> None:
    flow_run = flow_run_in(Running())
    assert flow_run.state is not None
    old = flow_run.state.id
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run.id, Failed(), force=True)
        flow_run = client.read_flow_run(flow_run.id)
    assert press(page, "retry", flow_run)[0] == 303
    status, text = press(page, "cancel", flow_run, seen=old)
    assert status == 409 and "It was not cancelled" in text
    assert states(flow_run.id)[-1] == StateType.SCHEDULED


def test_what_a_state_does_not_allow_is_refused(page: TestClient) -> None:
    running = flow_run_in(Running())
    assert press(page, "retry", running)[0] == 409
    assert press(page, "explode", running)[0] == 404
    assert page.get(f"/run-actions/cancel/{running.id}").status_code in (404, 405)


def test_a_run_of_another_server_says_where_it_is_cancelled(client: TestClient) -> None:
    answer = client.post("/run-actions/cancel/toy", data={"seen": "x"})
    assert answer.status_code == 409 and "has changed" in answer.text  # it is finished
    with page_client(client.app.state.page.settings.storage) as alone:  # type: ignore[attr-defined]
        answer = alone.post("/run-actions/cancel/toy", data={"seen": "x"})
    assert answer.status_code == 409 and "Ctrl-C" in answer.text


def test_a_fork_leads_to_the_form_with_its_config(client: TestClient) -> None:
    answer = client.post("/run-actions/fork/toy", data={"run": "toy-2", "step": "2"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/start?copy=toy-2&fork=1")
    form = client.get("/start?copy=toy-2&fork=1").text
    assert re.search(r'name="v\.run"[^>]* value="toy-2"', form)
    store = open_store(client.app.state.page.settings.storage)  # type: ignore[attr-defined]
    assert "toy-2" in list_runs(store)
    assert "<td>Fork</td>" in client.get("/runs").text
    # a step that the run does not have, and a key that is none
    assert client.post("/run-actions/fork/toy", data={"run": "toy-3", "step": "9"}).status_code == 404
    assert client.post("/run-actions/fork/toy", data={"run": "../x", "step": "1"}).status_code == 400


def test_a_verification_runs_as_a_command_and_shows_its_result(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = '{"chains": [{"chain": "0-grpo/policy", "steps": 4, "redone": 2, "problems": []}]}'
    real = run_actions.subprocess.Popen
    commands: list[list[str]] = []

    def popen(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return real(["/bin/sh", "-c", f"until [ -e {tmp_path}/end ]; do sleep 0.05; done; echo '{report}'"], **options)

    monkeypatch.setattr(run_actions.subprocess, "Popen", popen)
    assert client.post("/run-actions/verify/toy", data={"extent": "one"}).status_code == 303
    assert "Verifying" in client.get("/runs/toy").text and "every 5s" in client.get("/runs/toy").text
    assert client.post("/run-actions/verify/toy", data={"extent": "one"}).status_code == 409
    (tmp_path / "end").touch()
    wait_until(lambda: "Verifying" not in client.get("/run-parts/live/toy").text)
    assert "0-grpo/policy: equal to the byte, 2 of 4 steps redone" in client.get("/runs/toy").text
    assert commands[0][3] == "verify" and commands[0][-4:] == ["--sample", "1", "--", "toy"]


def test_a_verification_that_is_not_looked_at_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = run_actions.subprocess.Popen
    # more than a pipe holds, on both streams
    print_much = "import sys; [stream.write('x' * 300_000) for stream in (sys.stderr, sys.stdout)]"
    start = lambda command, **options: real([sys.executable, "-S", "-c", print_much], **options)  # noqa: E731
    monkeypatch.setattr(run_actions.subprocess, "Popen", start)
    page: Any = SimpleNamespace(settings=SimpleNamespace(storage=str(tmp_path)))
    actions = RunActions(page, RunReader(page))
    actions.verify("first", whole=True)
    process = actions._verifications["first"][0]
    wait_until(lambda: process.poll() is not None)
    wait_until(lambda: actions.verification("first") != [])
    actions.verify("second", whole=True)
    (line,) = actions.verification("first") or []
    assert line.startswith("The verification failed: xxx")
    actions.close()
