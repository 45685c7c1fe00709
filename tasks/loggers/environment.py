"""The environment variables by which a service is configured: those that the service's own package reads, and for
TensorBoard, which reads none, the one that transformers reads."""

from __future__ import annotations

import os
from typing import NamedTuple

from tasks.loggers.base import LoggedRun
from tasks.loggers.services import LoggerName


class Variables(NamedTuple):
    """Names of environment variables of a service. An empty value counts as not set."""

    configured: tuple[str, ...]
    """The service is configured if one of them is set."""
    project: str | None = None
    folder: str | None = None


VARIABLES: dict[LoggerName, Variables] = {
    "wandb": Variables(("WANDB_PROJECT", "WANDB_API_KEY"), "WANDB_PROJECT", "WANDB_DIR"),
    "mlflow": Variables(("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"), "MLFLOW_EXPERIMENT_NAME"),
    "tensorboard": Variables(("TENSORBOARD_LOGGING_DIR",), folder="TENSORBOARD_LOGGING_DIR"),
    "swanlab": Variables(("SWANLAB_PROJ_NAME", "SWANLAB_API_KEY"), "SWANLAB_PROJ_NAME", "SWANLAB_LOGDIR"),
}
SWITCHES = {"wandb": "WANDB_MODE", "swanlab": "SWANLAB_MODE"}
"""Variables whose value "disabled" switches a service off."""


def configured_loggers() -> tuple[LoggerName, ...]:
    """The services that the environment configures and does not switch off, in the order of VARIABLES."""
    return tuple(name for name, variables in VARIABLES.items() if _is_configured(name, variables))


def with_variables(run: LoggedRun, name: LoggerName) -> LoggedRun:
    """The run with the project and the folder that the environment sets for a service, where the run has none."""
    variables = VARIABLES[name]
    return run.model_copy(
        update={
            "project": run.project or _value(variables.project) or "ostinato",
            "folder": run.folder or _value(variables.folder) or "ostinato-logs",
        }
    )


def _is_configured(name: LoggerName, variables: Variables) -> bool:
    if _value(SWITCHES.get(name)) == "disabled":
        return False
    return any(_value(variable) for variable in variables.configured)


def _value(variable: str | None) -> str:
    return os.environ.get(variable, "") if variable else ""
