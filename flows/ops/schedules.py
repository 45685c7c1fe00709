"""Pauses the schedules of deployments whose runs can only fail.

Prefect's server stores any parameters with a schedule and starts runs with them until somebody looks. So an active
schedule is paused if its parameters are not those of the flow, if its config does not fit, or if its last three runs
failed with the same message. The description of the deployment, which its page shows first, then says so.

`ostinato deploy`, the supervisor of `ostinato up` and the end of a failed run call `pause_bad_schedules`. It does not
import Prefect, which takes seconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import httpx
from pydantic import ValidationError

from flows.configs.overrides import ConfigError, validation_lines
from flows.ops.services import TAG

INPUT_KIND = "__prefect_kind"
"""Key by which Prefect marks a value that its form has as text: {"__prefect_kind": "json", "value": "<JSON>"}."""
REMEDY = "correct the parameters of the schedule (or of the run) on the deployment's page, with the form or as JSON"
EQUAL_FAILURES = 3
"""Number of runs in a row that fail with the same message, after which their schedule is paused."""
RECENT_RUNS = 50
"""Number of the latest runs of a deployment among which those of a schedule are looked for."""
NOTICE = "**Paused schedule: "
"""Beginning of the first line of a deployment's description that says why a schedule is paused."""
SCHEDULE_PAUSED = "ostinato.schedule.paused"
_NUMBERS = re.compile(r"[0-9a-f]{8,}|\d+")
"""Ids, times and counts, in which the messages of equal failures differ."""


def pause_bad_schedules(client: httpx.Client) -> list[str]:
    """Pauses the active schedules of our deployments whose runs can only fail; returns one line for each.

    `client` has the url of the Prefect API as its base. The notice about a schedule goes when the schedule is active
    again, or is deleted. Raises httpx.HTTPError.
    """
    deployments = _post(client, "/deployments/filter", {"deployments": {"tags": {"all_": [TAG]}}})
    lines = []
    for deployment in deployments:
        active = [schedule for schedule in deployment["schedules"] if schedule["active"]]
        notices = []
        for schedule in active:
            reason = schedule_problem(deployment, schedule["parameters"]) or _equal_failures(
                client, deployment, schedule
            )
            if reason:
                notices.append(_pause(client, deployment, schedule, reason))
        inactive = [schedule for schedule in deployment["schedules"] if not schedule["active"]]
        _describe(client, deployment, notices, inactive)
        lines += notices
    return lines


def check_schedules_of_file(deployments: Sequence[Mapping[str, Any]]) -> None:
    """Raises ConfigError for the active schedules in the entries of a prefect.yaml whose runs would be refused."""
    problems = []
    for deployment in deployments:
        for schedule in deployment.get("schedules") or ():
            problem = schedule_problem(deployment, schedule.get("parameters")) if schedule.get("active", True) else None
            if problem:
                problems.append(f"the schedule {_name(schedule, schedule)!r} of {deployment['name']!r}: {problem}")
    if problems:
        raise ConfigError("\n".join([*problems, "give each schedule the parameters of its flow, or set active: false"]))


def schedule_problem(deployment: Mapping[str, Any], parameters: dict[str, Any] | None) -> str | None:
    """Why the runs of a schedule with these parameters would be refused; None if they would not.

    `deployment` has the fields `entrypoint`, `parameters` and `parameter_openapi_schema` of Prefect's API, or is an
    entry of a prefect.yaml. The config of a flow that is not of this package is not checked, only the names of its
    parameters."""
    # imported here, since the supervisor needs it only for a deployment with an active schedule
    from flows.cli.config import CONFIGS

    module, _, flow = (deployment.get("entrypoint") or "").rpartition(".")
    config_type = CONFIGS.get(flow) if module == f"flows.{flow}" else None
    schema = deployment.get("parameter_openapi_schema") or {}
    if config_type is not None:
        schema = {"properties": {"config": {}}, "required": ["config"]}
    try:
        values = read_json_inputs({**(deployment.get("parameters") or {}), **(parameters or {})})
        if schema:
            check_names(values, schema)
        if config_type is not None:
            config_type.model_validate(values["config"])
    except ConfigError as error:
        return str(error)
    except ValidationError as error:
        assert config_type is not None
        lines = validation_lines(error, config_type, values["config"], remedy="give it")
        return f"the config does not fit: {'; '.join(lines)}"
    return None


