"""Tests of how a flow run fails: its state and its log have the message of the error, and the caller gets the error."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, Field, model_validator

from flows.configs.forms import FormConfig
from flows.configs.overrides import ConfigError
from flows.runs.checked_flow import checked_flow
from storage.errors import AccessDenied


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
        answer = httpx.post(f"{api_url}/logs/filter", json=body, trust_env=False)
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
