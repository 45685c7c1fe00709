"""The pull steps of prefect.yaml. They prepare the process of a worker before it runs a deployed flow."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.logging.loggers import flow_run_logger
from prefect.states import Failed

from flows.configs.overrides import ConfigError
from flows.ops.processes import FLOW_RUN_ENV

INPUT_KIND = "__prefect_kind"
"""Key by which Prefect marks a value that its form has as text: {"__prefect_kind": "json", "value": "<JSON>"}."""
REMEDY = "correct the parameters of the schedule (or of the run) on the deployment's page, with the form or as JSON"


def work_in(folder: str) -> dict[str, str]:
    """Changes to the folder that was deployed from, so that relative paths in configs start there.

    If this machine does not have the folder, the working directory stays as it is. Prefect's own step would fail.
    """
    if Path(folder).is_dir():
        os.chdir(folder)
    # Prefect runs the hooks of a crashed run by a script in its folder prefect/runner. Python would search that folder
    # first, and find its storage.py in place of our package.
    os.environ["PYTHONSAFEPATH"] = "1"
    return {"directory": os.getcwd()}


def check_parameters() -> dict[str, Any]:
    """Reads JSON text in the parameters of this flow run, and fails the flow run if it has not the flow's parameters.

    Prefect's server does both for a run that a person starts, and neither for a run that a schedule starts. The process
    of such a run would end before the flow begins, which counts as a crash, and would be started again and again.
    """
    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_run(os.environ[FLOW_RUN_ENV])  # type: ignore[arg-type]  # a UUID as text
        if flow_run.deployment_id is None:
            return {}
        schema = client.read_deployment(flow_run.deployment_id).parameter_openapi_schema or {}
        try:
            parameters = read_json_inputs(flow_run.parameters)
            check_names(parameters, schema)
        except ConfigError as error:
            _log_error(flow_run, str(error))
            client.set_flow_run_state(flow_run.id, Failed(message=str(error)), force=True)
            # the exit status 0: the worker would report any other one as a crash
            raise SystemExit(0) from error
        if parameters != flow_run.parameters:
            # Prefect reads the flow run again after the pull steps
            client.update_flow_run(flow_run.id, parameters=parameters)
    return {}


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


def _log_error(flow_run: FlowRun, message: str) -> None:
    """Writes the message into the log of the flow run, where its page shows it."""
    flow_run_logger(flow_run).error(message)
