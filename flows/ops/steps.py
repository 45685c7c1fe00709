"""The pull steps of prefect.yaml. They prepare the process of a worker before it runs a deployed flow."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.logging.loggers import flow_run_logger
from prefect.states import Failed

from flows.configs.overrides import ConfigError
from flows.ops.processes import FLOW_RUN_ENV
from flows.ops.schedules import check_names, pause_bad_schedules, read_json_inputs


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
            if flow_run.auto_scheduled:
                pause_bad_schedules(client._client)
            # the exit status 0: the worker would report any other one as a crash
            raise SystemExit(0) from error
        if parameters != flow_run.parameters:
            # Prefect reads the flow run again after the pull steps
            client.update_flow_run(flow_run.id, parameters=parameters)
    return {}


def _log_error(flow_run: FlowRun, message: str) -> None:
    """Writes the message into the log of the flow run, where its page shows it."""
    flow_run_logger(flow_run).error(message)
