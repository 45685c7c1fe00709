"""Tests of how a flow run fails: its state and its log have the message of the error, and the caller gets the error."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from pydantic import BaseModel, Field, model_validator

from flows.configs.forms import FormConfig
from flows.configs.overrides import ConfigError
from flows.ops.local_server import server_environment, use_server
from flows.runs.checked_flow import checked_flow
from storage.errors import AccessDenied
from tests.fixtures.prefect import prefect_client
from tests.fixtures.waiting import wait_until


class Config(FormConfig):
    steps: int = Field(2, ge=1)
    batch: int = 8
    title: str = "a small run"

    @model_validator(mode="after")
    def _fits(self) -> Config:
        if self.batch % 4:
            raise ValueError(f"batch={self.batch} splits a group; use a multiple of 4")
        return self


class OtherConfig(BaseModel):
    steps: int = 2


@checked_flow(name="checked", flow_run_name="{config.title}")
async def checked(config: Config) -> dict[str, Any]:
    """Returns its number of steps."""
    if config.steps == 3:
        raise AccessDenied("the store denies access; check the credentials")
    if config.steps == 4:
        raise ZeroDivisionError("a defect")
    return {"steps": config.steps}


def log_of(api_url: str, message: str) -> list[str]:
    """The log of the flow runs of this module, once it has the message."""
    deadline = time.monotonic() + 30
    lines: list[str] = []
    while time.monotonic() < deadline and not any(message in line for line in lines):
        body = {"sort": "TIMESTAMP_DESC", "limit": 50}
        answer = prefect_client(api_url).post("/logs/filter", json=body)
        lines = [entry["message"] for entry in answer.raise_for_status().json()]
        time.sleep(0.2)
    return lines


async def test_a_config_that_fits_is_passed_on(prefect_server: str) -> None:
    assert await checked(Config(steps=5)) == {"steps": 5}
    assert await checked({"steps": 5}) == {"steps": 5}  # type: ignore[arg-type]  # as a worker passes it


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"batch": 6}, "the config does not fit: batch=6 splits a group; use a multiple of 4"),
        ({"steps": 0}, "the config does not fit: steps: Input should be greater than or equal to 1 (given: 0)"),
        ({"stepps": 1}, "the config does not fit: stepps: unknown key; did you mean 'steps'?"),
        (
            OtherConfig(),
            "the config does not fit: given OtherConfig(steps=2); expected a group of keys (steps, batch, title)",
        ),
        ({"steps": 3}, "the store denies access; check the credentials"),
    ],
    ids=["cross-check", "bound", "unknown key", "a config of another flow", "error of a class of ours"],
)
async def test_the_state_is_the_message(prefect_server: str, config: Any, message: str) -> None:
    state = await checked(config, return_state=True)  # type: ignore[arg-type, call-overload]
    assert (state.name, state.message) == ("Failed", message)
    log = log_of(prefect_server, message)
    assert message in log
    assert not any("Traceback" in line for line in log if message in line)
    error = AccessDenied if config == {"steps": 3} else ConfigError
    with pytest.raises(error) as raised:
        await checked(config)  # type: ignore[arg-type]
    assert str(raised.value) == message


async def test_a_defect_keeps_its_traceback(prefect_server: str) -> None:
    state = await checked(Config(steps=4), return_state=True)  # type: ignore[call-overload]
    assert state.message == "Flow run encountered an exception: ZeroDivisionError: a defect"
    with pytest.raises(ZeroDivisionError):
        await checked(Config(steps=4))


def test_the_flow_is_the_one_that_was_written() -> None:
    assert checked.fn.__name__ == "checked"
    assert checked.description == "Returns its number of steps."
    assert list(checked.parameters.properties) == ["config"]
    assert checked.on_crashed_hooks


# -- a Prefect server that is away ----------------------------------------------------------------------------


class Server:
    """A real Prefect server that a test stops, and starts again on the same port and database."""

    def __init__(self, home: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.home = home
        self.api_url = f"http://127.0.0.1:{self.port}/api"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self.port)]
        self.process = subprocess.Popen(
            command, env=server_environment(self.home, self.port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until(self.is_healthy, seconds=120)

    def is_healthy(self) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.api_url}/health", trust_env=False).status_code == 200
        return False

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr("flows.ops.local_server.SETTLE_SECONDS", 0.5)
    server = Server(tmp_path)
    with use_server(server.api_url):
        yield server
    server.stop()


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Prefect's client tries again once, after two seconds, instead of for a minute."""
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 1}):
        yield


def flow_that(act: Callable[[], None], error: Exception | None = None) -> Any:
    @checked_flow(name="outage", flow_run_name="{config.title}")
    async def flow(config: Config) -> dict[str, Any]:
        act()
        if error is not None:
            raise error
        return {"steps": config.steps}

    return flow


@pytest.mark.slow
async def test_a_server_that_is_away_at_the_end_costs_only_its_page(
    server: Server, patience: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert await flow_that(server.stop)(Config(steps=7)) == {"steps": 7}
    assert "the Prefect server does not record flow run 'outage': ConnectError" in caplog.text
    # it is back, and the same command again ends as before
    server.start()
    assert await flow_that(lambda: None)(Config(steps=7)) == {"steps": 7}
    # the caller of a flow that fails gets the error of the flow, and not that of the connection
    for error in (AccessDenied("the store denies access"), ZeroDivisionError("a defect")):
        with pytest.raises(type(error), match=str(error)):
            await flow_that(server.stop, error)(Config())
        server.start()


@pytest.mark.slow
async def test_a_server_that_is_away_for_seconds_has_the_end(server: Server) -> None:
    def restart() -> None:
        server.stop()
        threading.Timer(3.0, server.start).start()

    assert await flow_that(restart)(Config(title="short outage")) == {"steps": 2}
    body = {"flow_runs": {"name": {"any_": ["short outage"]}}}
    answer = prefect_client(server.api_url).post("/flow_runs/filter", json=body)
    assert [run["state"]["name"] for run in answer.json()] == ["Completed"]


@pytest.mark.slow
async def test_a_child_run_is_started_when_the_server_is_back(
    server: Server, patience: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.runs.checked_flow.START_INTERVAL", 0.5)

    @checked_flow(name="parent")
    async def parent(config: Config) -> dict[str, Any]:
        server.stop()
        threading.Timer(8.0, server.start).start()
        return await flow_that(lambda: None)(Config(steps=5))  # type: ignore[no-any-return]

    assert await parent(Config()) == {"steps": 5}


@pytest.mark.slow
async def test_a_flow_that_cannot_begin_fails_at_once(server: Server, patience: None) -> None:
    server.stop()
    began = time.monotonic()
    with pytest.raises((httpx.ConnectError, RuntimeError)):
        await flow_that(lambda: None)(Config())
    assert time.monotonic() - began < 30


async def test_a_failed_request_of_the_flow_is_not_blamed_on_the_server(
    prefect_server: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(httpx.ReadTimeout, match="the grader is slow"):
        await flow_that(lambda: None, httpx.ReadTimeout("the grader is slow"))(Config())
    assert "does not record" not in caplog.text
