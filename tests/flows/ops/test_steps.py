"""Tests of the pull step that checks the parameters of a flow run, on a real server."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from flows.configs.overrides import ConfigError
from flows.ops.processes import FLOW_RUN_ENV
from flows.ops.steps import check_parameters, read_json_inputs

SCHEMA = {"type": "object", "properties": {"config": {"type": "object"}}, "required": ["config"]}
CONFIG = {"run": "x", "algorithm": {"steps": 2}}


def as_json(value: Any) -> dict[str, str]:
    """As Prefect stores a value that a person typed as JSON."""
    return {"__prefect_kind": "json", "value": json.dumps(value)}


@pytest.mark.parametrize(
    ("stored", "parameters"),
    [
        ({"config": CONFIG}, {"config": CONFIG}),
        (as_json({"config": CONFIG}), {"config": CONFIG}),
        ({"config": as_json(CONFIG)}, {"config": CONFIG}),
        ({"config": {"run": "x", "algorithm": as_json({"steps": 2})}}, {"config": CONFIG}),
        ({"config": {"run": {"__prefect_kind": "none", "value": "x"}}}, {"config": {"run": "x"}}),
        ({"config": "of the deployment"} | as_json({"config": CONFIG}), {"config": CONFIG}),
        ({"config": CONFIG, "__prefect_kind": "json"}, {"config": CONFIG}),
        ({"__prefect_kind": "json"}, {}),
    ],
    ids=["plain", "whole", "config", "group", "none", "over the deployment's", "deployment's alone", "empty"],
)
def test_json_text_is_read_wherever_it_stands(stored: dict[str, Any], parameters: dict[str, Any]) -> None:
    assert read_json_inputs(stored) == parameters


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"__prefect_kind": "json", "value": '{"config": '}, "the parameters: '{\"config\": ' is not JSON"),
        ({"config": {"__prefect_kind": "json", "value": "{,}"}}, "config: '{,}' is not JSON"),
        (as_json([1]), "the parameters are [1], expected an object"),
        ({"config": {"__prefect_kind": "workspace_variable", "variable_name": "x"}}, "kind 'workspace_variable'"),
    ],
)
def test_input_that_cannot_be_read_is_named(stored: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        read_json_inputs(stored)
    assert "correct the parameters of the schedule" in str(refused.value)


def scheduled_run(api: httpx.Client, parameters: dict[str, Any]) -> str:
    """A flow run with these parameters as they are, which is how a schedule makes one."""
    flow = api.post("/flows/", json={"name": "stepped"}).json()["id"]
    body = {"name": "stepped", "flow_id": flow, "parameter_openapi_schema": SCHEMA}
    deployment = api.post("/deployments/", json=body).raise_for_status().json()["id"]
    path = f"/deployments/{deployment}/create_flow_run"
    run = api.post(path, json={"parameters": {"config": {}}}).raise_for_status().json()["id"]
    api.patch(f"/flow_runs/{run}", json={"parameters": parameters}).raise_for_status()
    return str(run)


def test_json_input_of_a_schedule_becomes_the_parameters_of_the_run(
    api: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = scheduled_run(api, as_json({"config": CONFIG}))
    monkeypatch.setenv(FLOW_RUN_ENV, run)
    for _ in range(2):
        assert check_parameters() == {}
        body = api.get(f"/flow_runs/{run}").json()
        assert body["parameters"] == {"config": CONFIG}
        assert body["state_type"] == "SCHEDULED"


@pytest.mark.parametrize(
    ("parameters", "given"),
    [({"__prefect_kind": "json"}, "none"), ({}, "none"), ({"confg": CONFIG}, "confg")],
    ids=["empty text", "nothing", "another name"],
)
def test_parameters_that_the_flow_does_not_have_fail_the_run_for_good(
    api: httpx.Client, monkeypatch: pytest.MonkeyPatch, parameters: dict[str, Any], given: str
) -> None:
    run = scheduled_run(api, parameters)
    monkeypatch.setenv(FLOW_RUN_ENV, run)
    with pytest.raises(SystemExit) as ended:
        check_parameters()
    assert ended.value.code == 0  # any other exit status would be a crash, which is started again
    state = api.get(f"/flow_runs/{run}").json()["state"]
    assert (state["type"], state["name"]) == ("FAILED", "Failed")
    assert state["message"].startswith(f"the parameters of this run are {given}, and the flow takes config; correct ")