def read_json_inputs(parameters: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters with the value of each marked JSON text in its place. Raises ConfigError.

    If the parameters as a whole are such a text, its values replace those of the deployment.
    """
    marked = {name: value for name, value in parameters.items() if name in (INPUT_KIND, "value")}
    if INPUT_KIND not in marked:
        return {name: _read_value(value, name) for name, value in parameters.items()}
    others = {name: value for name, value in parameters.items() if name not in marked}
    values = _read_value(marked, "the parameters")
    if not isinstance(values, dict):
        raise ConfigError(f'the parameters are {values!r:.80}, expected an object, {{"config": {{…}}}}; {REMEDY}')
    return read_json_inputs(others) | values


def check_names(parameters: dict[str, Any], schema: dict[str, Any]) -> None:
    """Raises ConfigError for parameters that the flow does not have, and for required ones that are missing."""
    known = list(schema.get("properties", {}))
    unknown = sorted(parameters.keys() - set(known))
    missing = [name for name in schema.get("required", []) if name not in parameters]
    if not unknown and not missing:
        return
    names = ", ".join(sorted(parameters)) or "none"
    raise ConfigError(f"the parameters of this run are {names}, and the flow takes {', '.join(known)}; {REMEDY}")


def _read_value(value: Any, name: str) -> Any:
    """The value with marked JSON texts replaced by what they say. `name` is its name in messages."""
    if isinstance(value, list):
        return [_read_value(item, f"{name}.{index}") for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if INPUT_KIND not in value:
        return {key: _read_value(item, f"{name}.{key}") for key, item in value.items()}
    kind = value[INPUT_KIND]
    if kind not in ("json", "none"):
        raise ConfigError(f"{name} has input of the kind {kind!r}, which schedules do not resolve; {REMEDY}")
    text = value.get("value", {})
    if kind == "none" or not isinstance(text, str):
        return _read_value(text, name)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: {text!r:.80} is not JSON ({error}); {REMEDY}") from error


def _equal_failures(client: httpx.Client, deployment: dict[str, Any], schedule: dict[str, Any]) -> str | None:
    """The message with which the last runs of a schedule failed, if it was the same for EQUAL_FAILURES of them. Runs
    that were due before the schedule was last changed do not count, so that it can be activated again."""
    body = {
        "deployments": {"id": {"any_": [deployment["id"]]}},
        "flow_runs": {
            "state": {"type": {"any_": ["FAILED", "COMPLETED"]}},
            "expected_start_time": {"after_": schedule["updated"]},
        },
        "sort": "EXPECTED_START_TIME_DESC",
        "limit": RECENT_RUNS,
    }
    runs = _post(client, "/flow_runs/filter", body)
    last = [run for run in runs if (run["created_by"] or {}).get("id") == schedule["id"]][:EQUAL_FAILURES]
    messages = {_NUMBERS.sub("#", run["state"]["message"] or "") for run in last}
    if len(last) < EQUAL_FAILURES or len(messages) > 1 or any(run["state_type"] != "FAILED" for run in last):
        return None
    return f"its last {EQUAL_FAILURES} runs failed in the same way: {last[0]['state']['message']}"


def _pause(client: httpx.Client, deployment: dict[str, Any], schedule: dict[str, Any], reason: str) -> str:
    """Pauses the schedule and sends the event about it; returns the line that says so."""
    path = f"/deployments/{deployment['id']}/schedules/{schedule['id']}"
    # the server would clear parameters that are not sent
    client.patch(path, json={"active": False, "parameters": schedule["parameters"]}).raise_for_status()
    name = _name(schedule, schedule["schedule"])
    payload = {"deployment": deployment["name"], "schedule": name, "reason": reason}
    event = {
        "id": str(uuid4()),
        "occurred": datetime.now(UTC).isoformat(),
        "event": SCHEDULE_PAUSED,
        "resource": {
            "prefect.resource.id": f"ostinato.deployment.{deployment['name']}",
            "prefect.resource.name": deployment["name"],
        },
        "payload": payload,
    }
    client.post("/events", json=[event]).raise_for_status()
    return f"{_subject(deployment, schedule)} is paused: {reason}"


def _subject(deployment: Mapping[str, Any], schedule: Mapping[str, Any]) -> str:
    """The subject of the sentence of a notice."""
    return f"the schedule {_name(schedule, schedule['schedule'])!r} of the deployment {deployment['name']!r}"


def _name(schedule: Mapping[str, Any], times: Mapping[str, Any]) -> str:
    """The name of a schedule or, if it has none, when it is due."""
    return str(schedule.get("slug") or times.get("cron") or times.get("rrule") or f"every {times.get('interval')} s")


def _describe(
    client: httpx.Client, deployment: dict[str, Any], notices: list[str], inactive: Sequence[Mapping[str, Any]]
) -> None:
    """Puts the notices before the deployment's own description. Earlier ones stay while their schedule is inactive."""
    lines = []
    for notice in notices:
        text = " ".join(notice.split())
        lines.append(f"{NOTICE}{text}** When it is mended, activate the schedule again.")
    still_paused = tuple(f"{NOTICE}{' '.join(_subject(deployment, schedule).split())} " for schedule in inactive)
    other_lines = []
    for line in (deployment["description"] or "").splitlines():
        if line.startswith(still_paused) and line not in lines:
            lines.append(line)
        elif not line.startswith(NOTICE):
            other_lines.append(line)
    description = "\n".join([*lines, *other_lines])
    if description != (deployment["description"] or ""):
        client.patch(f"/deployments/{deployment['id']}", json={"description": description}).raise_for_status()


def _post(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = client.post(path, json=body)
    response.raise_for_status()
    return response.json()  # type: ignore[no-any-return]
